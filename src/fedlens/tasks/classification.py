"""Image classification: cross-entropy, accuracy over all images and over classes, a confusion
matrix, labels for a user's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Data, Output
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Natural, Positive, Several, Share
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.models.by_name import is_own, make_own
from fedlens.models.classification import (
    Stem,
    classifier,
    published_pixels,
    published_weights,
)
from fedlens.models.norms import Norm

SHEET_IMAGES = 24  # images on the sheet
LISTED = 20  # up to this many classes, each one's accuracy is a metric of its own


class Classification(LearningTask):
    """
    Args:
        model: cnn, niid, resnet8, resnet18, timm:NAME or module:Class, a network of your own that
            gets pixels in [0, 1] and, where it asks for them, classes, channels and size.
        classes: how many there are.
        channels: of the images.
        size: of the images, in pixels.
        stem: resnet18's first layers.
        norm: batch or group normalisation, where the network has any.
        mean: of the pixels in [0, 1], one number or one per channel.
        std: of the pixels in [0, 1], one number or one per channel.
        smoothing: of the labels.
        evaluation_batch: images at a time.
        names: of the classes, for `apply`, where the data does not name them.
        projection: width of a projection in front of the head (MOON's paper has 256); 0 is none.
        init: weights to start from.
        pretrained: weights of the same network trained for something else (true, a path,
            hub:OWNER/NAME), with the pixels' mean and std that they are used to.
    """

    def __init__(
        self,
        model: str = "cnn",
        classes: Several = 10,
        channels: Count = 3,
        size: Count = 32,
        stem: Stem = "cifar",
        norm: Norm = "batch",
        mean: tuple[float, ...] | None = None,
        std: tuple[Positive, ...] | None = None,
        smoothing: Share = 0.0,
        evaluation_batch: Count = 250,
        names: tuple[str, ...] = (),
        projection: Natural = 0,
        init: str | None = None,
        pretrained: bool | str = False,
    ) -> None:
        self.init, self.pretrained = init, pretrained
        usual = published_pixels(model, channels) if pretrained else ((0.5,), (0.25,))
        if projection:
            self.heads = ("head.*", "body.1.*", "body.3.*")
        if names and len(names) != classes:
            raise ValueError(f"{len(names)} names for {classes} classes")
        self.network, self.classes, self.channels, self.size, self.projection = (
            model,
            classes,
            channels,
            size,
            projection,
        )
        self.own_network = is_own(model)
        if self.own_network and projection:
            raise ValueError(f"a projection can be put into our own networks only, not {model}")
        self.stem: Stem = stem
        self.norm: Norm = norm
        self.mean, self.std, self.smoothing, self.evaluation_batch, self.names = (
            usual[0] if mean is None else mean,
            usual[1] if std is None else std,
            smoothing,
            evaluation_batch,
            tuple(names),
        )

    shared = ("size", "classes", "channels", "names")
    telling = ("accuracy_balanced", "accuracy_worst_class", "accuracy_class_")

    @classmethod
    def arguments_from_facts(cls, facts: Facts) -> dict[str, Any]:
        """How many classes, what they are called, and the images' channels and size."""
        known: dict[str, Any] = {}
        if len(facts.classes) > 1:
            known |= {"classes": len(facts.classes), "names": facts.classes}
        if len(facts.shape) == 3:
            known["channels"] = facts.shape[0]
            known |= {"size": facts.shape[1]} if facts.shape[1] == facts.shape[2] else {}
        return known

    @classmethod
    def arguments_from_weights(
        cls, weights: Mapping[str, Tensor], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The last matrix has a row for each class, whatever its layer is called."""
        matrices = [w for n, w in weights.items() if n.endswith(".weight") and w.dim() == 2]
        last = weights.get("head.weight", matrices[-1] if matrices else None)
        return {} if last is None or last.dim() != 2 else {"classes": len(last)}

    def model(self) -> nn.Module:
        if self.own_network:
            sizes = {"classes": self.classes, "channels": self.channels, "size": self.size}
            return make_own(self.network, **sizes)
        return classifier(
            self.network,
            self.classes,
            channels=self.channels,
            size=self.size,
            stem=self.stem,
            norm=self.norm,
            mean=self.mean,
            std=self.std,
            projection=self.projection,
        )

    def published(self) -> dict[str, Tensor]:
        if self.network == "resnet18" and self.stem != "imagenet":
            raise ValueError("the published resnet18 has another stem: set task.stem=imagenet")
        return published_weights(self.network, self.channels, self.size)

    def fits(self, facts: Facts) -> None:
        held, shape = len(facts.classes), facts.shape
        if held > self.classes:
            raise ValueError(
                f"the data has {held} classes, but the task says {self.classes}: set"
                f" task.classes={held}"
            )
        if not shape:
            return
        if shape[0] != self.channels:
            raise ValueError(
                f"the images have {shape[0]} channels, but the task says {self.channels}: set"
                f" task.channels={shape[0]}"
            )
        if self.network in ("cnn", "niid") and shape[1:] != (self.size, self.size):
            size = (
                f"set task.size={shape[1]}"
                if shape[1] == shape[2]
                else "set data.size to make them square"
            )
            raise ValueError(
                f"the images are {shape[2]}x{shape[1]}, but {self.network} was told"
                f" {self.size}x{self.size}: {size}"
            )

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"], label_smoothing=self.smoothing)

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        """Accuracy first. Per-class figures only where every class is present: elsewhere they would
        not be comparable.
        """
        loss, table = self._confusion(result, data)
        held, right = table.sum(1), table.diagonal()
        metrics = {"accuracy": float(right.sum() / held.sum()), "loss": loss}
        if bool((held > 0).all()):
            each = right / held
            metrics |= {
                "accuracy_balanced": float(each.mean()),
                "accuracy_worst_class": float(each.min()),
            }
            if self.classes <= LISTED:
                metrics |= {f"accuracy_class_{k}": float(a) for k, a in enumerate(each)}
        return metrics

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        data = federation.test
        if data is None or not len(data):
            return ()
        names = self.class_names(federation.facts.classes)
        return [self._sheet(result, data, names), self._matrix(result, data, names)]

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """A CSV with one row per image: file, label, confidence."""
        from fedlens.tasks.apply.labels import label_images

        check_options(self, options)
        return label_images(self, folder, source, target)

    def _confusion(self, result: nn.Module, data: Data) -> tuple[float, Tensor]:
        """Mean loss, and counts with the truth in rows and the prediction in columns."""
        place = next(result.parameters()).device
        table = torch.zeros(self.classes, self.classes, dtype=torch.float64)
        total = 0.0
        with torch.no_grad():
            for batch in in_batches(data, self.evaluation_batch, place):
                scores, y = self.forward(result, batch).prediction.float(), batch["y"]
                total += float(F.cross_entropy(scores, y, reduction="sum"))
                pairs = (y * self.classes + scores.argmax(1)).cpu()
                table += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, -1)
        return total / max(1, len(data)), table

    def _sheet(self, result: nn.Module, data: Data, names: Sequence[str]) -> Picture:
        """Images at even distances through the test set, whatever the model makes of them."""
        index = torch.linspace(0, len(data) - 1, min(SHEET_IMAGES, len(data))).long()
        batch = data.batch(index)
        place = next(result.parameters()).device
        with torch.no_grad():
            predicted = (
                self.forward(result, {k: v.to(place) for k, v in batch.items()})
                .prediction.argmax(1)
                .tolist()
            )
        return label_sheet(batch["x"], predicted, batch["y"].tolist(), names)

    def _matrix(self, result: nn.Module, data: Data, names: Sequence[str]) -> Picture:
        _, table = self._confusion(result, data)
        return confusion_picture(table, names)

    def class_names(self, known: Sequence[str] | None) -> Sequence[str]:
        """What the data calls its classes, else what the recipe does, else their numbers."""
        if known is not None and len(known) == self.classes:
            return known
        return self.names or [str(k) for k in range(self.classes)]


def label_sheet(
    images: Tensor, predicted: Sequence[int], truth: Sequence[int], names: Sequence[str]
) -> Picture:
    """Images with what a classifier says about them, and what they are where that is wrong."""
    pairs = list(zip(predicted, truth, strict=True))
    labels = [names[p] if p == t else f"{names[p]} (is {names[t]})" for p, t in pairs]
    facts = {"right": sum(p == t for p, t in pairs), "shown": len(labels)}
    return Picture("Test images and what the model says", list(images), labels, "sheet", facts)


def confusion_picture(table: Tensor, names: Sequence[str]) -> Picture:
    """table: counts, with the truth in rows and the prediction in columns."""
    shares = table / table.sum(1, keepdim=True).clamp_min(1)
    wide = max(1, 200 // len(table))
    pixels = shares.float()[None].repeat_interleave(wide, 1).repeat_interleave(wide, 2)
    facts = {"classes": list(names), "counts": table.long().tolist()}
    return Picture(
        "Confusion matrix: truth in rows, prediction in columns",
        [pixels],
        ["share of each row"],
        "map",
        facts,
    )
