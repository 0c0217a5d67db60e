"""What malloc does with freed memory: keep it, return it at once, or now and then.

PyTorch asks for aligned blocks. Before version 2.38, glibc leaves gaps between those that the next
ones do not fit into: a training step of IART on a 1x6x3x64x64 clip grew to 9.2 GB, most of it free.
Taking large arrays from the kernel one by one avoids that, but in a virtual machine every page
costs 3 microseconds each time (half as much again for a backward pass). So: now and then, when much
is free, all of it is given back (`tidy`). Worker processes rather keep it from step to step,
processes through which large messages pass return it at once. Where there is no glibc nothing is
done. `keep` and `return_at_once` change the whole process: they are for processes of our own.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

MUCH = 1 << 30
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -3, -1, -2, -8  # of mallopt
_NAMES = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Info(ctypes.Structure):
    """struct mallinfo2"""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


@cache
def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Info
        library.malloc_trim.argtypes = (ctypes.c_size_t,)
        with open("/proc/self/statm", "rb"):
            return library
    except (OSError, AttributeError):
        return None


def keep() -> None:
    """Keep what training frees. By default glibc returns large blocks to the kernel at every step
    and faults them in again at the next: 2,000 page faults and a tenth of the time of a step for
    1.6 M parameters (docs/LOG.md)."""
    if _glibc():
        for option, value in (
            (_MMAP_THRESHOLD, 1 << 30),
            (_TRIM_THRESHOLD, (1 << 31) - 1),
            (_TOP_PAD, 1 << 26),
        ):
            _glibc().mallopt(option, value)


def share() -> None:
    """One heap for all threads. glibc would give another thread a heap of its own, whose blocks are
    small and for which `keep` does not hold."""
    if _glibc():
        _glibc().mallopt(_ARENA_MAX, 1)


def return_at_once() -> None:
    """Blocks of a megabyte and more go back to the kernel when they are freed: glibc begins so, but
    learns from the first one freed to keep them. A threshold that is set no longer moves."""
    if _glibc():
        _glibc().mallopt(_MMAP_THRESHOLD, 1 << 20)


def give_back() -> None:
    """All that is free, for a moment in which something else needs the room."""
    if _glibc():
        _glibc().malloc_trim(0)


@cache
def _others() -> int:
    """What is resident besides the heap, code above all; as it is when first asked, once what lies
    in gaps by then is given back.
    """
    give_back()
    return max(0, _resident() - _used())


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _used() -> int:
    info = _glibc().mallinfo2()
    return int(info.uordblks + info.hblkhd)


def tidy(much: int = MUCH) -> bool:
    """Give free memory back if there is much of it; whether it did."""
    if _glibc() is None or _resident() - _used() - _others() < much:
        return False
    give_back()
    return True
