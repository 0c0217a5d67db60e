"""Segmentation: a class for every pixel, judged by intersection over union at several resolutions.

Loss: cross-entropy, the mean over the pixels of an image that have a class, then over images. IoU
of a class: pixels of the whole test set that are it and are called it, over those that are either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Output
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Several
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.data.images.masks import IGNORED, Masked
from fedlens.data.pose.people import ImageSize
from fedlens.models.by_name import is_own, load_own, make_own
from fedlens.models.norms import Norm, with_norm
from fedlens.models.segmentation import MULTIPLES, segmenter

CLASS_COLOURS = torch.tensor(
    [[0, 0, 0], [230, 60, 50], [60, 110, 240], [90, 190, 90], [240, 200, 60], [170, 90, 200],
     [70, 200, 210], [240, 140, 60]]
) / 255  # fmt: skip
SHOWN = 3  # test images in the report


class Segmentation(LearningTask):
    """
    Args:
        network: dilated (the fewest weights), unet, or module:Class, a network of your own that
            gives scores (N, classes, H, W) and is told classes and channels where it asks.
        classes: how many there are, the background among them.
        channels: of the images.
        width: channels of the first layer of our networks.
        norm: batch or group normalisation.
        background: class 0 is the ground, and does not count in the mean IoU.
        sizes: resolutions (height, width) to evaluate at; the data's own if none.
        names: of the classes, where the data does not name them.
        test_batch: images at a time.
        init: weights to start from.
        pretrained: weights of the same network for other classes: a path, hub:OWNER/NAME.
    """

    shared = ("classes", "names")
    telling = ("iou_class_",)

    def __init__(
        self,
        network: str = "unet",
        classes: Several = 2,
        channels: Count = 3,
        width: Count = 8,
        norm: Norm = "batch",
        background: bool = True,
        sizes: tuple[tuple[int, int], ...] = (),
        names: tuple[str, ...] = (),
        test_batch: Count = 64,
        init: str | None = None,
        pretrained: bool | str = False,
    ) -> None:
        self.network, self.classes, self.channels, self.width = network, classes, channels, width
        self.norm: Norm = norm
        self.background, self.sizes, self.names = background, tuple(sizes), tuple(names)
        self.test_batch, self.init, self.pretrained = test_batch, init, pretrained
        self.own_network = is_own(network)
        if not self.own_network and network not in MULTIPLES:
            known = ", ".join(MULTIPLES)
            raise ValueError(f"no network {network!r}: there are {known} or module:Class")
        own = load_own(network) if self.own_network else None
        self.multiple = int(getattr(own, "multiple", 1)) if own else MULTIPLES[network]
        for size in self.sizes:
            self.check_size(size)

    def check_size(self, size: ImageSize) -> None:
        if min(size) < 8 or any(side % self.multiple for side in size):
            raise ValueError(
                f"a resolution of {size[0]}x{size[1]} does not fit {self.network}, whose inputs are"
                f" multiples of {self.multiple} and at least 8"
            )

    @classmethod
    def arguments_from_facts(cls, facts: Facts) -> dict[str, Any]:
        known = len(facts.classes) > 1
        return {"classes": len(facts.classes), "names": facts.classes} if known else {}

    @classmethod
    def arguments_from_weights(
        cls, weights: Mapping[str, Tensor], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The head has a row for each class and a column for each channel of the first layer."""
        head = weights.get("head.weight")
        if head is None or head.dim() != 4:
            return {}
        network = "unet" if any(n.startswith("up_fine.") for n in weights) else "dilated"
        return {"network": network, "classes": len(head), "width": head.shape[1]}

    def fits(self, facts: Facts) -> None:
        if len(facts.classes) > self.classes:
            raise ValueError(
                f"the data has {len(facts.classes)} classes, but the task says {self.classes}: set"
                f" task.classes={len(facts.classes)}"
            )
        for size in set(facts.resolutions):
            self.check_size(size)

    def model(self) -> nn.Module:
        if self.own_network:
            return make_own(self.network, classes=self.classes, channels=self.channels)
        net = segmenter(self.network, self.classes, self.channels, self.width)  # type: ignore[arg-type]
        return with_norm(net, self.norm)

    def loss(self, output: Output, batch: Batch) -> Tensor:
        y = batch["y"]
        each = F.cross_entropy(output.prediction, y, ignore_index=IGNORED, reduction="none")
        return (each.sum((1, 2)) / (y != IGNORED).sum((1, 2)).clamp_min(1)).mean()

    def distance(self, prediction: Any, target: Any) -> Tensor:
        """Kullback-Leibler divergence per pixel: the reduction of cross-entropy."""
        each = F.kl_div(prediction.log_softmax(1), target.softmax(1), reduction="none")
        mean: Tensor = each.sum(1).mean()
        return mean

    # -- how good ----------------------------------------------------------------------------------

    def evaluate(self, result: Any, data: Masked) -> dict[str, float]:
        """The mean over resolutions first, then each resolution, then, at the first of them, each
        class."""
        sizes = self.sizes or (data.size,)
        counts = [self._confusion(result, data.at(size)) for size in sizes]
        means = [self.mean_iou(c) for c in counts]
        named = {f"iou_{h}x{w}": m for (h, w), m in zip(sizes, means, strict=True)}
        each = {f"iou_class_{k}": v for k, v in enumerate(ious(counts[0])) if v is not None}
        return {"iou": sum(means) / len(means), **named, **each}

    def mean_iou(self, counts: Tensor) -> float:
        """Of the classes that are there, in per cent; without the ground, if there is one."""
        first = 1 if self.background else 0
        found = [v for v in ious(counts)[first:] if v is not None]
        return sum(found) / max(1, len(found))

    def references(self, start: Any, data: Any) -> dict[str, dict[str, float]]:
        """One mask for everybody: where the test images most often show something, at the threshold
        that scores best. Nobody without a network could know it so well."""
        if not isinstance(data, Masked) or not len(data) or not self.background:
            return {}
        y = data.batch(torch.arange(len(data)))["y"]
        shares = torch.stack([(y == k).float().mean(0) for k in range(self.classes)])
        something = shares[1:].sum(0)
        likeliest = shares[1:].argmax(0) + 1
        guesses = [torch.where(something > t / 10, likeliest, 0) for t in range(10)]
        best = max(self.mean_iou(table_of(y, g.expand_as(y), self.classes)) for g in guesses)
        return {"one mask for everybody": {"iou": best}}

    def _confusion(self, model: nn.Module, data: Masked) -> Tensor:
        """Pixels with the truth in rows and the prediction in columns."""
        place = next(model.parameters()).device
        table = torch.zeros(self.classes, self.classes, dtype=torch.long)
        with torch.no_grad():
            for batch in in_batches(data, self.test_batch, place):
                found = self.forward(model, batch).prediction.argmax(1)
                table += table_of(batch["y"].cpu(), found.cpu(), self.classes)
        return table

    # -- to look at, to use ------------------------------------------------------------------------

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        data = federation.test
        if data is None or not len(data):
            return ()
        sizes = self.sizes or (data.size,)
        place, out = next(result.parameters()).device, []
        for k in range(min(SHOWN, len(data))):
            images, labels = [], []
            truth = data.batch(torch.tensor([k]))
            images.append(painted(truth["x"][0], truth["y"][0], data.size))
            labels.append("truth")
            for size in sizes:
                x = data.at(size).batch(torch.tensor([k]))["x"]
                with torch.no_grad():
                    found = result(x.to(place)).argmax(1)[0].cpu()
                images.append(painted(x[0], found, data.size))
                labels.append(f"{size[0]}x{size[1]}")
            out.append(
                Picture(f"Test image {k}: found at each resolution", images, labels, "sheet")
            )
        return out

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """A mask for every image of a file or folder, as PNG whose levels are the classes, and the
        image with its classes painted over. Option size (HxW): at which the network looks."""
        from fedlens.tasks.apply.masks import segment_images

        check_options(self, options, "size")
        return segment_images(self, folder, source, target, options)


def table_of(truth: Tensor, found: Tensor, classes: int) -> Tensor:
    known = truth < classes
    pairs = truth[known] * classes + found[known]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def ious(counts: Tensor) -> list[float | None]:
    """Of each class in per cent; None of one that is neither there nor found."""
    both = counts.diagonal()
    either = counts.sum(0) + counts.sum(1) - both
    return [100 * float(b) / float(e) if e else None for b, e in zip(both, either, strict=True)]


def painted(image: Tensor, classes: Tensor, size: ImageSize, least: int = 192) -> Tensor:
    """Classes in colour over a picture in grey, blocks stay blocks. Unknown pixels are black."""
    shown = (classes != IGNORED).float()
    colour = CLASS_COLOURS[classes.clamp(0, IGNORED - 1) % len(CLASS_COLOURS)].permute(2, 0, 1)
    ground = image.mean(0, keepdim=True).expand(3, -1, -1) * shown
    over = torch.where(classes[None] == 0, ground, 0.4 * ground + 0.6 * colour)
    factor = max(1, -(-least // size[0]))
    sides = (size[0] * factor, size[1] * factor)
    return F.interpolate(over[None], size=sides, mode="nearest")[0].clamp(0, 1)
