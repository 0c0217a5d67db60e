"""Weights from a file: safetensors, or a torch file read with weights_only. Nothing is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.files import find_named


class Misfit(ValueError):
    """Weights of another network than the one they were to go into."""


def result_file(place: Path) -> Path:
    """Where the weights are: in a run's folder under their name, or in the file that was named."""
    return place if place.is_file() else place / "model.safetensors"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A state dict; the usual wrappings ("params", "state_dict", a "module." prefix) are taken
    off.
    """
    file = find_named(str(path))
    if file is None or not file.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    found = _load(file)
    for key in ("params_ema", "params", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{file} holds no weights: named arrays are needed")
    return _generator({n.removeprefix("module."): t for n, t in found.items()})


def _generator(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a file that holds a whole training, as those of BasicVSR and its kin do: the network that
    makes pictures, smoothed where that is there too.
    """
    others = ("generator", "discriminator", "perceptual_loss", "pixel_loss", "step_counter")
    if any(n.split(".")[0].removesuffix("_ema") not in others for n in weights):
        return weights
    for prefix in ("generator_ema.", "generator."):
        inner = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        if inner:
            return inner
    return weights


def _load(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as e:  # of another file, torch's reader stumbles over whatever comes first
        raise ValueError(
            f"{file} cannot be read as weights: it is damaged, or no file of arrays by safetensors"
            " or torch"
        ) from e


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Strict: names and shapes must agree, and the error says where they do not."""
    model.load_state_dict(check_fit(read_weights(path), model, path))
    return model


def check_fit(
    weights: dict[str, Tensor], model: nn.Module, source: str | Path
) -> dict[str, Tensor]:
    """The weights, or an error that says what they are (where we know) and in which names and
    shapes they differ.
    """
    own = model.state_dict()
    # nothing in use depends on the step counter of BatchNorm, and old files have none
    counters = {n: t for n, t in own.items() if n.endswith("num_batches_tracked")}
    if not counters.keys() & weights.keys():
        weights = {**counters, **weights}
    odd = sorted(weights.keys() ^ own.keys())
    shapes = [n for n, t in weights.items() if n in own and t.shape != own[n].shape]
    if not odd and not shapes:
        return weights
    reasons = [
        f"{n} is {tuple(weights[n].shape)}, expected {tuple(own[n].shape)}" for n in shapes[:3]
    ]
    reasons += [f"{len(shapes) - 3} more shapes differ"] if len(shapes) > 3 else []
    if odd:
        side = "missing in the file" if odd[0] in own else "unknown to the model"
        reasons.append(f"{odd[0]} is {side} ({len(odd)} names differ)")
    # A network of a known family can say what these weights are.
    recognise = getattr(model, "recognise", lambda weights: None)
    theirs, ours = recognise(weights), recognise(own)
    if theirs and ours and theirs != ours:
        reasons.insert(0, f"the file holds {theirs}; the model is {ours}")
    if hasattr(model, "translate"):
        reasons.append("task.pretrained takes what fits of weights for something else")
    raise Misfit(f"{source} does not fit {type(model).__name__}: " + "; ".join(reasons))


# -- weights that were made elsewhere, for something else ------------------------------------------


def adopt_weights(
    model: nn.Module, weights: dict[str, Tensor], source: str | Path, heads: Sequence[str]
) -> list[str]:
    """Start a network from weights that were trained for something else: all of its body must be
    there, under the same names, below another prefix ("body.1.conv1" as "conv1"), or, with other
    names, in the same order with the same shapes, which is warned about. Of the head (`heads` are
    patterns of its names) only what fits is taken. A network that knows relatives of its family
    (`translate`) brings their weights into its own form first, and what became of them is said.

    Returns the names that stay as they were.
    """
    own = model.state_dict()
    parts = list(heads)
    translate: Callable[[dict[str, Tensor]], Translated | None] | None
    translate = getattr(model, "translate", None)
    known = translate(weights) if translate else None
    if known is not None:
        weights = known.weights
        parts += known.fresh
    body = [n for n in own if not any(fnmatchcase(n, pattern) for pattern in parts)]
    found = _by_name(body, weights) or _by_order(body, own, weights, source)
    if found is None:
        stripped = _common_prefix(body)
        absent = (n for n in body if not {n, n.removeprefix(stripped)} & weights.keys())
        missing = next(absent, body[0])
        raise Misfit(
            f"{source} does not fit {type(model).__name__}: {missing} is missing in the file, which"
            f" begins with {next(iter(weights), 'nothing')}"
        )
    weights = weights | _resized_positions(own, found, weights, source)
    if odd := [n for n, theirs in found.items() if weights[theirs].shape != own[n].shape]:
        shapes = f"{tuple(weights[found[odd[0]]].shape)}, expected {tuple(own[odd[0]].shape)}"
        raise Misfit(
            f"{source} does not fit {type(model).__name__}: {odd[0]} is {shapes}"
            + (f" ({len(odd)} shapes differ)" if len(odd) > 1 else "")
        )
    taken = found | _head(own, body, weights, set(found.values()))
    model.load_state_dict({**own, **{n: weights[theirs] for n, theirs in taken.items()}})
    left = [n for n in own if n not in taken]
    if known is not None:
        warnings.warn(_said(known, len(taken), left, source), stacklevel=2)
    return left


@dataclass(frozen=True)
class Translated:
    """Weights of a relative under a network's own names. dropped: what of the file has no place.
    changed: what was brought to another form. fresh: patterns of names that the relative lacks."""

    weights: dict[str, Tensor]
    dropped: list[str]
    changed: list[str]
    fresh: list[str]


def _said(known: Translated, taken: int, left: list[str], source: str | Path) -> str:
    """One line: what was taken, changed, dropped and initialised."""
    parts = [f"{source}: {taken} arrays taken"]
    parts += [f"changed: {', '.join(known.changed)}"] if known.changed else []
    parts += [f"dropped: {', '.join(_groups(known.dropped))}"] if known.dropped else []
    parts += [f"initialised: {', '.join(_groups(left))}"] if left else []
    return "; ".join(parts)


def _groups(names: Sequence[str]) -> list[str]:
    """ "blocks.0.attn.lpe.weight" and eleven more like it: "blocks.*.attn.lpe.weight (12)"."""
    count = Counter(re.sub(r"\.\d+\.", ".*.", n) for n in names)
    shown = [f"{n} ({k})" if k > 1 else n for n, k in count.items()]
    return [*shown[:6], f"and {len(shown) - 6} more kinds"] if len(shown) > 7 else shown


def _common_prefix(names: Sequence[str]) -> str:
    """ "body.1." of names that all begin so."""
    shared: list[str] = []
    for tokens in zip(*(n.split(".")[:-1] for n in names), strict=False):
        if len(set(tokens)) > 1:
            break
        shared.append(tokens[0])
    return "".join(f"{token}." for token in shared)


def _by_name(body: Sequence[str], weights: dict[str, Tensor]) -> dict[str, str] | None:
    """Own name -> the file's. BatchNorm's step counter may be missing: old files have none."""
    needed = [n for n in body if not n.endswith("num_batches_tracked")]
    tokens = _common_prefix(needed).split(".")
    ours = [".".join(tokens[:k]) + "." if k else "" for k in range(len(tokens))]
    theirs = dict.fromkeys(["", *(f"{n.split('.')[0]}." for n in weights if "." in n)])
    for prefix in ours:
        for other in theirs:
            names = {n: other + n.removeprefix(prefix) for n in body}
            if all(names[n] in weights for n in needed):
                return {n: found for n, found in names.items() if found in weights}
    return None


def _by_order(
    body: Sequence[str], own: dict[str, Tensor], weights: dict[str, Tensor], source: str | Path
) -> dict[str, str] | None:
    """The first arrays of the file, if each has the kind (weight, bias, ...) and the shape of ours:
    the same network, written down by somebody else.
    """
    pairs = list(zip(body, weights, strict=False))
    alike = len(pairs) == len(body) and all(
        ours.split(".")[-1] == theirs.split(".")[-1] and own[ours].shape == weights[theirs].shape
        for ours, theirs in pairs
    )
    if not alike:
        return None
    warnings.warn(
        f"the names in {source} are others ({pairs[0][1]} for {pairs[0][0]}), but its arrays have"
        " the same shapes in the same order: they are taken in that order",
        stacklevel=2,
    )
    return dict(pairs)


def _resized_positions(
    own: dict[str, Tensor], found: dict[str, str], weights: dict[str, Tensor], source: str | Path
) -> dict[str, Tensor]:
    """A transformer's position vectors, where the file is for images of another size."""
    resized: dict[str, Tensor] = {}
    for ours, theirs in found.items():
        given, wanted = weights[theirs], own[ours]
        if ours.endswith("pos_embed") and given.shape != wanted.shape:
            made = positions_for(given, tuple(wanted.shape))
            resized |= {} if made is None else {theirs: made}
    if resized:
        warnings.warn(
            f"{source} is for images of another size: its position vectors are interpolated",
            stacklevel=3,
        )
    return resized


def positions_for(positions: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """(1, tokens, width), from one square grid of patches to another: bicubic, as is usual. Tokens
    in front of the grid, such as that of the class, stay. None where these are no such grids."""
    if positions.dim() != 3 or len(shape) != 3 or positions.shape[2] != shape[2]:
        return None
    for front in range(3):
        old, new = (math.isqrt(max(0, n - front)) for n in (positions.shape[1], shape[1]))
        if old and new and (old**2 + front, new**2 + front) == (positions.shape[1], shape[1]):
            each = resize_grid(positions[:, front:], (old, old), (new, new), antialias=True)
            return torch.cat([positions[:, :front], each], 1)
    return None


def resize_grid(
    each: Tensor, old: tuple[int, int], new: tuple[int, int], antialias: bool
) -> Tensor:
    """(1, rows x columns, width): a vector for each patch, for another grid of them."""
    maps = each.transpose(1, 2).reshape(1, -1, *old).float()
    maps = F.interpolate(maps, new, mode="bicubic", align_corners=False, antialias=antialias)
    return maps.flatten(2).transpose(1, 2).to(each.dtype)


def _head(
    own: dict[str, Tensor], body: Sequence[str], weights: dict[str, Tensor], used: set[str]
) -> dict[str, str]:
    """What fits of the head: by its names, or, of a head called otherwise, all or nothing."""
    mine = [n for n in own if n not in set(body)]
    left = [n for n in weights if n not in used]
    if any(n in left for n in mine):
        return {n: n for n in mine if n in left and weights[n].shape == own[n].shape}
    # safetensors files are in the order of the alphabet, with a bias before its weight
    kind = {(n.split(".")[-1], weights[n].shape): n for n in left}
    found = {n: kind.get((n.split(".")[-1], own[n].shape)) for n in mine}
    taken = {n: theirs for n, theirs in found.items() if theirs is not None}
    return taken if len(taken) == len(mine) == len(left) == len(kind) else {}


def weights_of_package(name: str) -> dict[str, Tensor]:
    """The one file of weights that an installed package carries; the package is not imported."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"no package {name} is installed: pip install {name}")
    root = Path(next(iter(found.submodule_search_locations)))
    files = sorted(p for p in root.rglob("*") if p.suffix in (".pth", ".pt", ".safetensors"))
    if len(files) != 1:
        listed = ", ".join(p.name for p in files) or "none"
        raise ValueError(f"the package {name} has not one file of weights: {listed}")
    return read_weights(files[0])


@contextlib.contextmanager
def fetching(what: str) -> Iterator[None]:
    """Weights that come over a network. Whatever prevents it is one sentence, in place of all that
    a hub says about each of its attempts.
    """
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    except ValueError:
        raise
    except Exception as e:  # of a network, anything may come
        why = " ".join(str(e).split()).partition(". ")[0][:200]
        raise ValueError(
            f"the weights of {what} cannot be fetched ({why}): bring the file here by other means"
            " and set task.pretrained=PATH"
        ) from e
    finally:
        hub.setLevel(before)


def weights_from_hub(name: str) -> dict[str, Tensor]:
    """ "OWNER/NAME" on the Hugging Face hub: model.safetensors, else pytorch_model.bin."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError('weights from a hub need: pip install "fedlens[models]"') from None
    with fetching(name):
        try:
            file = hf_hub_download(name, "model.safetensors")
        except LocalEntryNotFoundError:  # the hub cannot be reached: nor for another file
            raise
        except EntryNotFoundError:
            file = hf_hub_download(name, "pytorch_model.bin")
    return read_weights(file)
