"""Files: the one atomic write (beside its place, then renamed into it), the lock of a folder, and
where files are looked for. The only module that renames files or reads FEDLENS_DATA and
FEDLENS_HOME.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


def write_atomically(path: Path, data: bytes | bytearray | str, *, sync: bool = True) -> None:
    """All of it or nothing: what was there before survives a full disk. With `sync` the new file
    survives a power cut too; without, it is much cheaper.
    """
    raw = data.encode() if isinstance(data, str) else data
    with name_in_errors(path), atomic_path(path) as part, part.open("wb") as file:
        file.write(raw)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if sync:
        _sync_names(path.parent)


def _sync_names(folder: Path) -> None:
    """A renamed file survives a power cut once its folder is on the disk too; some network disks
    know no such thing.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    finally:
        os.close(opened)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to, in the same folder and with the same suffix. It becomes `path` when the
    block ends well and goes when it does not. Two processes may write the same file at once.
    """
    part = path.with_name(f".{path.stem}.part{os.getpid()}{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """An empty folder to write to. When the block ends well, each file and folder in it moves to
    `folder`, in place of an older one of that name.
    """
    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for path in sorted(part.iterdir()):
            target = folder / path.name
            if path.is_dir() and target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def lock_folder(folder: Path, taken: str = "another job is running in {folder}") -> Iterator[None]:
    """One process a folder: two would write over each other. A ValueError says that it is taken.
    Work that fails before it has written anything leaves no folder behind."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise ValueError(f"{folder} is a file, not a folder") from e
    with (folder / ".lock").open("w") as lock:
        for _ in range(20):  # workers of a job that was just killed hold on for a moment
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            raise ValueError(taken.format(folder=folder))
        try:
            yield
        except BaseException:
            _remove_empty(new)
            raise


def _remove_empty(new: Sequence[Path]) -> None:
    """Folders that were made for some work, the innermost first, as long as nothing is in them."""
    with contextlib.suppress(OSError):
        for folder in new:
            if [p.name for p in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
            folder.rmdir()


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """A write that fails does not say where, and whoever has to make room wants to know."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = str(path)
        raise


def find_named(name: str) -> Path | None:
    """What is called so: as given (`~` and `$VARIABLES` filled in), else below FEDLENS_DATA."""
    given = Path(os.path.expandvars(name)).expanduser()
    return given if given.exists() else find_in_data_folder(str(given))


def find_in_data_folder(name: str) -> Path | None:
    """Below FEDLENS_DATA alone: for what has a fixed place there and need not be named."""
    folder = data_folder()
    place = folder / name if folder else None
    return place if place is not None and place.exists() else None


def data_folder() -> Path | None:
    """Where FEDLENS_DATA says that data lies, if it says so."""
    named = os.environ.get("FEDLENS_DATA")
    return Path(named).expanduser() if named else None


def home_folder() -> Path:
    """Where FedLens keeps things for this user: FEDLENS_HOME, or ~/.fedlens."""
    return Path(os.environ.get("FEDLENS_HOME", Path.home() / ".fedlens"))
