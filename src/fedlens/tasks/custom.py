"""A task of one's own in a few words: a network, a loss, metrics. What `fedlens.fit` trains, and a
recipe can name as well:

    [task]
    name = "Custom"
    model = "my_net:Net"
    loss = "cross_entropy"                        # of torch.nn.functional, or module:name
    metrics = {f1 = "my_metrics:f1"}

The network gets "x" of a batch, the loss what comes out and "y". Nothing else is assumed. Where the
outcome is scores of classes, accuracy is reported without being asked for, and the report shows a
sheet and a confusion matrix; where it is an image like the target, the two side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Data, Output
from fedlens.core.federation import Federation
from fedlens.core.imports import load_given
from fedlens.core.limits import Count
from fedlens.core.picture import Picture
from fedlens.core.task import LearningTask, check_options, in_batches
from fedlens.tasks.classification import SHEET_IMAGES, confusion_picture, label_sheet

_SHOWN = 3  # images beside their targets


class Custom(LearningTask):
    """
    Args:
        model: a network, or a class or function that makes one; from a recipe "module:Class".
        loss: (prediction, target) -> one number; the name of one in torch.nn.functional, or
            module:name.
        metrics: (prediction, target) -> number, averaged over batches by their examples, or objects
            of torchmetrics; by name, or a list.
        names: of the classes, where the data does not name them.
        evaluation_batch: examples at a time.
        init: weights to start from.
    """

    own_network = True

    def __init__(
        self,
        model: Any,
        loss: Any,
        metrics: Any = None,
        names: tuple[str, ...] = (),
        evaluation_batch: Count = 250,
        init: str | None = None,
    ) -> None:
        self.made = _load("model", model)
        if not isinstance(self.made, nn.Module) and not callable(self.made):
            raise ValueError(f"model must be a network or make one, not {model!r}")
        # torch's own by its plain name, or as `fit` writes it down
        plain = loss.removeprefix(f"{F.__name__}:") if isinstance(loss, str) else ""
        named = getattr(F, plain, None) if plain else None
        self.compute_loss: Any = named or _load("loss", loss)
        if not callable(self.compute_loss):
            raise ValueError(f"loss must be a function of prediction and target, not {loss!r}")
        self.measures = _named_metrics(metrics)
        self.names, self.evaluation_batch, self.init = tuple(names), evaluation_batch, init

    def model(self) -> nn.Module:
        """The network that was given starts as it is, weights and all; it is copied, never
        changed.
        """
        if isinstance(self.made, nn.Module):
            try:
                net = copy.deepcopy(self.made).cpu()
            except Exception as e:
                raise ValueError(
                    f"{type(self.made).__name__} cannot be copied ({e}): give a function that"
                    " makes it instead"
                ) from e
        else:
            net = self.made()
        if not isinstance(net, nn.Module):
            raise ValueError(f"model made a {type(net).__name__}, not a torch.nn.Module")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in net.parameters()):
            raise ValueError(
                f"{type(net).__name__} has lazy layers without shapes: send one batch through it"
                " before it is given"
            )
        return net

    def loss(self, output: Output, batch: Batch) -> Tensor:
        if isinstance(self.compute_loss, nn.Module):  # its weights go where the work is done
            self.compute_loss.to(batch["y"].device)
        loss = self.compute_loss(output.prediction, batch["y"])
        if not isinstance(loss, Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss must be one number, a mean over the batch, not {shape}")
        return loss

    # -- how well ----------------------------------------------------------------------------------

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        meters = {name: _meter(measure) for name, measure in self.measures.items()}
        total, count, place = 0.0, 0, _place(result)
        with torch.no_grad():
            for batch in in_batches(data, self.evaluation_batch, place):
                output, n = self.forward(result, batch), len(batch["x"])
                if not meters and _are_scores(output.prediction, batch["y"]):
                    meters["accuracy"] = _Mean(_accuracy)
                total += n * float(self.loss(output, batch))
                count += n
                for meter in meters.values():
                    meter.add(output.prediction, batch["y"], n)
        found: dict[str, float] = {}
        for name, meter in meters.items():
            found |= meter.read(name)
        return {**found, "loss": total / max(1, count)}

    # -- to be seen --------------------------------------------------------------------------------

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        data = federation.test
        if data is None or not len(data):
            return ()
        index = torch.linspace(0, len(data) - 1, min(SHEET_IMAGES, len(data))).long()
        batch = data.batch(index)
        place = _place(result)
        with torch.no_grad():
            made = self.forward(result, {k: v.to(place) for k, v in batch.items()}).prediction
        if not isinstance(made, Tensor) or not _are_images(batch["x"]):
            return ()
        made = made.detach().cpu()
        if _are_scores(made, batch["y"]):
            names = self.class_names(federation.facts.classes, made.shape[1])
            predicted, truth = made.argmax(1).tolist(), batch["y"].tolist()
            sheet = label_sheet(_shown(batch["x"]), predicted, truth, names)
            return [sheet, confusion_picture(self._confusion(result, data, len(names)), names)]
        if _are_images(made) and made.shape == batch["y"].shape:
            return _side_by_side(batch, made)
        return ()

    def _confusion(self, result: nn.Module, data: Data, classes: int) -> Tensor:
        table = torch.zeros(classes, classes, dtype=torch.float64)
        with torch.no_grad():
            for batch in in_batches(data, self.evaluation_batch, _place(result)):
                predicted = self.forward(result, batch).prediction.argmax(1)
                pairs = (batch["y"].long() * classes + predicted).cpu()
                table += torch.bincount(pairs, minlength=classes**2).view(classes, -1)
        return table

    def class_names(self, known: Sequence[str], classes: int) -> Sequence[str]:
        for names in (known, self.names):
            if len(names) == classes:
                return names
        return [str(k) for k in range(classes)]

    # -- to be used --------------------------------------------------------------------------------

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """Images of a file or folder through the network: a CSV of labels where it gives scores,
        else an image for each. Options: size (bring all to size x size), gray."""
        from fedlens.tasks.apply.images import send_images

        check_options(self, options, "size", "gray")
        return send_images(self, folder, source, target, **options)


def _load(what: str, given: Any) -> Any:
    return load_given(what, given) if isinstance(given, str) else given


def _place(model: nn.Module) -> torch.device:
    found = next(model.parameters(), None)
    return torch.device("cpu") if found is None else found.device


def _are_scores(prediction: Any, target: Tensor) -> bool:
    """Scores of classes, and their numbers?"""
    if not isinstance(prediction, Tensor) or prediction.dim() != 2 or target.dim() != 1:
        return False
    return prediction.shape[1] > 1 and not target.is_floating_point()


def _are_images(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] in (1, 3)


def _shown(images: Tensor) -> Tensor:
    """In [0, 1], also where a transform has normalised them: then each by its own range."""
    images = images.float()
    if images.numel() and images.min() >= 0 and images.max() <= 1:
        return images
    low, high = images.amin((1, 2, 3), True), images.amax((1, 2, 3), True)
    return (images - low) / (high - low).clamp_min(1e-8)


def _side_by_side(batch: Batch, made: Tensor) -> list[Picture]:
    out = []
    for k in range(min(_SHOWN, len(made))):
        images = [made[k].float().clamp(0, 1), batch["y"][k].float().clamp(0, 1)]
        labels = ["ours", "target"]
        if batch["x"].shape == made.shape:
            images, labels = [_shown(batch["x"][k : k + 1])[0], *images], ["input", *labels]
        out.append(Picture(f"Test example {k}", images, labels, "compare"))
    return out


# -- metrics ---------------------------------------------------------------------------------------


def _accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.argmax(1) == target).float().mean()


def _named_metrics(given: Any) -> dict[str, Any]:
    """By name, in their order: the first one is the headline."""
    if given is None or (isinstance(given, Sequence | Mapping) and not len(given)):
        return {}
    if not isinstance(given, Mapping):
        several = given if isinstance(given, list | tuple) else [given]
        loaded = [_load("metric", m) for m in several]
        given = {getattr(m, "__name__", type(m).__name__).lower(): m for m in loaded}
    found = {str(name): _load("metric", m) for name, m in given.items()}
    for name, metric in found.items():
        if not callable(metric):
            raise ValueError(
                f"the metric {name} must be a function of prediction and target, not {metric!r}"
            )
    return found


def _meter(measure: Any) -> _Mean | _Collected:
    collects = all(hasattr(measure, name) for name in ("update", "compute", "reset"))
    return _Collected(measure) if collects else _Mean(measure)


class _Mean:
    """A function's values, averaged over batches by their examples."""

    def __init__(self, measure: Callable[[Any, Tensor], Any]) -> None:
        self.measure, self.total, self.count = measure, 0.0, 0

    def add(self, prediction: Any, target: Tensor, n: int) -> None:
        self.total += n * float(self.measure(prediction, target))
        self.count += n

    def read(self, name: str) -> dict[str, float]:
        return {name: self.total / max(1, self.count)}


class _Collected:
    """An object of torchmetrics, which sees all batches before it gives its value."""

    def __init__(self, measure: Any) -> None:
        self.metric = copy.deepcopy(measure)
        self.metric.reset()

    def add(self, prediction: Any, target: Tensor, n: int) -> None:
        if hasattr(self.metric, "to"):
            self.metric.to(target.device)
        self.metric.update(prediction, target)

    def read(self, name: str) -> dict[str, float]:
        value = self.metric.compute()
        if isinstance(value, Mapping):
            return {str(k): float(v) for k, v in value.items()}
        if isinstance(value, Tensor) and value.numel() > 1:
            return {f"{name}_{k}": float(v) for k, v in enumerate(value.flatten())}
        return {name: float(value)}
