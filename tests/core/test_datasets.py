"""Ordinary torch data sets as a client's data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from toy import Toy, flat, make_data

from fedlens import Federation, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.datasets import Listed, as_data, ready_labels
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_the_readmes_snippet_trains_on_torch_datasets() -> None:
    """Tensors in a TensorDataset, a Subset of one in another order and pairs read one by one end in
    the same bits as the columns that the library holds itself."""
    own = [make_data(20 + i, torch.Generator().manual_seed(i)) for i in range(3)]
    test = make_data(30, torch.Generator().manual_seed(9))

    def train(federation: Federation) -> dict[str, Any]:
        algorithm = stack(FedAvg(Toy(), lr=0.05, batch=8), FedProx(mu=0.01))
        with Simulator(algorithm, federation, workers=0) as engine:
            scores: list[float] = []
            state = run(
                algorithm,
                engine,
                rounds=2,
                test=federation.test,
                evaluate_every=1,
                after_round=lambda _, r: scores.append(r.metrics["accuracy"]),
            )
        return {**flat(state), "scores": torch.tensor(scores)}

    def as_subset(x: torch.Tensor, y: torch.Tensor) -> Dataset[Any]:
        order = torch.randperm(len(x))
        return Subset(TensorDataset(x[order], y[order]), order.argsort().tolist())

    def as_items(x: torch.Tensor, y: torch.Tensor) -> Dataset[Any]:
        return Items([(a.numpy(), int(b)) for a, b in zip(x, y, strict=True)])

    expected = train(Federation(own, test=test))
    for kind in (TensorDataset, as_subset, as_items):
        made = [kind(d.columns["x"], d.columns["y"]) for d in (*own, test)]
        found = train(Federation(made[:-1], test=made[-1]))
        assert found.keys() == expected.keys()
        assert all(torch.equal(t, found[n]) for n, t in expected.items())


@pytest.mark.parametrize(
    ("item", "x", "y"),
    [
        ((torch.ones(2), 1), [[1.0, 1.0]], [1]),
        (torch.ones(2), [[1.0, 1.0]], [[1.0, 1.0]]),
        ([torch.ones(2)], [[1.0, 1.0]], [[1.0, 1.0]]),
        ({"x": torch.ones(2), "y": 2}, [[1.0, 1.0]], [2]),
        ({"image": np.ones(2), "label": 2, "file": "a.png"}, [[1.0, 1.0]], [2]),
        ({"pixel_values": torch.ones(2), "labels": 0.5}, [[1.0, 1.0]], [0.5]),
        ((torch.tensor([0, 255], dtype=torch.uint8), 1.5), [[0.0, 1.0]], [1.5]),
    ],
)
def test_examples_of_every_kind_become_x_and_y(item: Any, x: Any, y: Any) -> None:
    """uint8 is scaled to [0, 1] and float64 becomes float32, which is what networks take; a file's
    name stays out."""
    batch = Listed(Items([item])).batch(torch.tensor([0]))
    assert batch["x"].tolist() == x and batch["y"].tolist() == y
    assert set(batch) == {"x", "y"} and all(v.dtype != torch.float64 for v in batch.values())


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([(Image.new("RGB", (2, 2)), 1)], "they are PIL images; give the data set transform="),
        ([(torch.ones(2), 1), (torch.ones(3), 1)], r"differ in shape \(\(2,\) and \(3,\)\)"),
        ([(torch.ones(2), 1, 2)], "has 3 parts: pairs"),
        ([{"picture": torch.ones(2), "y": 1}], "has picture, y: which is the input"),
        ([(torch.ones(2), "cat")], "the target of Items is a .*, not a tensor"),
    ],
)
def test_what_makes_no_batch_is_said_in_one_sentence(items: list[Any], says: str) -> None:
    data = Listed(Items(items))
    with pytest.raises(ValueError, match=says) as e:
        data.batch(torch.arange(len(items)))
    assert "\n" not in str(e.value)


def test_what_is_no_data_set_stays_as_it_is() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    thing = object()
    own = make_data(3, torch.Generator())
    assert as_data(thing) is thing and as_data(own) is own and as_data(None) is None
    with pytest.raises(ValueError, match="Stream is a stream: a client's data needs a length"):
        Federation([Stream()])


def test_labels_are_taken_where_they_lie_ready() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([2, 0, 1, 1])

    class Folder(Items):
        targets = [1, 0]

    assert ready_labels(Subset(TensorDataset(x, y), [3, 0])).tolist() == [1, 2]  # type: ignore[union-attr]
    assert ready_labels(Listed(Folder([1, 2]))).tolist() == [1, 0]  # type: ignore[union-attr]
    assert ready_labels(TensorDataset(x, x)) is None
    assert ready_labels(TensorDataset(x, y.float())) is None and ready_labels(Items([1])) is None
    assert ready_labels(ConcatDataset([TensorDataset(x, y)])) is None
    assert ready_labels(make_data(3, torch.Generator().manual_seed(0))) is not None


def test_of_a_loader_its_data_set_is_taken() -> None:
    data = TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))
    held = as_data(DataLoader(data, batch_size=2, shuffle=True))
    assert len(held) == 6 and held.batch(torch.tensor([4, 1]))["y"].tolist() == [4, 1]
    with pytest.raises(ValueError, match="collate_fn of its own"):
        as_data(DataLoader(data, collate_fn=lambda items: items))
    with pytest.raises(ValueError, match="sampler of its own"):
        as_data(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 6, 6)))
