"""Trees: named arrays in the shape of a state_dict, and the little arithmetic that aggregation
needs.

A tree may hold integer arrays (BatchNorm's step counter). They take part in sums as float64 and
return to their own type, rounded, when a tree is put back into a state: `cast`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def map_tree(f: Callable[[Tensor], Tensor], tree: Mapping[str, Tensor]) -> Tree:
    return {name: f(t) for name, t in tree.items()}


def zip_trees(
    f: Callable[[Tensor, Tensor], Tensor], a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> Tree:
    if a.keys() != b.keys():
        raise ValueError(f"trees differ in their names: {sorted(a.keys() ^ b.keys())[:3]}")
    return {name: f(t, b[name]) for name, t in a.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    return zip_trees(torch.add, a, b)


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    return zip_trees(torch.sub, a, b)


def scale(tree: Mapping[str, Tensor], factor: float) -> Tree:
    return map_tree(
        lambda t: (t if t.is_floating_point() or t.is_complex() else t.double()) * factor, tree
    )


def zeros_like(tree: Mapping[str, Tensor]) -> Tree:
    return map_tree(torch.zeros_like, tree)


def clone(tree: Mapping[str, Tensor]) -> Tree:
    return map_tree(lambda t: t.detach().clone(), tree)


def cast(tree: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tree:
    """Give every array the type it has in `like`; integers are rounded, not truncated."""

    def one(t: Tensor, target: Tensor) -> Tensor:
        if t.dtype == target.dtype:
            return t
        return (t if target.dtype.is_floating_point or target.is_complex() else t.round()).to(
            target.dtype
        )

    return {name: one(t, like[name]) for name, t in tree.items()}


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """<a, b> over the names they share, in float64."""
    parts = [(a[n].double() * b[n].double()).sum() for n in a if n in b]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def norm(tree: Mapping[str, Tensor]) -> float:
    return float(dot(tree, tree).sqrt())


def count_bytes(tree: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tree.values())


def is_finite(tree: Mapping[str, Tensor]) -> bool:
    """A sum is one cheap pass and is finite whenever the entries are, unless it overflows: only
    then look at each entry.
    """
    for t in tree.values():
        if t.is_floating_point() or t.is_complex():
            total = t.sum().item()
            if total - total != 0 and not bool(
                torch.isfinite(t).all()
            ):  # Inf - Inf and NaN - NaN are NaN
                return False
    return True


def squared_length(t: Tensor) -> float:
    """|t|^2, in one pass that costs no more than a sum; NaN or Inf wherever an entry is. In t's own
    precision: for comparing with a bound, not for arithmetic."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    if not t.is_floating_point():
        return 0.0
    flat = t.detach().reshape(-1)
    flat = flat.float() if flat.element_size() < 4 else flat
    return float(torch.dot(flat, flat))


def mismatch(tree: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> str | None:
    """Why `tree` does not have the names and shapes of `like`, or None if it does."""
    if tree.keys() != like.keys():
        odd = sorted(tree.keys() ^ like.keys())
        return f"names differ ({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})"
    for name, t in tree.items():
        if t.shape != like[name].shape:
            return f"{name} has shape {tuple(t.shape)}, expected {tuple(like[name].shape)}"
    return None
