"""Ordinary torch data sets as a client's data: examples that are pairs, dicts or single tensors
become batches with the names that tasks know.

A batch is named tensors: "x" goes into the network, "y" is compared with what comes out. Of a pair
the first is x, of a dict what is called image, input or pixel_values; a tensor alone is its own
target, as for an autoencoder. uint8 becomes [0, 1], as everywhere here, and float64 float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from fedlens.core.client import Batch, Data

INPUTS = ("x", "image", "images", "img", "pixel_values", "input", "inputs")
TARGETS = ("y", "label", "labels", "target", "targets")


@dataclass(frozen=True)
class Listed:
    """Any torch Dataset of pairs, dicts or tensors, or whatever else has a length and items, as a
    client's data; read item by item, except where it lies in tensors anyway.

    Args:
        items: the Dataset.
    """

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        return as_batch(_collated(self.items, index), type(self.items).__name__)


def as_data(given: Any) -> Any:
    """A client's data, whatever a user calls so. What is neither a data set nor a list of examples
    stays as it is: algorithms that do not train have data of their own kind.
    """
    if given is None or isinstance(given, Data):
        return given
    if isinstance(given, DataLoader):
        return as_data(_loaded(given))
    if isinstance(given, IterableDataset):
        raise ValueError(
            f"{type(given).__name__} is a stream: a client's data needs a length and examples by"
            " number (a map-style Dataset)"
        )
    return Listed(given) if isinstance(given, Dataset) else given


def _loaded(loader: DataLoader[Any]) -> Any:
    """What a DataLoader loads. Batches and their order are the algorithm's, so a loader that does
    more than shuffle cannot be taken at its word."""
    own = loader.collate_fn is not default_collate
    if own or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise ValueError(
            f"the DataLoader has a {'collate_fn' if own else 'sampler'} of its own, which would not"
            " be used: give a Dataset whose examples are as they should be"
        )
    return loader.dataset


def as_batch(collated: Any, source: str = "the data") -> Batch:
    """What `default_collate` gives, by the names that tasks know."""
    if isinstance(collated, Tensor):
        collated = [collated, collated]
    if isinstance(collated, Mapping):
        named = _named(collated, source)
    elif isinstance(collated, Sequence) and len(collated) in (1, 2):
        named = {"x": collated[0], "y": collated[-1]}
    else:
        parts = len(collated) if isinstance(collated, Sequence) else type(collated).__name__
        raise ValueError(
            f"an example of {source} has {parts} parts: pairs (input, target), dicts or single"
            " tensors are needed"
        )
    for key in ("x", "y"):
        if not isinstance(named[key], Tensor):
            what = "input" if key == "x" else "target"
            raise ValueError(
                f"the {what} of {source} is a {type(named[key]).__name__}, not a tensor or numbers"
            )
    # what else a dict has and is no tensor, such as file names, no network can use
    batch = {k: v for k, v in named.items() if isinstance(v, Tensor)}
    same = batch["y"] is batch["x"]
    batch["x"] = batch["x"].float() / 255 if batch["x"].dtype == torch.uint8 else batch["x"]
    batch |= {k: v.float() for k, v in batch.items() if v.dtype == torch.float64}
    return {**batch, "y": batch["x"]} if same else batch


def _named(collated: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A dict with its input called x and its target y."""
    found = dict(collated)
    for name, known in (("x", INPUTS), ("y", TARGETS)):
        key = next((k for k in known if k in found), None)
        if key is None:
            raise ValueError(
                f"an example of {source} has {', '.join(map(str, collated))}: which is the"
                f" {'input' if name == 'x' else 'target'}? It is found as {', '.join(known)}"
            )
        found[name] = found.pop(key)
    return found


def _collated(items: Any, index: Tensor) -> Any:
    """The examples of these numbers, put together."""
    if isinstance(items, TensorDataset):
        return [column[index] for column in items.tensors]
    if type(items) is Subset and isinstance(items.dataset, (TensorDataset, Subset)):
        return _collated(items.dataset, torch.as_tensor(items.indices)[index])
    numbers = index.tolist()
    several = getattr(items, "__getitems__", None)
    examples = several(numbers) if several else [items[i] for i in numbers]
    try:
        return default_collate(examples)
    except (TypeError, RuntimeError) as e:
        raise ValueError(
            f"examples of {type(items).__name__} do not make a batch: {_why(examples, e)}"
        ) from e


def _why(examples: Sequence[Any], error: Exception) -> str:
    if "PIL" in str(error):
        return "they are PIL images; give the data set transform=torchvision.transforms.ToTensor()"
    shapes = {tuple(p.shape) for e in examples for p in _parts(e)[:1] if hasattr(p, "shape")}
    if len(shapes) > 1:
        differ = " and ".join(str(s) for s in sorted(shapes)[:2])
        return f"they differ in shape ({differ}); bring all to one size"
    return str(error).strip().splitlines()[0]


def _parts(example: Any) -> list[Any]:
    if isinstance(example, Mapping):
        return [v for k, v in example.items() if k in INPUTS]
    return list(example) if isinstance(example, (tuple, list)) else [example]


def ready_labels(items: Any) -> Tensor | None:
    """The class numbers of all examples where a data set holds them ready: torchvision's `targets`,
    a column of tensors. None where one would have to read every example."""
    if isinstance(items, Listed):
        return ready_labels(items.items)
    if isinstance(items, Subset):
        whole = ready_labels(items.dataset)
        return None if whole is None else whole[torch.as_tensor(items.indices, dtype=torch.long)]
    found: Any = None
    if isinstance(items, TensorDataset) and len(items.tensors) > 1:
        found = items.tensors[-1]
    columns = getattr(items, "columns", None)
    if isinstance(columns, Mapping):
        found = columns.get("y")
    for name in ("targets", "labels"):
        found = getattr(items, name, None) if found is None else found
    try:
        labels = None if found is None else torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return None
    whole_numbers = labels is not None and labels.dim() == 1 and not labels.is_floating_point()
    return labels.long() if labels is not None and whole_numbers else None
