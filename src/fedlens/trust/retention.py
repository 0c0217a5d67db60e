"""What a site keeps, for how long, and how it goes for good.

A site's folder holds its ledger, and of every job a folder with its memory. Memory goes when a job
is over or the time is up; the ledger, which is the site's own proof, only when it is asked for by
name. What is deleted is overwritten first: on a plain disk its old blocks are then gone too. On
flash, on copy-on-write file systems and in backups older copies may remain: there, only an
encrypted disk whose key is destroyed helps.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedlens.trust.ledger import LEDGER_FILE

DAY = 86_400.0
VAULT = "vault"  # in a site's folder: what SecureSum keeps to itself
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Kept:
    """Something that a site keeps. kind: "memory", "secrets" (of SecureSum), "ledger" or "other".
    changed: when last, in seconds of the epoch."""

    path: Path
    kind: str
    bytes: int
    changed: float

    @property
    def days(self) -> float:
        return (time.time() - self.changed) / DAY


def kept_in(folder: Path) -> list[Kept]:
    """What lies in a site's folder, jobs first."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            found.append(_measured(path, "secrets" if path.name == VAULT else "memory"))
        elif path.name == LEDGER_FILE:
            found.append(_measured(path, "ledger"))
        elif path.name != ".lock":
            found.append(_measured(path, "other"))
    return sorted(found, key=lambda kept: kept.kind != "memory")


def _measured(path: Path, kind: str) -> Kept:
    files = [path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())]
    stats = [f.lstat() for f in files]
    size = sum(s.st_size for s, f in zip(stats, files) if not f.is_dir())
    return Kept(path, kind, size, max(s.st_mtime for s in stats))


def delete_for_good(path: Path) -> int:
    """Overwrite every file below with zeros, then remove it; how many bytes that were. Links are
    removed and never followed."""
    total = 0
    for file in _files(path):
        total += _overwrite(file)
        file.unlink()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    return total


def _files(path: Path) -> Iterator[Path]:
    if path.is_symlink() or not path.is_dir():
        yield path
        return
    for inside in sorted(path.iterdir()):
        yield from _files(inside)


def _overwrite(path: Path) -> int:
    if path.is_symlink() or not path.is_file():
        return 0
    size = path.stat().st_size
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        for start in range(0, size, _BLOCK):
            os.pwrite(file, bytes(min(_BLOCK, size - start)), start)
        os.fsync(file)
    finally:
        os.close(file)
    return size
