"""Ordinary torch data sets as a federation: one for each client, or one that is divided.

From Python they are given as they are (`fedlens.fit` does); a recipe names where they are:

    [data]
    name = "TorchDatasets"
    clients = "my_data:hospitals"        # a list of Datasets, or a function that gives it
    test = "my_data:test"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from fedlens.core.client import Data, generator
from fedlens.core.datasets import Listed, as_data, ready_labels
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.imports import load_given
from fedlens.core.limits import Count, Fraction, Natural, Positive
from fedlens.data.partition import Rule, split_by_rule
from fedlens.data.source import DataError, Source

FEW_CLASSES = 1000  # labels above this are no class numbers, but identities or quantities


@dataclass
class TorchDatasets(Source):
    """
    Args:
        clients: a list of Datasets, or one Dataset that is divided by the rule `partition`.
        test: what the server tests on.
        held_out: for each client a Dataset that it evaluates on.
        partition: the rule by which one Dataset is divided.
        alpha: of "dirichlet" and "quantity".
        per_client: shards or classes, of the rules that have them.
        least: examples that the smallest client has at least.
        holdout: instead of `held_out`, the share of its data that each client keeps for evaluation.
    """

    clients: Any
    test: Any = None
    held_out: Any = None
    partition: Rule = "iid"
    alpha: Positive = 0.5
    per_client: Count = 2
    least: Natural = 10
    holdout: Fraction = 0.0

    def default_clients(self) -> int | None:
        given = _given("clients", self.clients)
        return len(given) if _is_list(given) else None

    def federation(self, clients: int, seed: int) -> Federation:
        given = _given("clients", self.clients)
        notes: list[str] = []
        if _is_list(given):
            if not given:
                raise DataError("the list of the clients' data sets is empty")
            if len(given) != clients:
                raise DataError(
                    f"{len(given)} data sets are given, but federation.clients is {clients}"
                )
            held = [_checked(d, f"client {i}") for i, d in enumerate(given)]
        else:
            held, notes = self._divide(_checked(given, "the data set"), clients, seed)
        held, held_out = self._hold_out(held, seed)
        test = _given("test", self.test)
        test = None if test is None else _checked(test, "test")
        return Federation(held, held_out, test, _facts(held, given, notes))

    def _divide(self, whole: Any, clients: int, seed: int) -> tuple[list[Any], list[str]]:
        labels = ready_labels(whole)
        if labels is None and self.partition not in ("iid", "quantity"):
            labels = _read_labels(whole)
        parts, notes = split_by_rule(
            self.partition,
            torch.zeros(len(whole)).numpy() if labels is None else labels.numpy(),
            clients,
            seed,
            alpha=self.alpha,
            per_client=self.per_client,
            least=self.least,
        )
        return [_part(whole, torch.from_numpy(p)) for p in parts], notes

    def _hold_out(self, held: list[Any], seed: int) -> tuple[list[Any], list[Any]]:
        """What each client trains on, and what it keeps for its own evaluation."""
        given = _given("held_out", self.held_out)
        if self.holdout and given is not None:
            raise DataError("held_out and holdout say the same thing: give one of them")
        if given is not None and (not _is_list(given) or len(given) != len(held)):
            raise DataError(f"held_out must be a list of {len(held)}, one for each client")
        if not self.holdout:
            return held, [as_data(d) for d in given or ()]
        pairs = []
        for client, data in enumerate(held):
            order = torch.randperm(len(data), generator=generator(seed, client, 0xD0))
            kept = int(self.holdout * len(data))
            pairs.append([_part(data, p.sort().values) for p in (order[kept:], order[:kept])])
        return [a for a, _ in pairs], [b for _, b in pairs]


def _given(what: str, value: Any) -> Any:
    """The object, or what a recipe's module:name stands for; a function there is called."""
    if not isinstance(value, str):
        return value
    found = load_given(what, value)
    return found() if callable(found) and not isinstance(found, Dataset) else found


def _is_list(given: Any) -> bool:
    """Of data sets, not of examples, which are pairs, dicts or tensors."""
    if not isinstance(given, list | tuple):
        return False
    return not any(isinstance(d, tuple | Mapping | torch.Tensor) for d in given)


def _checked(given: Any, what: str) -> Any:
    try:
        data = as_data(given)
    except ValueError as e:
        raise DataError(f"{what}: {e}") from e
    if not isinstance(data, Data):
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(
                f"{what} is a {type(given).__name__}: a Dataset with a length and examples by"
                " number is needed"
            )
        data = Listed(data)
    if not len(data):
        raise DataError(f"{what} has no examples")
    return data


def _part(data: Any, index: torch.Tensor) -> Any:
    if isinstance(data, Listed):
        return Listed(Subset(data.items, index.tolist()))
    if hasattr(data, "subset"):
        return data.subset(index)
    raise DataError(f"a {type(data).__name__} cannot be divided: give one for each client")


def _read_labels(data: Any) -> torch.Tensor:
    y = torch.cat([data.batch(i)["y"] for i in torch.arange(len(data)).split(256)])
    if y.dim() != 1 or y.is_floating_point():
        raise DataError(
            "only examples with class numbers can be divided by them: use partition=iid or quantity"
        )
    return y


def _facts(held: Sequence[Any], given: Any, notes: Sequence[str]) -> Facts:
    """What is public: the shape of an example, and where it costs nothing the classes."""
    labels = [ready_labels(d) for d in held]
    counts: list[list[int]] = []
    names: tuple[str, ...] = ()
    if all(y is not None and len(y) for y in labels):
        known = [y for y in labels if y is not None]
        top = int(max(int(y.max()) for y in known)) + 1
        if top <= FEW_CLASSES and min(int(y.min()) for y in known) >= 0:
            counts = [torch.bincount(y, minlength=top).tolist() for y in known]
            names = _class_names(given, top)
    first = held[0].batch(torch.arange(1))["x"]
    return Facts(
        classes=names,
        labels=tuple(map(tuple, counts)),
        shape=tuple(first.shape[1:]),
        notes=tuple(notes),
    )


def _class_names(given: Any, count: int) -> tuple[str, ...]:
    """As torchvision's data sets call them, else their numbers."""
    source = given[0] if _is_list(given) else given
    while isinstance(source, Subset | DataLoader):
        source = source.dataset
    named = getattr(source, "classes", None)
    if isinstance(named, list | tuple) and len(named) >= count:
        return tuple(map(str, named))
    return tuple(str(k) for k in range(count))
