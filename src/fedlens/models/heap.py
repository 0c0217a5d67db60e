"""Freed memory that malloc holds on to, and giving it back.

PyTorch asks for aligned blocks. Before version 2.38, glibc leaves gaps between those that the next ones do not fit into: a training step of
IART on a 1x6x3x64x64 clip grew to 9.2 GB, most of it free. Taking large arrays from the kernel one by one avoids that, but in a virtual
machine every page costs 3 microseconds each time (half as much again for a backward pass). So: now and then, when much is free, all of it
is given back. Where there is no glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

MUCH = 1 << 30


NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    """struct mallinfo2"""

    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


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


@cache
def _others() -> int:
    """What is resident besides the heap, code above all; as it is when first asked, once what lies in gaps by then is given back."""
    _glibc().malloc_trim(0)
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
    _glibc().malloc_trim(0)
    return True
