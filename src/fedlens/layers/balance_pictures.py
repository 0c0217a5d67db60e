"""What a client generated, beside real images, and the gap between the two in the space of
features, before and after alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlens.core.extras import is_installed
from fedlens.core.federation import Federation
from fedlens.core.message import Message
from fedlens.core.picture import Picture, first_of_each_class, real_above_made
from fedlens.core.tree import Tree

if TYPE_CHECKING:
    from fedlens.layers.balance import Balance

_POINTS = 60  # images of each kind and class in the projection
_COLOURS = 10  # classes in the projection


def show(
    layer: Balance,
    state: Message,
    federation: Federation,
    memory: Callable[[int], Mapping[str, Tree]],
) -> Sequence[Picture]:
    """Of the client that holds most, and so has the highest balance point, among those that
    remember shifts; among all where none does.
    """
    from fedlens.layers.balance import ALIGN

    reference = federation.test
    if reference is None or not len(reference):
        return ()
    clients = [
        i
        for i, held in enumerate(federation.holdings)
        if held is not None and layer.role(state, i) != "no"
    ]
    if not clients:
        return ()
    aligned = [i for i in clients if ALIGN in memory(i)]
    chosen = max(aligned or clients, key=lambda i: len(federation.holdings[i]))
    made = layer.filled(state, chosen, federation.holdings[chosen])
    if not made or next(iter(made.values())).dim() != 4:
        return ()
    names = layer._classes or [str(k) for k in range(layer.head.out_features)]
    real = first_of_each_class(reference, sorted(made), _POINTS)
    shift = layer.pace**0.5 * memory(chosen)[ALIGN]["shift"] if chosen in aligned else None
    shown = [sheet(real, made, names, chosen)]
    if is_installed("matplotlib"):
        shown.append(projection(layer.result(state), real, made, shift, names, chosen))
    return shown


def sheet(
    real: Mapping[int, Tensor], made: Mapping[int, Tensor], names: Sequence[str], client: int
) -> Picture:
    tiles, labels = [], []
    for label in list(real)[:20]:
        tiles.append(real_above_made(real[label], as_floats(made[label])))
        labels.append(names[label])
    caption = f"Real images (above) and what client {client} generated (below)"
    return Picture(
        caption, tiles, labels, "sheet", {"generated": sum(len(t) for t in made.values())}
    )


def as_floats(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images


def projection(
    model: Any,
    real: Mapping[int, Tensor],
    made: Mapping[int, Tensor],
    shift: Tensor | None,
    names: Sequence[str],
    client: int,
) -> Picture:
    """The two directions in which real features spread most; everything is projected onto the same
    two.
    """
    place = next(model.parameters()).device
    with torch.no_grad():
        look = {label: model.features(x.to(place)).flatten(1).cpu() for label, x in real.items()}
        seen = {
            label: model.features(as_floats(made[label][:_POINTS]).to(place)).flatten(1).cpu()
            for label in real
        }
    moved = {label: z + shift[label] for label, z in seen.items()} if shift is not None else {}
    facts = {"gap before": round(gap(look, seen), 3)} | (
        {"gap after": round(gap(look, moved), 3)} if moved else {}
    )
    panels = [("generated", seen)] + ([("generated and aligned", moved)] if moved else [])
    caption = (
        f"Features of real images (dots) and of client {client}'s generated ones (crosses), "
        + ("without and with its learned shifts" if moved else "no shifts were remembered")
    )
    return Picture(
        caption, draw(look, panels, names), [title for title, _ in panels], "image", facts
    )


def gap(real: Mapping[int, Tensor], made: Mapping[int, Tensor]) -> float:
    """Mean over classes of the distance between class means, in units of how far real samples lie
    from theirs.
    """
    far = [float((real[c].mean(0) - made[c].mean(0)).norm()) for c in made if len(made[c])]
    spread = [float((real[c] - real[c].mean(0)).norm(dim=1).mean()) for c in made if len(made[c])]
    return sum(f / max(s, 1e-12) for f, s in zip(far, spread, strict=True)) / max(1, len(far))


def draw(
    real: Mapping[int, Tensor],
    panels: Sequence[tuple[str, Mapping[int, Tensor]]],
    names: Sequence[str],
) -> list[Tensor]:
    """One picture a panel, all with the same axes. Large marks are the means of the classes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    everything = torch.cat(list(real.values()))
    mean = everything.mean(0)
    _, _, v = torch.linalg.svd(everything - mean, full_matrices=False)

    def flat(z: Tensor) -> Any:
        return ((z - mean) @ v[:2].T).T.numpy()

    all_points = torch.cat([everything, *(z for _, made in panels for z in made.values())])
    x, y = flat(all_points)
    edge = [
        (v.min() - 0.04 * (v.max() - v.min()), v.max() + 0.04 * (v.max() - v.min())) for v in (x, y)
    ]
    pictures = []
    for _, made in panels:
        figure, ax = plt.subplots(figsize=(5.4, 4.2), layout="constrained")
        for k, label in enumerate(list(real)[:_COLOURS]):
            ax.plot(*flat(real[label]), ".", color=f"C{k}", alpha=0.25, markersize=4)
            ax.plot(*flat(made[label]), "x", color=f"C{k}", alpha=0.6, markersize=4)
            ax.plot(
                *flat(real[label].mean(0, keepdim=True)),
                "o",
                color=f"C{k}",
                markersize=9,
                markeredgecolor="black",
                label=names[label],
            )
            ax.plot(
                *flat(made[label].mean(0, keepdim=True)),
                "X",
                color=f"C{k}",
                markersize=9,
                markeredgecolor="black",
            )
        ax.set(xticks=[], yticks=[], xlim=edge[0], ylim=edge[1])
        ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.canvas.draw()
        width, height = figure.canvas.get_width_height()
        pixels = torch.frombuffer(bytearray(figure.canvas.buffer_rgba()), dtype=torch.uint8)  # type: ignore[attr-defined]
        pictures.append(pixels.view(height, width, 4)[..., :3].permute(2, 0, 1).float() / 255)
        plt.close(figure)
    return pictures
