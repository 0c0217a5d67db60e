"""Recorder: any engine, with every message kept in a folder as the server saw it, so that `fedlens
audit` can ask later what could be read out of them.

    messages/round-0003/down.safetensors         what was broadcast
    messages/round-0003/client-0007.safetensors  what client 7 replied

A file is a message's own byte form (`core/message.py`): no pickle. Replies that were lost or
refused are not there: the server made nothing of them. Whoever has the folder has what the server
had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.core.files import write_atomically
from fedlens.core.message import BadMessage, Message
from fedlens.core.replies import Arrival

DOWN = "down.safetensors"


@dataclass(frozen=True)
class Exchange:
    """One round as the server saw it: what went down, and what came back from whom."""

    down: Message
    replies: Mapping[int, Message]

    @property
    def round(self) -> int:
        return self.down.round


class Recorder:
    """
    Args:
        engine: what carries the messages.
        folder: where they are kept; None keeps them in `exchanges` alone.
    """

    def __init__(self, engine: Any, folder: Path | None = None) -> None:
        self.engine, self.folder = engine, folder
        self.exchanges: list[Exchange] = []
        engine.keep_singles = True  # of a reply that was already summed nothing can be kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        """As the engine does it. Evaluation is left out: its replies are numbers, and every one of
        them is in `metrics.jsonl`.
        """
        if message.header.evaluate:
            yield from self.engine.exchange(message, ids, heard)
            return
        place = round_folder(self.folder, message.round) if self.folder else None
        replies: dict[int, Message] = {}
        if place:
            place.mkdir(parents=True, exist_ok=True)
            for old in place.glob("client-*.safetensors"):  # of an attempt that did not end
                old.unlink()
            write_atomically(place / DOWN, message.to_bytes(), sync=False)
        else:
            self.exchanges.append(Exchange(message, replies))
        for item in self.engine.exchange(message, ids, heard):
            if isinstance(item, Message):
                if place:
                    write_atomically(
                        place / f"client-{item.sender:04d}.safetensors", item.to_bytes(), sync=False
                    )
                else:
                    replies[item.sender] = item
            yield item


def round_folder(folder: Path, number: int) -> Path:
    return folder / f"round-{number:04d}"


def read_exchanges(folder: Path) -> list[Exchange]:
    """What a recorder left, round by round."""
    return [_read_exchange(place) for place in sorted(folder.glob("round-*")) if place.is_dir()]


def _read_exchange(place: Path) -> Exchange:
    if not (place / DOWN).is_file():
        raise BadMessage(f"{place} has no {DOWN}: it was not written by --record-messages")
    replies: dict[int, Message] = {}
    for path in sorted(place.glob("client-*.safetensors")):
        reply = _read(path)
        if path.name != f"client-{reply.sender:04d}.safetensors":
            raise BadMessage(f"{path}: it says that it comes from client {reply.sender}")
        replies[reply.sender] = reply
    return Exchange(_read(place / DOWN), replies)


def _read(path: Path) -> Message:
    try:
        return Message.from_bytes(bytearray(path.read_bytes()))
    except BadMessage as e:
        raise BadMessage(f"{path}: {e}") from e
