"""Who gets what: pure functions from labels or groups to one index array per client.

All of them give every index to exactly one client. A client is never empty: too small ones are
topped up from the largest, and the list of notes that `split_by_rule` returns says so. `rng` is
numpy's, so that a split does not depend on torch's version.

dirichlet: the rule of MOON, NIID-Bench and PFLlib. For every class draw shares from Dir(alpha), set
to zero the share of clients that already hold N / n samples, renormalise, cut; repeat until the
smallest client holds `least` samples. The usual loop is unbounded; this one stops after `retries`
and keeps the best draw. shards: sort by label, cut into clients * s shards, s each (McMahan et al.,
2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedlens.data.source import DataError

Parts = list[NDArray[Any]]
Rule = Literal["iid", "dirichlet", "shards", "classes", "one_group", "quantity", "natural"]


def iid(n: int, clients: int, rng: Generator) -> Parts:
    """Shuffle and deal: sizes differ by one at most."""
    return [np.sort(part) for part in np.array_split(rng.permutation(n), clients)]


def dirichlet(
    labels: NDArray[Any],
    clients: int,
    alpha: float,
    rng: Generator,
    least: int = 10,
    retries: int = 100,
) -> Parts:
    """Label skew; the smaller alpha the stronger."""
    least = min(least, len(labels) // clients)
    best: Parts = []
    for _ in range(max(1, retries)):
        parts = _dirichlet_once(labels, clients, alpha, rng)
        if not best or min(map(len, parts)) > min(map(len, best)):
            best = parts
        if min(map(len, best)) >= least:
            break
    return best


def _dirichlet_once(labels: NDArray[Any], clients: int, alpha: float, rng: Generator) -> Parts:
    held = np.zeros(clients)
    pieces: list[list[NDArray[Any]]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        index = rng.permutation(np.flatnonzero(labels == label))
        open_ = held < len(labels) / clients
        shares = rng.dirichlet(np.full(clients, alpha)) * open_
        shares = shares / shares.sum() if shares.sum() > 0 else open_ / open_.sum()
        for client, piece in enumerate(np.split(index, _cuts(shares, len(index)))):
            pieces[client].append(piece)
            held[client] += len(piece)
    return [np.sort(np.concatenate(p)) for p in pieces]


def _cuts(shares: NDArray[Any], n: int) -> NDArray[Any]:
    cuts: NDArray[Any] = np.minimum((np.cumsum(shares)[:-1] * n).astype(int), n)
    return cuts


def shards(labels: NDArray[Any], clients: int, per_client: int, rng: Generator) -> Parts:
    """Every client gets `per_client` runs of equal labels (a run may straddle two of them)."""
    if len(labels) < clients * per_client:
        raise DataError(f"{len(labels)} samples cannot be cut into {clients} x {per_client} shards")
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    runs = np.array_split(order, clients * per_client)
    shares = rng.permutation(len(runs)).reshape(clients, per_client)
    return [np.sort(np.concatenate([runs[k] for k in share])) for share in shares]


def classes_per_client(
    labels: NDArray[Any], clients: int, per_client: int, rng: Generator
) -> Parts:
    """Exactly `per_client` classes each, the least used ones first; a class is dealt evenly among
    those who have it.
    """
    names = np.unique(labels)
    if not 1 <= per_client <= len(names):
        raise DataError(
            f"classes_per_client must lie between 1 and the number of classes ({len(names)}), not"
            f" {per_client}"
        )
    if clients * per_client < len(names):
        raise DataError(
            f"{clients} clients with {per_client} classes each cannot cover {len(names)} classes"
        )
    used = np.zeros(len(names), dtype=int)
    owners: list[list[int]] = [[] for _ in names]
    for client in range(clients):
        for k in np.lexsort((rng.random(len(names)), used))[:per_client]:
            used[k] += 1
            owners[k].append(client)
    pieces: list[list[NDArray[Any]]] = [[] for _ in range(clients)]
    for k, label in enumerate(names):
        index = rng.permutation(np.flatnonzero(labels == label))
        for client, piece in zip(owners[k], np.array_split(index, len(owners[k])), strict=True):
            pieces[client].append(piece)
    return [np.sort(np.concatenate(p)) for p in pieces]


def one_group(groups: NDArray[Any], clients: int, rng: Generator) -> Parts:
    """Every client holds samples of one group only; large groups are shared among several
    clients.
    """
    names, sizes = np.unique(groups, return_counts=True)
    if clients < len(names):
        raise DataError(
            f"one group per client needs at least {len(names)} clients for {len(names)} groups, not"
            f" {clients}"
        )
    if clients > len(groups):
        raise DataError(f"{len(groups)} samples cannot serve {clients} clients")
    share = np.ones(len(names), dtype=int)
    for _ in range(clients - len(names)):
        share[np.argmax(sizes / share)] += 1
    pieces = [
        p
        for name, k in zip(names, share, strict=True)
        for p in np.array_split(rng.permutation(np.flatnonzero(groups == name)), k)
    ]
    return [np.sort(p) for p in pieces]


def natural(groups: NDArray[Any], clients: int, rng: Generator) -> Parts:
    """Groups (writers, hospitals, cameras) stay whole; the largest goes to whoever holds least."""
    names, sizes = np.unique(groups, return_counts=True)
    if clients > len(names):
        raise DataError(f"{len(names)} groups cannot serve {clients} clients: a group is never cut")
    owner, held = np.zeros(len(names), dtype=int), np.zeros(clients)
    for k in np.lexsort((rng.random(len(names)), -sizes)):
        owner[k] = int(np.argmin(held))
        held[owner[k]] += sizes[k]
    place = owner[np.searchsorted(names, groups)]
    return [np.flatnonzero(place == client) for client in range(clients)]


def quantity(
    n: int, clients: int, alpha: float, rng: Generator, least: int = 10, retries: int = 100
) -> Parts:
    """Sizes from Dir(alpha), the same labels everywhere."""
    least = min(least, n // clients)
    best: Parts = []
    for _ in range(max(1, retries)):
        parts = [
            np.sort(p)
            for p in np.split(rng.permutation(n), _cuts(rng.dirichlet(np.full(clients, alpha)), n))
        ]
        if not best or min(map(len, parts)) > min(map(len, best)):
            best = parts
        if min(map(len, best)) >= least:
            break
    return best


def top_up(parts: Sequence[NDArray[Any]], least: int) -> tuple[Parts, list[str]]:
    """Move samples from the largest clients to those below `least`, and say which."""
    out, notes = [np.asarray(p) for p in parts], []
    for client, part in enumerate(out):
        short = least - len(part)
        if short <= 0:
            continue
        notes.append(
            f"client {client} was dealt {len(part)} samples and was topped up to {least} from the"
            " largest"
        )
        for _ in range(short):
            giver = int(np.argmax([len(p) for p in out]))
            out[client] = np.append(out[client], out[giver][-1]).astype(int)
            out[giver] = out[giver][:-1]
    return [np.sort(p) for p in out], notes


def split_by_rule(
    rule: Rule,
    labels: Sequence[int] | NDArray[Any],
    clients: int,
    seed: int,
    *,
    alpha: float = 0.5,
    per_client: int = 2,
    groups: Sequence[Any] | NDArray[Any] | None = None,
    least: int = 10,
) -> tuple[Parts, list[str]]:
    """Divide examples among clients, by the name of a rule.

    Args:
        rule: iid, dirichlet, shards, classes, one_group, natural or quantity.
        labels: the class of every example.
        clients: among how many.
        seed: the same seed gives the same split.
        alpha: of "dirichlet" and "quantity".
        per_client: shards or classes, of the rules that have them.
        groups: the group of every example, of the rules that keep groups together; the labels by
            default.
        least: examples that the smallest client has at least.

    Returns:
        one index array per client, and notes on clients that were topped up.
    """
    y = np.asarray(labels)
    if clients < 1:
        raise DataError(f"a federation needs at least one client, not {clients}")
    if len(y) < clients:
        raise DataError(f"{len(y)} samples cannot serve {clients} clients")
    if not alpha > 0:
        raise DataError(f"alpha must be positive, not {alpha}")
    if per_client < 1:
        raise DataError(f"shards or classes per client must be at least 1, not {per_client}")
    key = y if groups is None else np.asarray(groups)
    rng = np.random.default_rng([seed, 0x5917])
    least = max(1, min(least, len(y) // clients))
    if rule == "iid":
        return iid(len(y), clients, rng), []
    if rule == "dirichlet":
        return top_up(dirichlet(y, clients, alpha, rng, least), least)
    if rule == "quantity":
        return top_up(quantity(len(y), clients, alpha, rng, least), least)
    if rule == "shards":
        return shards(y, clients, per_client, rng), []
    if rule == "classes":
        return top_up(classes_per_client(y, clients, per_client, rng), 1)
    if rule == "one_group":
        return one_group(key, clients, rng), []
    if rule == "natural":
        return natural(key, clients, rng), []
    raise DataError(
        f"unknown partition {rule!r}: choose one of iid, dirichlet, shards, classes, one_group,"
        " quantity, natural"
    )


def strengths(clients: int, strongest: float) -> list[float]:
    """Feature skew: how much of a degradation each client's camera has, evenly from none to the
    strongest.
    """
    return [strongest * k / max(1, clients - 1) for k in range(clients)]
