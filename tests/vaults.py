"""Sites with vaults of their own, for tests of SecureSum: real keys, real files, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens import Federation, Message
from fedlens.core.memory import NEVER, Memory
from fedlens.core.replies import Arrival, Lost
from fedlens.engines.worker import Job, Worker
from fedlens.trust.secure_sum import SecureSum
from fedlens.trust.signing import make_signing_key, parse_public_key
from fedlens.trust.vault import SiteVault

Change = Callable[[int, Message], Message | None]  # (client, what it would get) -> what it gets


def make_vaults(folder: Path, clients: int) -> list[SiteVault]:
    keys = [make_signing_key(folder / f"site-{i}") for i in range(clients)]
    peers = {i: parse_public_key((folder / f"site-{i}.pub").read_text()) for i in range(clients)}
    return [SiteVault(folder / f"vault-{i}", key, peers) for i, key in enumerate(keys)]


class Sites:
    """An engine: every client with its own algorithm and vault. change: what a hostile server or
    network makes of a message on its way to a client; None: it gets none."""

    def __init__(
        self,
        algorithm: SecureSum,
        federation: Federation,
        vaults: Sequence[SiteVault],
        change: Change | None = None,
    ) -> None:
        self.workers = [
            Worker(algorithm.with_vault(vault), federation, Memory()) for vault in vaults
        ]
        self.change = change or (lambda _, message: message)
        self.sent: list[tuple[int, Message, Arrival]] = []

    def ids(self) -> Sequence[int]:
        return range(len(self.workers))

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        for position, i in enumerate(sorted(ids)):
            told = self.change(i, message)
            if told is None:
                yield Lost(i, "is not reached")
                continue
            yield self.ask(i, told, heard.get(i, NEVER), position)

    def ask(self, i: int, message: Message, heard: int = NEVER, position: int = 0) -> Arrival:
        through_bytes = Message.from_bytes(bytes(message.to_bytes()), copy=True)
        self.workers[i].begin(through_bytes, sums=False)
        (outcome,) = self.workers[i].work([Job(position, i, heard)])
        self.sent.append((i, through_bytes, outcome))
        return outcome

    def __getattr__(self, name: str) -> Any:  # snapshot, restore, close: nothing to do
        return lambda *_: {}


def with_told(message: Message, text: str) -> Message:
    return replace(message, texts={"secure": text}, _derived={})
