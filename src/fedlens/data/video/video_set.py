"""Labelled videos as clients own them, and how they are divided.

A `VideoSet` is what a client owns: frames by number, a label, the film it was cut from. What a task
makes of it (a clip and its class, a shuffled triple) is the task's business: see `Task.admit`.
Labels are for evaluation and for splits; pretext tasks never see them.

The public non-IID split of FedVSSL lets windows of eight classes slide by one, so that a video lies
with up to four clients; the paper says that shards are disjoint, and these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.data.images.labelled import stratified
from fedlens.data.partition import Rule, split_by_rule
from fedlens.data.video.frames import Frames

Grouping = Literal["iid", "classes", "sources"]
RULES: dict[Grouping, Rule] = {"iid": "iid", "classes": "classes", "sources": "natural"}


@dataclass(frozen=True)
class VideoSet:
    """Videos by number. `sources` name the films they were cut from."""

    clips: Sequence[Frames]
    labels: Sequence[int]
    sources: Sequence[str]

    def __len__(self) -> int:
        return len(self.clips)

    def take(self, index: Iterable[int]) -> VideoSet:
        chosen = [int(i) for i in index]
        return VideoSet(
            [self.clips[i] for i in chosen],
            [self.labels[i] for i in chosen],
            [self.sources[i] for i in chosen],
        )

    def at_least(self, frames: int) -> VideoSet:
        """Those that are long enough."""
        return self.take(i for i, clip in enumerate(self.clips) if len(clip) >= frames)


@dataclass(frozen=True)
class RetrievalTest:
    """What retrieval is tested on: who among `gallery` is most like each of `queries`?"""

    gallery: VideoSet
    queries: VideoSet
    classes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.queries)


def divide(
    train: VideoSet,
    test: VideoSet | None,
    classes: Sequence[str],
    clients: int,
    seed: int,
    *,
    rule: Grouping,
    per_client: int,
    holdout: float,
    skipped: Sequence[str] = (),
) -> Federation:
    labels = np.asarray(train.labels)
    names, groups = np.unique(np.asarray(train.sources), return_inverse=True)
    parts, notes = split_by_rule(
        RULES[rule],
        labels,
        clients,
        seed,
        per_client=per_client,
        groups=groups if rule == "sources" else None,
        least=1,
    )
    counts = [np.bincount(labels[p], minlength=len(classes)).tolist() for p in parts]
    facts = Facts(
        classes=tuple(classes),
        labels=tuple(map(tuple, counts)),
        skipped=tuple(skipped),
        notes=tuple(notes),
        details={"sources": len(names)},
    )
    holdings, held = [], []
    for client, part in enumerate(parts):
        own = train.take(part)
        stay, cut = (
            stratified(torch.tensor(own.labels), holdout, np.random.default_rng([seed, 4, client]))
            if holdout
            else ([], [])
        )
        holdings.append(own.take(stay) if holdout else own)
        held.append(own.take(cut))
    out: Any = held if holdout else ()
    return Federation(
        holdings,
        out,
        RetrievalTest(train, test, classes) if test is not None and len(test) else None,
        facts,
    )
