"""Retrieval: is one of the k nearest of the same class? And the other reading of it, a vote among
them.

The protocol is VCOP's: cosine similarity, a hit if any of the k nearest in the gallery has the
query's label. FedVSSL's text speaks of a majority vote instead; `vote` is that, ties going to the
nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

KS = (1, 5, 10, 20, 50)


def most_similar(
    queries: Tensor, gallery: Tensor, k: int, same: bool = False
) -> tuple[Tensor, Tensor]:
    """Numbers and cosine similarities (queries x k) of the most similar, best first. same: both are
    one set, nobody finds itself.
    """
    a, b = (F.normalize(x.flatten(1).double(), dim=1) for x in (queries, gallery))
    alike = a @ b.T
    if same:
        alike.fill_diagonal_(-torch.inf)
    # A stable sort: of two that are equally near the first counts, on every machine.
    order = alike.argsort(dim=1, descending=True, stable=True)[:, : min(k, len(gallery) - same)]
    return order, alike.gather(1, order)


def recall(
    found: Tensor, labels: Tensor, gallery_labels: Tensor, ks: Sequence[int] = KS
) -> dict[str, float]:
    """Share of queries that have their class among their k nearest.

    Args:
        found: numbers of the nearest in the gallery (queries x k), best first.
        labels: of the queries.
        gallery_labels: of the gallery.
        ks: how many of the nearest are looked at.
    """
    hits = gallery_labels[found] == labels[:, None]
    return {f"recall_at_{k}": float(hits[:, :k].any(1).float().mean()) for k in ks}


def vote(
    found: Tensor, labels: Tensor, gallery_labels: Tensor, ks: Sequence[int] = KS
) -> dict[str, float]:
    """Share of queries whose k nearest elect the right class.

    Args:
        found: numbers of the nearest in the gallery (queries x k), best first.
        labels: of the queries.
        gallery_labels: of the gallery.
        ks: how many of the nearest are looked at.
    """
    near = gallery_labels[found]
    classes = int(max(int(gallery_labels.max()), int(labels.max()))) + 1
    out = {}
    for k in ks:
        ballots = F.one_hot(near[:, :k], classes).double()
        # Half a vote's fraction, less the further away, settles ties.
        rank = 1 - 0.5 * torch.arange(ballots.shape[1], dtype=torch.float64) / max(
            1, ballots.shape[1]
        ) / max(1, ballots.shape[1])
        tie = (ballots * rank[None, :, None] * 1e-3).amax(1)
        out[f"vote_at_{k}"] = float(((ballots.sum(1) + tie).argmax(1) == labels).float().mean())
    return out
