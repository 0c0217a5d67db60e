"""Ctrl-C and SIGTERM: when they take effect."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM is handled like Ctrl-C: save, say how to resume."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with _handling(stop):
        yield


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Inside, Ctrl-C waits until the files are whole."""
    waiting: list[int] = []
    with _handling(lambda number, _: waiting.append(number)):
        yield
    if waiting:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handling(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in STOPS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
