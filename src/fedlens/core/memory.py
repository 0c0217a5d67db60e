"""Client memory: survives between rounds, is never sent, and changes only when the server heard the
reply that belongs to it.

A reply can get lost after its client has updated its memory; a control variate that the server
never heard of then stays wrong for ever. So what a client writes is a draft, stamped with the
round. The next message tells in which round the server last heard this client: if it is the
draft's, the draft becomes the memory, otherwise it is forgotten.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from fedlens.core.files import write_atomically
from fedlens.core.message import BadMessage, Header, Message
from fedlens.core.tree import Tree, count_bytes

NEVER = -1


@dataclass
class Record:
    """One client's memory, and the draft of the round it last worked in. A draft holds only the
    keys that were written.
    """

    kept: dict[str, Tree] = field(default_factory=dict)
    draft: dict[str, Tree] = field(default_factory=dict)
    round: int = NEVER

    def settle(self, heard: int) -> dict[str, Tree]:
        """What holds, given the round in which the server last heard this client."""
        if self.round != NEVER and self.round == heard:
            return {n: t for n, t in {**self.kept, **self.draft}.items() if t}
        return self.kept

    def to_message(self) -> Message:
        trees = {f"kept:{n}": t for n, t in self.kept.items()} | {
            f"draft:{n}": t for n, t in self.draft.items()
        }
        return Message(trees, header=Header(round=self.round))

    @staticmethod
    def from_message(m: Message) -> Record:
        part = {
            p: {n[len(p) :]: t for n, t in m.trees.items() if n.startswith(p)}
            for p in ("kept:", "draft:")
        }
        return Record(part["kept:"], part["draft:"], m.round)

    def count_bytes(self) -> int:
        return sum(count_bytes(t) for part in (self.kept, self.draft) for t in part.values())


class Draft(MutableMapping[str, Tree]):
    """What a client sees as its memory: reads fall through to what was kept, writes stay here.
    Deleting writes an empty tree.
    """

    def __init__(self, kept: dict[str, Tree], read_only: bool = False) -> None:
        self.kept, self.written, self.read_only = kept, dict[str, Tree](), read_only

    def __getitem__(self, key: str) -> Tree:
        tree = self.written[key] if key in self.written else self.kept[key]
        if not tree:
            raise KeyError(key)
        return tree

    def __setitem__(self, key: str, tree: Tree) -> None:
        if self.read_only:
            raise PermissionError(f"memory is read-only here: {key!r}")
        if not tree:
            raise ValueError("an empty tree cannot be remembered")
        self.written[key] = tree

    def __delitem__(self, key: str) -> None:
        if self.read_only:
            raise PermissionError(f"memory is read-only here: {key!r}")
        self[key]
        self.written[key] = {}

    def __iter__(self) -> Iterator[str]:
        return (
            k
            for k in dict.fromkeys([*self.kept, *self.written])
            if self.written.get(k, self.kept.get(k))
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Memory:
    """The records of many clients: resident up to `budget` bytes, the least recently used ones in
    `folder` beyond that.

    With `durable`, every record is also written out at once (one file, renamed into place): another
    process can then take over from a worker that died. Files go through the page cache, so this
    costs about one memory copy. With `sealed`, files carry a digest, for a place where they stay
    for long and no checkpoint has one of them.
    """

    def __init__(
        self,
        folder: Path | None = None,
        budget: int = 1 << 30,
        durable: bool = False,
        sealed: bool = False,
    ) -> None:
        self.folder, self.budget, self.durable, self.sealed = folder, budget, durable, sealed
        self.resident: OrderedDict[int, Record] = OrderedDict()
        self.changed: set[int] = set()
        self.bytes = 0
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}.safetensors"

    def load(self, client: int) -> Record:
        if client in self.resident:
            self.resident.move_to_end(client)
            return self.resident[client]
        if self.folder is None or not self.path(client).exists():
            return Record()
        record = read_record(self.path(client), self.sealed)
        self._keep(client, record)
        return record

    def save(self, client: int, record: Record) -> None:
        if not record.kept and not record.draft and client not in self.resident:
            return  # a stateless client leaves no trace
        self.changed.add(client)
        if self.durable:
            self._write(client, record)
        self._keep(client, record)

    def forget(self, *clients: int) -> None:
        """Drop what is resident of these: another process has worked on their files since."""
        for client in clients:
            if client in self.resident:
                self.bytes -= self.resident.pop(client).count_bytes()

    def restore(self, records: Mapping[int, Path]) -> None:
        """Start from these files and from nothing else."""
        self.forget(*self.resident)
        self.changed.clear()
        if self.folder is not None:
            for old in self.folder.glob("*.safetensors"):
                old.unlink()
            for client, path in records.items():
                shutil.copyfile(path, self.path(client))
        else:
            for client, path in records.items():
                self._keep(client, read_record(path))

    def flush(self) -> set[int]:
        """Write what is only resident; returns the clients that changed since the last flush."""
        changed, self.changed = self.changed, set()
        if not self.durable and self.folder is not None:
            for client in sorted(changed & self.resident.keys()):
                self._write(client, self.resident[client])
        return changed

    def _keep(self, client: int, record: Record) -> None:
        """In an order that Ctrl-C may cut anywhere: a client's record is always here or in its
        file, old or new.
        """
        before = self.resident.get(client)
        self.resident[client] = record
        self.resident.move_to_end(client)
        self.bytes += record.count_bytes() - (before.count_bytes() if before else 0)
        while self.bytes > self.budget and self.folder is not None and len(self.resident) > 1:
            oldest, gone = next(iter(self.resident.items()))
            if not self.durable and oldest in self.changed:
                self._write(oldest, gone)
            del self.resident[oldest]
            self.bytes -= gone.count_bytes()

    def _write(self, client: int, record: Record) -> None:
        write_atomically(self.path(client), record.to_message().to_bytes(self.sealed), sync=False)


def read_record(path: Path, sealed: bool = False) -> Record:
    try:
        data = bytearray(path.read_bytes())
        return Record.from_message(Message.from_bytes(data, sealed=sealed))
    except (BadMessage, KeyError) as e:
        raise BadMessage(f"{path.name} is not a client's memory: {e}") from e
