"""A task made of a network, a loss and metrics."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchvision.models import swin_t

from fedlens import Federation
from fedlens.core.client import Output
from fedlens.core.datasets import Listed
from fedlens.tasks import Custom


def plain(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.argmax(1) == target).float().mean()


def four() -> Listed:
    """Scores of an identity network. Predicted 0, 1, 0, 1; true 0, 1, 1, 1: three of four right."""
    x = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]])
    return Listed(TensorDataset(x, torch.tensor([0, 1, 1, 1])))


def test_metrics_by_hand() -> None:
    """Cross-entropy of a right answer is log(1 + e^-2) = 0.126928, of the wrong one 2.126928: the
    mean of four is 0.626928. Batches of three and one: a function's values are averaged by examples
    (2/3 * 3 + 1 * 1) / 4 = 0.75. Recall of the classes: 1 and 2/3."""
    task = Custom(
        nn.Identity(),
        "cross_entropy",
        {"plain": plain, "recall": MulticlassRecall(2, average=None)},
        evaluation_batch=3,
    )
    found = task.evaluate(nn.Identity(), four())
    assert found == pytest.approx(
        {"plain": 0.75, "recall_0": 1.0, "recall_1": 2 / 3, "loss": 0.626928}, abs=1e-6
    )
    assert list(found) == ["plain", "recall_0", "recall_1", "loss"]
    again = Custom(nn.Identity(), F.cross_entropy, [plain, MulticlassAccuracy(2, average="micro")])
    assert again.evaluate(nn.Identity(), four()) == pytest.approx(
        {"plain": 0.75, "multiclassaccuracy": 0.75, "loss": 0.626928}, abs=1e-6
    )


def test_accuracy_comes_unasked_where_classes_are_told_apart() -> None:
    task = Custom(nn.Identity(), nn.CrossEntropyLoss())
    assert list(task.evaluate(nn.Identity(), four())) == ["accuracy", "loss"]
    numbers = Listed(TensorDataset(torch.ones(3, 1), torch.zeros(3, 1)))
    assert Custom(nn.Identity(), "mse_loss").evaluate(nn.Identity(), numbers) == {"loss": 1.0}


def test_a_given_network_starts_as_it_is_and_stays_as_it_was() -> None:
    given = nn.Linear(2, 2)
    made = Custom(given, "mse_loss").model()
    assert torch.equal(made.weight, given.weight) and made.weight is not given.weight
    factory = Custom(lambda: nn.Linear(2, 2), "mse_loss")
    torch.manual_seed(1)
    a = factory.model()
    torch.manual_seed(1)
    assert torch.equal(a.weight, factory.model().weight)


def test_parts_called_features_and_head_are_used_only_where_they_are_all() -> None:
    """torchvision's Swin has both, and normalises and pools between them."""
    torch.manual_seed(0)
    net = swin_t(num_classes=3).eval()
    x = torch.rand(2, 3, 32, 32)
    task = Custom(net, "cross_entropy")
    with torch.no_grad():
        found, expected = task.forward(net, {"x": x}), net(x)
    assert torch.equal(found.prediction, expected) and found.features is None

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))  # type: ignore[no-any-return]

    split = Split().train()
    out = Custom(split, "mse_loss").forward(split, {"x": torch.ones(1, 4)})
    assert out.features is not None and out.features.shape == (1, 3) and split.training


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3, "mse_loss"), "model must be a network or make one"),
        ((nn.Linear(1, 1), 3), "loss must be a function"),
        ((nn.Linear(1, 1), "mse_lss"), "'mse_lss' is no reference"),
        ((nn.Linear(1, 1), "mse_loss", {"a": 3}), "the metric a must be a function"),
        (("<given in Python: Net>", "mse_loss"), "fedlens.fit"),
        (("nowhere_at_all:Net", "mse_loss"), "there is no module nowhere_at_all"),
    ],
)
def test_what_cannot_be_meant(arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Custom(*arguments)


def test_what_is_no_network_or_no_loss_is_found_out() -> None:
    with pytest.raises(ValueError, match="made a int, not a"):
        Custom(lambda: 3, "mse_loss").model()
    with pytest.raises(ValueError, match="lazy layers without shapes"):
        Custom(nn.LazyLinear(2), "mse_loss").model()
    each = Custom(nn.Identity(), lambda p, t: (p - t).square())
    with pytest.raises(ValueError, match=r"one number, a mean over the batch, not \(2, 1\)"):
        each.loss(Output(torch.ones(2, 1)), {"y": torch.ones(2, 1)})


def test_images_are_shown_and_labelled(tmp_path: Path) -> None:
    """An image network: dark or bright by its mean. Two files, one of each."""

    class Bright(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(10.0))

        def forward(self, x: Tensor) -> Tensor:
            score = self.by * (x.mean((1, 2, 3)) - 0.5)
            return torch.stack([-score, score], 1)

    from safetensors.torch import save_file

    x = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4), torch.ones(3, 4, 4)])
    test = TensorDataset(x, torch.tensor([0, 1, 0]))
    task = Custom(Bright(), "cross_entropy", names=("dark", "bright"))
    sheet, matrix = task.pictures(Bright(), Federation([test], test=test))
    assert sheet.labels == ["dark", "bright", "bright (is dark)"]
    assert matrix.facts["counts"] == [[1, 1], [0, 1]]
    normalised = TensorDataset(4 * x - 2, torch.tensor([0, 1, 0]))
    shown = task.pictures(Bright(), Federation([normalised], test=normalised))[0].images
    assert all(float(i.min()) >= 0 and float(i.max()) <= 1 for i in shown)

    save_file(Bright().state_dict(), tmp_path / "weights.safetensors")
    from toy import save_png

    save_png(tmp_path / "in" / "a.png", torch.zeros(3, 4, 4, dtype=torch.uint8))
    save_png(tmp_path / "in" / "b.png", torch.full((3, 4, 4), 255, dtype=torch.uint8))
    said = task.apply(tmp_path / "weights.safetensors", tmp_path / "in", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(r["file"], r["label"]) for r in rows] == [("a.png", "dark"), ("b.png", "bright")]
    assert said.startswith("2 images classified")


def test_images_that_become_images(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 4, 4)
    data = TensorDataset(x, x)
    task = Custom(nn.Conv2d(3, 3, 1), "mse_loss")
    (first, _) = task.pictures(nn.Conv2d(3, 3, 1), Federation([data], test=data))
    assert first.kind == "compare" and first.labels == ["input", "ours", "target"]
