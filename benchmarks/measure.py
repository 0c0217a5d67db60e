"""What the benchmarks share: medians with an interval, the best of some turns, and the memory of a
family of processes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import psutil


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the interquartile range."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": middle, "low": low, "high": high}


def best(jobs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Least processor time of each job; the jobs take turns, and the first two turns do not
    count.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 2):
        for name, job in jobs.items():
            began = time.process_time()
            job()
            if turn > 1:
                times[name].append(time.process_time() - began)
    return {name: min(t) for name, t in times.items()}


class PeakMemory:
    """Peak of the proportional set size of this process and its children, looked at twenty times a
    second.
    Proportional: pages that a fork shares are counted once, not once per process."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.is_set():
            self.peak = max(self.peak, sum(_pss(p) for p in (me, *me.children(recursive=True))))
            time.sleep(0.05)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()


def _pss(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0
