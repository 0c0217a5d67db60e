"""A run folder, read as it is. Whatever is absent, half-written or broken becomes a sentence in
`problems`, never an exception: the report and the board show runs that died, and runs that are
being written at this moment."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fedlens.data.suffixes import BROWSER_SUFFIXES

Status = Literal["finished", "running", "stopped", "empty", "not a run"]
MARKS = ("config.toml", "metrics.jsonl", "summary.json")  # any one of them makes a folder a run
# levels of nesting; nothing FedLens writes has ten, and whatever walks a value later may recurse
DEPTH = 50
LARGEST = 1 << 1023  # whole numbers beyond it are no float
# seconds without a new line after which a run without summary counts as stopped (longer if its
# rounds are longer)
_QUIET = 120.0


@dataclass(frozen=True)
class RunFolder:
    path: Path
    status: Status
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    rounds: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    federation: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()

    @property
    def planned(self) -> int | None:
        value = as_table(self.config.get("federation")).get("rounds")
        return value if isinstance(value, int) else None

    @property
    def title(self) -> dict[str, Any]:
        """What was run, in few words, from the resolved recipe."""
        stack = self.config.get("algorithm")
        names = (
            [str(as_table(part).get("name", "?")) for part in stack]
            if isinstance(stack, list)
            else []
        )
        parts = {key: as_table(self.config.get(key)) for key in ("task", "data", "federation")}
        return {
            "task": parts["task"].get("name"),
            "data": parts["data"].get("name"),
            "algorithm": names,
            "clients": parts["federation"].get("clients"),
            "cohort": parts["federation"].get("cohort"),
            "seed": parts["federation"].get("seed", self.summary.get("seed")),
            "rounds": self.planned,
        }


def read_run(path: Path) -> RunFolder:
    """Everything a page shows about one run."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder.")
    if (kind := _kind(path)) is not None:
        return RunFolder(path, kind)
    problems: list[str] = []
    text = _text(path / "config.toml", problems, wanted=True)
    config = _toml(text, problems)
    rounds = parse_rounds(_text(path / "metrics.jsonl", problems, wanted=True), problems)
    summary = _json(path / "summary.json", problems)
    federation = _json(path / "federation.json", problems)
    pictures = read_pictures(path, problems)
    status = _progress(path, rounds, as_table(summary), config)
    if status == "stopped":
        problems.insert(
            0,
            f"The run ended before it was complete: {len(rounds)} rounds are recorded and there is"
            " no up-to-date summary.json.",
        )
    return RunFolder(
        path,
        status,
        config,
        text,
        rounds,
        as_table(summary),
        as_table(federation),
        pictures,
        problems,
    )


def read_overview(path: Path) -> RunFolder:
    """What a line in a list needs: cheap even for long runs, because only some lines of
    metrics.jsonl are read.
    """
    if (kind := _kind(path)) is not None:
        return RunFolder(path, kind)
    config = _toml(_text(path / "config.toml", []), [])
    summary = as_table(_json(path / "summary.json", []))
    # A summary has the final metrics; without one the latest evaluation is looked for in the last
    # lines.
    some = _sampled(path / "metrics.jsonl", end=1 << 13 if summary.get("metrics") else 1 << 17)
    return RunFolder(path, _progress(path, some, summary, config), config, "", some, summary)


def parse_rounds(text: str, problems: list[str]) -> list[dict[str, Any]]:
    """One object a line. A last line without its newline is still being written and is left for
    later; a round written twice (a resumed run) counts as written last."""
    rounds: dict[int, dict[str, Any]] = {}
    broken: list[int] = []
    *whole, last = text.split("\n")
    for at, line in enumerate(whole, start=1):
        if (entry := _entry(line)) is not None:
            rounds[int(entry["round"])] = entry
        elif line.strip():
            broken.append(at)
    # a complete object whose newline is missing is as good as any
    if (entry := _entry(last)) is not None:
        rounds[int(entry["round"])] = entry
    elif last.strip():
        problems.append(
            "The last line of metrics.jsonl is incomplete: the run was writing it, or died while"
            " doing so."
        )
    if broken:
        which = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
        problems.append(
            f"metrics.jsonl: {len(broken)} unreadable line{'s' if len(broken) > 1 else ''} skipped"
            f" (line {which})."
        )
    return [rounds[k] for k in sorted(rounds)]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = parse_safely(line)
    except ValueError:
        return None
    whole = (
        isinstance(entry, dict)
        and isinstance(entry.get("round"), int | float)
        and math.isfinite(entry["round"])
    )
    return entry if whole else None


def parse_safely(text: str, parse: Callable[[str], Any] = json.loads) -> Any:
    """What a text says, or a ValueError with the reason, whatever is wrong with it."""
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(DEPTH):
        if any(isinstance(x, int) and abs(x) > LARGEST for x in level):
            raise ValueError("a number in it is too large")
        level = [
            x
            for v in level
            if isinstance(v, dict | list)
            for x in (v.values() if isinstance(v, dict) else v)
        ]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read_pictures(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The index, with every file checked to be an image inside the folder; `paths` are the files
    that really are there.
    """
    folder = path / "pictures"
    index = _json(folder / "index.json", problems)
    if not isinstance(index, list):
        return []
    inside, entries = folder.resolve(), []
    for entry in index:
        names = as_table(entry).get("files")
        files = [str(name) for name in names] if isinstance(names, list) else []
        paths = [p for name in files if (p := _image(inside, name)) is not None]
        if len(paths) < len(files):
            problems.append(
                f"Picture “{entry.get('caption', '')}”: {len(files) - len(paths)} of {len(files)}"
                " files are missing or not allowed."
            )
        if paths:
            entries.append({**entry, "paths": paths})
    return entries


def _image(folder: Path, name: str) -> Path | None:
    """The image of that name, if it lies in the folder itself and its name can be part of an
    address.
    """
    try:
        name.encode()
        path = (folder / name).resolve()
        allowed = (
            path.parent == folder and path.suffix.lower() in BROWSER_SUFFIXES and path.is_file()
        )
    except (OSError, ValueError, RuntimeError):  # a NUL, a name of 300 letters, a link to itself
        return None
    return path if allowed else None


def rounds_done(rounds: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds are behind; they are numbered from 0."""
    return int(rounds[-1]["round"]) + 1 if rounds else 0


def final_metrics(run: RunFolder) -> dict[str, float]:
    """From the summary, or the last evaluation of a run that has none yet."""
    from_summary = as_table(run.summary.get("metrics"))
    last = next((as_table(r.get("metrics")) for r in reversed(run.rounds) if r.get("metrics")), {})
    chosen = from_summary if from_summary and run.status != "running" else last
    return {k: float(v) for k, v in chosen.items() if isinstance(v, int | float)}


def folder_signature(path: Path) -> tuple[tuple[int, int], ...]:
    """Changes whenever a page about this run would."""
    return tuple(_stamp(path / name) for name in (*MARKS, "federation.json", "pictures/index.json"))


def last_change(path: Path) -> float:
    return max((_stamp(p)[0] for p in (path, *(path / name for name in MARKS))), default=0) / 1e9


def image_digest(path: Path) -> str:
    """Which image this is, so that one that several runs share is shown once."""
    return _digest(path, *_stamp(path))


@lru_cache(maxsize=4096)
def _digest(path: Path, changed: int, size: int) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return f"{changed}-{size}"


def find_runs(root: Path, depth: int = 3) -> dict[str, Path]:
    """Run folders below `root`, by relative name. Direct children that are no runs are listed too,
    so that they can be shown as what they are. Links that lead out of `root` are not followed."""
    base, found = root.resolve(), {}

    def walk(folder: Path, level: int) -> bool:
        if is_run(folder):
            found[folder.relative_to(base).as_posix()] = folder
            return True
        here = False
        try:
            with os.scandir(folder) as entries:
                children = sorted(
                    e.name
                    for e in entries
                    if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)
                )
        except OSError:
            children = []
        for child in children if level < depth else []:
            here = walk(folder / child, level + 1) or here
        if level == 1 and not here:
            found[folder.relative_to(base).as_posix()] = folder
        return here

    walk(base, 0)
    return found


def runs_in(path: Path) -> list[Path]:
    """A run folder itself, or the runs below a folder that is none."""
    return [path] if is_run(path) else [p for p in find_runs(path).values() if is_run(p)]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest tails of the paths that tell the runs apart."""
    for parts in range(1, 5):
        names = [printable("/".join(p.parts[-parts:])) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{printable(p.name)} ({k + 1})" for k, p in enumerate(paths)]


def printable(text: str) -> str:
    """Names of files need not be UTF-8: bytes that are not are shown as escapes, which keeps two
    such names apart.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def as_table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_run(path: Path) -> bool:
    # unlike Path.is_file, False where looking is forbidden
    return any(os.path.isfile(path / name) for name in MARKS)


def _kind(path: Path) -> Literal["empty", "not a run"] | None:
    if is_run(path):
        return None
    try:
        return "not a run" if any(not p.name.startswith(".") for p in path.iterdir()) else "empty"
    except OSError:
        return "not a run"


def _progress(
    path: Path,
    rounds: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Status:
    """Finished: a summary that is no older than the last round. Running: something was written a
    moment ago.
    """
    (metrics_at, _), (summary_at, _), (config_at, _) = (
        _stamp(path / name) for name in ("metrics.jsonl", "summary.json", "config.toml")
    )
    if summary and summary_at + 2_000_000_000 >= metrics_at:
        planned, reached = as_table(config.get("federation")).get("rounds"), summary.get("rounds")
        stopped = bool(summary.get("interrupted")) or (
            not rounds and bool(planned) and reached == 0
        )
        return "stopped" if stopped else "finished"
    if _locked(path / ".lock"):
        return "running"
    slowest = max((r["seconds"] for r in rounds[-20:] if as_number(r.get("seconds"))), default=0.0)
    return (
        "running"
        if time.time() - max(metrics_at, config_at) / 1e9 < max(_QUIET, 5 * slowest)
        else "stopped"
    )


def _locked(path: Path) -> bool:
    """Does a job hold the folder? Looked up where the system lists its locks: trying to take one
    might get in a job's way.
    """
    try:
        stat = path.stat()
        held = Path("/proc/locks").read_text()
    except OSError:
        return False
    return f" {os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino} " in held


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def _text(path: Path, problems: list[str], wanted: bool = False) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if wanted:
            problems.append(f"There is no {path.name} yet.")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}).")
    return ""


def _toml(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        return as_table(parse_safely(text, tomllib.loads))
    except ValueError as error:
        problems.append(f"config.toml is not valid TOML ({error}).")
        return {}


def _json(path: Path, problems: list[str]) -> Any:
    text = _text(path, problems)
    if not text:
        return {}
    try:
        return parse_safely(text)
    except ValueError as error:
        problems.append(f"{path.name} is not valid JSON ({error}).")
        return {}


def _sampled(path: Path, end: int, count: int = 16) -> list[dict[str, Any]]:
    """About `count` lines spread over the file and those in its last `end` bytes: enough for a
    small curve and the latest metrics.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            chunks = list(_spread(file, size, count, end)) if size > 1 << 16 else [file.read()]
    except OSError:
        return []
    return parse_rounds(b"".join(chunks).decode("utf-8", "replace"), [])


def _spread(file: Any, size: int, count: int, end: int) -> Iterable[bytes]:
    for k in range(count):
        file.seek(size * k // count)
        if k:
            file.readline()
        yield file.readline()
    for tail in (end, 1 << 17, 1 << 20):  # a line can be longer than the end that was asked for
        file.seek(max(0, size - tail))
        file.readline()
        if found := file.read():
            yield found
            return
