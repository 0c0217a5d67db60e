"""Torch data sets as a federation: given for each client, or one that is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fedlens.core.imports import search_in
from fedlens.data import TorchDatasets
from fedlens.data.source import DataError

X, Y = torch.arange(40.0).view(40, 1), torch.arange(40) % 4


def test_one_for_each_client() -> None:
    parts = [TensorDataset(X[:3], Y[:3]), TensorDataset(X[3:5], Y[3:5])]
    made = TorchDatasets(parts, test=TensorDataset(X, Y))
    assert made.default_clients() == 2
    federation = made.federation(2, 0)
    assert [len(h) for h in federation.holdings] == [3, 2] and len(federation.test) == 40
    assert federation.facts.labels == ((1, 1, 1, 0), (1, 0, 0, 1))
    assert federation.facts.classes == ("0", "1", "2", "3") and federation.facts.shape == (1,)
    with pytest.raises(DataError, match=r"2 data sets are given, but federation\.clients is 3"):
        made.federation(3, 0)


@pytest.mark.parametrize("rule", ["iid", "dirichlet", "shards", "classes", "quantity"])
def test_one_that_is_divided(rule: Any) -> None:
    """Every example is somebody's, once."""
    made = TorchDatasets(TensorDataset(X, Y), partition=rule, least=2)
    assert made.default_clients() is None
    holdings = made.federation(4, 0).holdings
    values = torch.cat([h.batch(torch.arange(len(h)))["x"].flatten() for h in holdings])
    assert values.sort().values.tolist() == list(range(40))


def test_pairs_in_a_list_are_one_data_set_and_lists_of_them_are_several() -> None:
    pairs = [(torch.ones(1) * k, k % 2) for k in range(6)]
    assert [len(h) for h in TorchDatasets(pairs).federation(3, 0).holdings] == [2, 2, 2]
    assert TorchDatasets([pairs, pairs]).default_clients() == 2
    dirichlet = TorchDatasets(pairs, partition="dirichlet", least=1)
    assert sum(len(h) for h in dirichlet.federation(2, 0).holdings) == 6


def test_a_part_is_held_out() -> None:
    federation = TorchDatasets([TensorDataset(X, Y)], holdout=0.25).federation(1, 0)
    kept, rest = federation.held_out[0], federation.holdings[0]
    assert len(kept) == 10 and len(rest) == 30
    both = [d.batch(torch.arange(len(d)))["x"].flatten() for d in (kept, rest)]
    assert torch.cat(both).sort().values.tolist() == list(range(40))
    given = TorchDatasets([TensorDataset(X, Y)], held_out=[TensorDataset(X[:2], Y[:2])])
    assert len(given.federation(1, 0).held_out[0]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"clients": [TensorDataset(X[:0], Y[:0])]}, "client 0 has no examples"),
        ({"clients": []}, "the list of the clients' data sets is empty"),
        ({"clients": [3]}, "client 0 is a int: a Dataset with a length"),
        ({"clients": TensorDataset(X, X), "partition": "shards"}, "class numbers can be divided"),
        ({"clients": [TensorDataset(X, Y)], "held_out": []}, "held_out must be a list of 1"),
        (
            {"clients": [TensorDataset(X, Y)], "held_out": [None], "holdout": 0.5},
            "say the same thing",
        ),
    ],
)
def test_what_cannot_be_meant(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        TorchDatasets(**arguments).federation(1, 0)


def test_a_recipe_names_them(tmp_path: Path) -> None:
    (tmp_path / "own_torch_data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def hospitals():\n    return [TensorDataset(torch.ones(k, 1)) for k in (2, 3)]\n"
        "test = TensorDataset(torch.ones(5, 1))\n"
    )
    search_in(tmp_path)
    made = TorchDatasets("own_torch_data:hospitals", test="own_torch_data:test")
    assert [len(h) for h in made.federation(2, 0).holdings] == [2, 3]
    assert len(made.federation(2, 0).test) == 5
