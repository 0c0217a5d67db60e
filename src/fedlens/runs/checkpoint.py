"""Checkpoints: after `kill -9` at any moment a run goes on from the last one and ends in the same
bits.

A checkpoint is a manifest and the files it names: the state, and one file per client that has
memory. Files never change once they are there; a client that did not work since the last checkpoint
is named again, not written again. The manifest holds the round, what the server heard of whom, and
the sha256 of every file and of itself. It is renamed into place last: a half-written checkpoint is
one without a manifest, and a damaged one is found out. The one before is kept for that case. All is
safetensors and JSON, no pickle.

Random streams need no room here: each is made from (seed, round, client) or (seed, round, layer)
when it is used, so the round says it all. Nor does it matter that a client may have worked on a
round that was cut off: its memory holds that work as a draft which the server never heard of, and
forgets it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.core.files import write_atomically
from fedlens.core.message import BadMessage, Message
from fedlens.core.rounds import Progress

FORMAT = 3  # of manifests and of the messages they name
KEPT = 2  # the newest, and the one before in case the newest turns out damaged


class CheckpointError(ValueError):
    """No checkpoint in the folder can be used."""


@dataclass
class Checkpoint:
    """The checkpoints of one run folder. `clients` names the newest file of every client that has
    memory.
    """

    folder: Path
    log: Callable[[str], None] = lambda text: None
    clients: dict[int, str] = field(default_factory=dict)
    # sha256 of the files that are known to be good
    sums: dict[str, str] = field(default_factory=dict)
    done: int | None = None  # rounds in the newest one

    def save(self, progress: Progress, changed: Mapping[int, Path]) -> None:
        """`changed` are the memory files of the clients that worked since the last call. Saving the
        same round again changes nothing: what clients did since then are drafts."""
        if progress.done == self.done:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{progress.done:06d}"
        for id, path in sorted(changed.items()):
            self.clients[id] = self._adopt(f"client-{id}-{stamp}.safetensors", path)
        heard = json.dumps(sorted(progress.heard.items()))
        state = self._add(f"state-{stamp}.safetensors", progress.state.to_bytes())
        files = [state, *self.clients.values()]
        body = {
            "format": FORMAT,
            "done": progress.done,
            "heard": heard,
            "state": state,
            "clients": {str(id): name for id, name in sorted(self.clients.items())},
            "sha256": {name: self.sums[name] for name in files},
        }
        write_atomically(
            self.folder / f"manifest-{stamp}.json",
            json.dumps({**body, "seal": _seal(body)}, indent=1).encode(),
        )
        self.done = progress.done
        self._tidy()

    def check_format(self) -> None:
        """Refuse what another version wrote. It is whole, so there is nothing to fall back on."""
        for path in self._manifests():
            found = _format(path)
            if found not in (None, FORMAT):
                raise CheckpointError(
                    f"{self.folder} was written by another version of FedLens (format {found},"
                    f" this one reads {FORMAT}): start over with --fresh"
                )

    def load(self) -> tuple[Progress, dict[int, Path]] | None:
        """The newest checkpoint that is whole, and its clients' files; None where there has never
        been one.
        """
        self.check_format()
        found = self._manifests()
        for k, path in enumerate(found):
            try:
                whole = self._read(path)
            except Exception as e:  # of bytes that somebody else made, anything may come
                self.log(
                    f"checkpoint {path.name} is damaged ({_why(e)})"
                    + ("; the one before is used" if path != found[-1] else "")
                )
                continue
            for damaged in found[:k]:
                damaged.unlink()
            return whole
        if found:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole any more: start over with --fresh"
            )
        # One state is what a kill before the first manifest leaves; a second is written only beside
        # a manifest.
        if len(list(self.folder.glob("state-*.safetensors"))) > 1:
            raise CheckpointError(
                f"the manifests in {self.folder} are gone, and states are of no use without: start"
                " over with --fresh"
            )
        return None

    def _add(self, name: str, data: bytes | bytearray) -> str:
        write_atomically(self.folder / name, data)
        self.sums[name] = hashlib.sha256(data).hexdigest()
        return name

    def _adopt(self, name: str, path: Path) -> str:
        """A client's file as it is now. A second name for it will do: whoever changes a memory file
        writes a new one in its place.
        """
        target = self.folder / name
        try:
            target.unlink(missing_ok=True)
            os.link(path, target)
        except OSError:  # another disk, or one that has no links
            return self._add(name, path.read_bytes())
        with target.open("rb") as f:
            os.fsync(f.fileno())
            self.sums[name] = hashlib.file_digest(f, "sha256").hexdigest()
        return name

    def _read(self, path: Path) -> tuple[Progress, dict[int, Path]]:
        body: dict[str, Any] = json.loads(path.read_bytes())
        if body.pop("seal") != _seal(body):
            raise ValueError("the manifest was changed")
        # The seal keeps out accidents; somebody who can write here can also seal. What is read is
        # what is listed, and lies in the folder.
        unlisted = {body["state"], *body["clients"].values()} - body["sha256"].keys()
        if unlisted:
            raise ValueError(f"it names {min(unlisted)}, which it does not list")
        for name, sha in body["sha256"].items():
            if Path(name).name != name:
                raise ValueError(f"{name} is outside the folder")
            with (self.folder / name).open("rb") as f:
                if hashlib.file_digest(f, "sha256").hexdigest() != sha:
                    raise ValueError(f"{name} was changed")
        state = Message.from_bytes(bytearray((self.folder / body["state"]).read_bytes()))
        self.clients = {int(id): name for id, name in body["clients"].items()}
        self.sums, self.done = dict(body["sha256"]), int(body["done"])
        progress = Progress(
            state, self.done, {int(i): int(r) for i, r in json.loads(body["heard"])}
        )
        return progress, {id: self.folder / name for id, name in self.clients.items()}

    def _manifests(self) -> list[Path]:
        """Newest first."""
        return sorted(
            self.folder.glob("manifest-*.json"), key=lambda p: (len(p.name), p.name), reverse=True
        )

    def _tidy(self) -> None:
        """Files that neither of the kept manifests names go. A manifest goes before its files, so
        that it never lacks one.
        """
        manifests = self._manifests()
        for old in manifests[KEPT:]:
            old.unlink()
        named = {p.name for p in manifests[:KEPT]} | {
            name for p in manifests[:KEPT] for name in _named(p)
        }
        for path in self.folder.iterdir():
            if path.name not in named and path.is_file():
                path.unlink()
        self.sums = {name: sha for name, sha in self.sums.items() if name in named}


def _format(manifest: Path) -> Any:
    """As a manifest says, if it was not damaged since."""
    try:
        body = json.loads(manifest.read_bytes())
        return body["format"] if body.pop("seal") == _seal(body) else None
    except Exception:
        return None


def _named(manifest: Path) -> Iterator[str]:
    try:
        yield from json.loads(manifest.read_bytes())["sha256"]
    except Exception:
        return


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    if isinstance(error, BadMessage):
        return f"the state is {error}"
    return str(error) if type(error) is ValueError else "the manifest is not complete"
