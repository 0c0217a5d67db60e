from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tables import from_table
from torch import Tensor, nn

from fedlens import Facts, Federation, Message, Output, run, stack
from fedlens.algorithms import FedAvg
from fedlens.data import Synthetic
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.layers import BackboneOnly
from fedlens.tasks import Classification


class Says(nn.Module):
    """Scores that are written into the image: pixel k of the first row is the score of class k."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0, 0, :3] + 0 * self.head.weight.sum()


class Known(Classification):
    def forward(self, model, batch, adapt=None):  # type: ignore[no-untyped-def]
        return Output(model(batch["x"]))


def scored(*rows: tuple[float, float, float], y: list[int]) -> Tensors:
    x = torch.zeros(len(rows), 1, 3, 3)
    x[:, 0, 0] = torch.tensor(rows)
    return Tensors({"x": x, "y": torch.tensor(y)})


def test_metrics_by_hand() -> None:
    """Four images of classes 0 0 1 2, said 0 1 1 0: accuracy 2/4; per class 1/2, 1, 0; balanced
    1/2; worst 0. The winning score is 1, the others 0, so the loss is ln(e + 2) - 1 where right and
    ln(e + 2) where wrong: mean ln(e + 2) - 1/2."""
    data = scored((1, 0, 0), (0, 1, 0), (0, 1, 0), (1, 0, 0), y=[0, 0, 1, 2])
    found = Known(classes=3).evaluate(Says(), data)
    assert next(iter(found)) == "accuracy"
    assert found == pytest.approx(
        {
            "accuracy": 0.5,
            "loss": math.log(math.e + 2) - 0.5,
            "accuracy_balanced": 0.5,
            "accuracy_worst_class": 0.0,
            "accuracy_class_0": 0.5,
            "accuracy_class_1": 1.0,
            "accuracy_class_2": 0.0,
        }
    )


def test_a_missing_class_gets_no_figure() -> None:
    found = Known(classes=3).evaluate(Says(), scored((1, 0, 0), (0, 1, 0), y=[0, 1]))
    assert found.keys() == {"accuracy", "loss"} and found["accuracy"] == 1


def test_pictures_by_hand() -> None:
    data = scored((1, 0, 0), (0, 1, 0), (0, 1, 0), (1, 0, 0), y=[0, 0, 1, 2])
    sheet, matrix = Known(classes=3).pictures(
        Says(), Federation([], test=data, facts=Facts(classes=("ant", "bee", "cat")))
    )
    assert list(sheet.labels) == ["ant", "bee (is ant)", "bee", "ant (is cat)"] and sheet.facts == {
        "right": 2,
        "shown": 4,
    }
    assert matrix.kind == "map" and matrix.facts["counts"] == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_training_with_private_heads_and_all_of_it() -> None:
    """A real run on a real network: it learns, and with private heads only the body travels."""
    federation = Synthetic(
        classes=2, images=120, test_images=40, holdout=0.25, noise=0.02, clutter=0.0
    ).federation(3, 0)
    task = Classification(model="niid", classes=2)
    seen: list[float] = []
    algorithm = FedAvg(task, lr=0.1, momentum=0.9, batch=10, device="cpu")
    run(
        algorithm,
        Loopback(algorithm, federation),
        3,
        after_round=lambda p, r: seen.append(r.loss or 0.0),
    )
    assert seen[-1] < seen[0]
    private = stack(FedAvg(task, lr=0.1, batch=10, device="cpu"), BackboneOnly("body"))
    state = run(private, Loopback(private, federation), 1)
    assert all(n.startswith("body.") for n in state.trees["model"])


def test_save_and_apply(tmp_path: Path) -> None:
    """What was saved classifies a folder as the model itself does; a broken image is counted; class
    names come from the run's folder.
    """
    task = Classification(model="niid", classes=3)
    torch.manual_seed(0)
    model = task.model().eval()
    task.save(Message({"model": dict(model.state_dict())}), tmp_path)
    (tmp_path / "federation.json").write_text(
        json.dumps({"facts": {"classes": ["ant", "bee", "cat"]}})
    )
    (tmp_path / "in" / "deep").mkdir(parents=True)
    pictures = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    names = ["a.png", "b.png", "deep/c.png", "deep/d.png"]
    for name, p in zip(names, pictures):
        Image.fromarray(p).save(tmp_path / "in" / name)
    (tmp_path / "in" / "x.png").write_bytes(b"broken")
    said = task.apply(tmp_path, tmp_path / "in", tmp_path / "out" / "labels.csv")
    assert "4 images classified, 1 could not be read (x.png)" in said
    with (tmp_path / "out" / "labels.csv").open() as f:
        rows = list(csv.DictReader(f))
    with torch.no_grad():
        share, label = (
            model(torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255).softmax(1).max(1)
        )
    assert [r["file"] for r in rows] == names and [r["label"] for r in rows] == [
        ["ant", "bee", "cat"][k] for k in label.tolist()
    ]
    assert [float(r["confidence"]) for r in rows] == pytest.approx(share.tolist(), abs=1e-4)
    with pytest.raises(ValueError, match="Classification has no option 'foo'"):
        task.apply(tmp_path, tmp_path / "in", tmp_path / "o.csv", foo=1)
    with pytest.raises(
        ValueError, match=r"none of the 1 images at .*x.png can be read \(x.png: cannot identify"
    ):
        task.apply(tmp_path, tmp_path / "in" / "x.png", tmp_path / "o.csv")
    assert not (tmp_path / "o.csv").exists()
    with pytest.raises(ValueError, match="no image at"):
        task.apply(tmp_path, tmp_path / "nothing", tmp_path / "o.csv")


@pytest.mark.parametrize(
    ("task", "data", "why"),
    [
        ({}, {"size": 16}, "the images are 16x16, but cnn was told 32x32: set task.size=16"),
        ({"classes": 5}, {}, "the data has 10 classes, but the task says 5: set task.classes=10"),
        (
            {"channels": 1},
            {},
            "the images have 3 channels, but the task says 1: set task.channels=3",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused_before_the_first_round(
    task: dict[str, int], data: dict[str, int], why: str
) -> None:
    federation = Synthetic(images=20, test_images=10, **data).federation(2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=why):
        FedAvg(Classification(**task)).given(federation.facts)  # type: ignore[arg-type]
    FedAvg(Classification(model="resnet8")).given(
        Synthetic(images=20, test_images=10).federation(2, 0).facts
    )


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"task\.classes must be .* at least 2, not 1"):
        from_table("task", "Classification", classes=1)
    with pytest.raises(ValueError, match="2 names for 3 classes"):
        Classification(classes=3, names=("a", "b"))
