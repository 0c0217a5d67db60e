"""A short part of `make fuzz`, and that its checks can fail."""

from __future__ import annotations

import random
from pathlib import Path

import fuzz
import pytest
from fuzz import TARGETS, Messages, Replies, resealed, sealed

from fedlens.core.message import Message


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("messages", 1500), ("replies", 300), ("greetings", 200), ("recipes", 60),
        ("checkpoints", 100), ("images", 150), ("videos", 30),
    ],
)  # fmt: skip
def test_nothing_is_found_in_a_short_part(name: str, cases: int) -> None:
    result = fuzz.fuzz(name, cases, seed=1)
    assert result["faults"] == []
    assert 0 < result["refused"] <= cases
    assert set(TARGETS) == {
        "messages", "replies", "greetings", "recipes", "checkpoints", "images", "videos",
    }  # fmt: skip


def test_a_target_that_dies_hangs_or_accepts_too_much_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Odd(Messages):
        def case(self, rng: random.Random) -> bool:
            number = rng.number  # type: ignore[attr-defined]
            if number == 1:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGKILL)
            if number == 2:
                import time

                time.sleep(60)
            if number == 3:
                raise AssertionError("accepted")
            return True

    class Numbered(random.Random):
        def __new__(cls, text: str) -> Numbered:
            return super().__new__(cls)

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.number = int(text.split()[-1])

    monkeypatch.setitem(TARGETS, "odd", Odd)
    monkeypatch.setattr(fuzz, "SECONDS", 1.0)
    monkeypatch.setattr(fuzz.random, "Random", Numbered)
    result = fuzz.fuzz("odd", 5)
    said = {number: what for number, what, _ in result["faults"]}
    assert said.keys() == {1, 2, 3} and "SIGKILL" in said[1] and "hangs" in said[2]
    assert said[3] == "AssertionError: accepted"


def test_a_reply_that_somebody_sealed_is_read(tmp_path: Path) -> None:
    """The digest of a hostile client is right: it is its content that is refused, or not."""
    target = Replies(tmp_path)
    assert sealed(target.data) == target.data and Message.from_bytes(target.data).sender == 2
    rng = random.Random(0)
    changed = [resealed(target.data, rng) for _ in range(50)]
    assert any(x != target.data for x in changed)
    assert all(sealed(x) == x for x in changed)
