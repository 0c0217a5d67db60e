"""A job: a config becomes a federation, an algorithm and an engine, runs, and leaves a run folder.

What is in the folder, and who may write there: `runs.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithms.fedavg import FedAvg
from fedlens.config import recipe as recipes
from fedlens.config.convert import nearest
from fedlens.config.parts import parameters
from fedlens.config.recipe import Config, ConfigError, Settings
from fedlens.core.algorithm import Algorithm
from fedlens.core.client import Data, generator, seeded
from fedlens.core.federation import Federation
from fedlens.core.memory import NEVER, read_record
from fedlens.core.message import Message
from fedlens.core.picture import save_pictures
from fedlens.core.rounds import Engine, Progress, Round, run
from fedlens.core.task import LearningTask, Task
from fedlens.core.tree import Tree
from fedlens.engines.worker import threads
from fedlens.runs.checkpoint import Checkpoint, naming, write
from fedlens.runs.folder import (
    claim,
    clear,
    free_folder,
    holds_run,
    may_go_on,
    put_in_place,
    read_records,
    same_run,
    trim,
)
from fedlens.runs.records import Curves, Peak, describe, describe_federation, versions
from fedlens.runs.stopping import stoppable, undisturbed

ENGINES = ("simulator", "ray", "flower")
# pictures of a run under way may take this share of its time, and none in its first seconds
LOOKING = 0.05
PATIENCE = 10.0


@dataclass(frozen=True)
class Setup:
    """What a config stands for, built."""

    config: Config
    settings: Settings
    task: Task
    federation: Federation
    algorithm: Algorithm

    @property
    def stack(self) -> str:
        return " + ".join(type(p).__name__ for p in self.algorithm.parts())

    @property
    def device(self) -> str:
        base = self.algorithm.base
        return str(base.place) if isinstance(base, FedAvg) else str(getattr(base, "device", "cpu"))


class Watch:
    """Hears how a job goes; this one keeps quiet. The command line has one that draws."""

    def begin(self, setup: Setup, folder: Path, done: int) -> None: ...
    def round(self, record: Mapping[str, Any]) -> None: ...
    def log(self, text: str) -> None: ...
    def end(self, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None:
        """Whatever happened, it is over."""


@dataclass(frozen=True)
class Outcome:
    """What a finished job leaves in Python's hands; the folder holds the same and more."""

    folder: Path
    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    setup: Setup
    state: Message

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary["metrics"])

    @property
    def result(self) -> Any:
        """A network for everything that learns, an image for what restores."""
        return self.setup.algorithm.result(self.state)


class Interrupted(Exception):
    """The user stopped the job; what was done is saved."""

    def __init__(self, folder: Path, done: int, rounds: int) -> None:
        super().__init__(
            f"stopped after round {done} of {rounds}"
            if done
            else "stopped before the first round was complete"
        )
        self.folder, self.again = folder, f"fedlens run {shlex.quote(str(folder))} --resume"


def experiment(
    recipe: str | Path,
    *,
    algorithm: str | None = None,
    out: str | Path | None = None,
    engine: str = "simulator",
    resume: bool = False,
    fresh: bool = False,
    watch: Watch | None = None,
    **overrides: Any,
) -> Outcome:
    """A recipe from Python: `experiment("demo", rounds=3, algorithm="fedprox")`. Dotted overrides
    go in as `**{"data.alpha": 0.1}`.
    """
    config = recipes.read(recipe, overrides, algorithm)
    folder = Path(out) if out else free_folder(config.name)
    return start(config, folder, engine=engine, resume=resume, fresh=fresh, watch=watch)


def load_federation(config: Config) -> Federation:
    return config.build_source().federation(config.settings.clients, config.settings.seed)


def prepare(config: Config, federation: Federation | None = None) -> Setup:
    """Build everything, and refuse what cannot work, before any work starts."""
    settings = config.settings
    task = config.build_task()
    algorithm = config.build_algorithm(task)
    federation = task.admit(federation or load_federation(config))
    if not len(federation):
        raise ConfigError(f"{config.data.name} found no clients")
    if settings.cohort is not None and settings.cohort > len(federation):
        raise ConfigError(
            f"federation.cohort is {settings.cohort}, but {config.data.name} has only"
            f" {len(federation)} clients"
        )
    federation = _with_remark(config, federation) if settings.personal else federation
    return Setup(config, settings, task, federation, algorithm.given(federation.facts))


def _with_remark(config: Config, federation: Federation) -> Federation:
    """Not refused, because recipes ask for personal metrics of whatever data somebody may put in;
    but not passed over either.
    """
    if any(h is not None and len(h) for h in federation.held_out):
        return federation
    advice = ": data.holdout=0.1 keeps a tenth" if "holdout" in parameters(config.data.cls) else ""
    note = (
        f"federation.personal has no effect, because no client of {config.data.name} keeps anything"
        f" for its own evaluation{advice}"
    )
    return replace(
        federation, facts={**federation.facts, "notes": [note, *federation.facts.get("notes", ())]}
    )


def rehearse(setup: Setup) -> None:
    """One example through a fresh model: sizes and labels that do not fit are found out here, not
    by every client on its own.
    """
    if not isinstance(setup.algorithm.base, FedAvg) or not isinstance(setup.task, LearningTask):
        return
    first = setup.federation.holdings[0]
    if first is None:  # it is elsewhere
        return
    if not isinstance(first, Data):
        raise ConfigError(
            f"{setup.config.task.name} learns from batches of examples, and"
            f" {setup.config.data.name} has none to give"
        )
    data = next((h for h in setup.federation.holdings if len(h)), None)
    if data is None:
        raise ConfigError(f"{setup.config.data.name}: no client has any data")
    with seeded(generator(setup.settings.seed)), torch.no_grad():
        batch = data.batch(torch.arange(1))
        try:
            setup.task.loss(setup.task.forward(setup.task.model().eval(), batch), batch)
        except (RuntimeError, IndexError, KeyError, ValueError) as e:
            why = str(e).strip().splitlines()[0]
            raise ConfigError(
                f"{setup.config.data.name} does not fit {setup.config.task.name} as it is set up"
                f" here: {why}"
            ) from e


MakeEngine = Callable[[Setup, Path, Any], Engine]


def make_engine(name: str | MakeEngine, setup: Setup, folder: Path, log: Any) -> Engine:
    """The only place that knows what engines there are; a function makes one that needs more than a
    config, such as a network.
    """
    s = setup.settings
    if not isinstance(name, str):
        return name(setup, folder, log)
    if name == "simulator":
        from fedlens.engines.simulator import Simulator

        return Simulator(
            setup.algorithm,
            setup.federation,
            workers=s.workers,
            threads=s.threads,
            timeout=s.timeout,
            folder=folder / "memory",
            log=log,
        )
    if name == "flower":
        raise ConfigError(
            "Flower runs at a SuperLink: fedlens run RECIPE --engine flower --superlink host:port"
        )
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name!r}{nearest(name, ENGINES)}")
    try:
        from fedlens.engines.ray import Ray
    except ImportError as e:
        raise ConfigError(
            f'the engine {name} cannot be loaded ({e}): pip install "fedlens[{name}]"'
        ) from e
    return Ray(
        setup.algorithm,
        setup.federation,
        workers=s.workers,
        threads=s.threads,
        # as everywhere with Ray; without it, a cluster of its own on this machine
        address=os.environ.get("RAY_ADDRESS"),
        timeout=s.timeout,
        folder=folder / "memory",
        log=log,
    )


def start(
    config: Config,
    folder: Path,
    *,
    engine: str | MakeEngine = "simulator",
    resume: bool = False,
    fresh: bool = False,
    watch: Watch | None = None,
    setup: Setup | None = None,
) -> Outcome:
    """Run a config into a folder, from the beginning or from its newest checkpoint. `setup`: where
    it is not simply what the config says, because the clients' data is elsewhere or already loaded.
    """
    watch = watch or Watch()
    with contextlib.closing(watch), claim(folder):
        if fresh:
            clear(folder)
        if resume:
            planned = same_run(config, folder)
        elif holds_run(folder):
            raise ConfigError(
                f"{folder} already holds a run: --resume goes on with it, --fresh starts over,"
                " --out DIR puts the new one elsewhere"
            )
        setup = setup or prepare(config)
        if not resume:
            rehearse(setup)
        checkpoint = Checkpoint(folder / "checkpoint", watch.log)
        found = go_on(checkpoint, folder, watch) if resume else None
        if found:
            may_go_on(setup.algorithm, folder, found[0].done, planned, setup.settings.rounds)
        write(folder / "config.toml", config.to_toml().encode())
        write(
            folder / "federation.json",
            json.dumps(describe_federation(setup.federation), indent=1).encode(),
        )
        return _Job(setup, folder, engine, watch, checkpoint).run(found)


def go_on(
    checkpoint: Checkpoint, folder: Path, watch: Watch
) -> tuple[Progress, dict[int, Path]] | None:
    """Where a run goes on. What came to its end is never run again from the beginning; what was
    killed may have to be, and says so.
    """
    if (found := checkpoint.load()) is not None:
        return found
    if (folder / "summary.json").exists():
        raise ConfigError(
            f"{folder} holds a run but no checkpoint to go on from: --fresh starts over, --out DIR"
            " puts a new one elsewhere"
        )
    if behind := len(read_records(folder / "metrics.jsonl")):
        watch.log(
            f"there is no checkpoint yet, so the run starts over: {behind}"
            f" round{'s' if behind > 1 else ''} will be run again"
        )
    return None


class _Job:
    """One run under way: keeps the files of the folder in step with the rounds."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        engine: str | MakeEngine,
        watch: Watch,
        checkpoint: Checkpoint,
    ) -> None:
        self.setup, self.folder, self.make_engine, self.watch, self.checkpoint = (
            setup,
            folder,
            engine,
            watch,
            checkpoint,
        )
        self.records: list[dict[str, Any]] = []
        self.peak = Peak()
        self.looking = 0.0  # seconds spent on pictures so far

    def run(self, found: tuple[Progress, dict[int, Path]] | None) -> Outcome:
        s = self.setup.settings
        (self.folder / "summary.json").unlink(missing_ok=True)
        with (
            threads(s.threads),
            contextlib.closing(
                make_engine(self.make_engine, self.setup, self.folder, self.watch.log)
            ) as self.engine,
        ):
            progress, memories = found or (Progress(self.setup.algorithm.init()), {})
            # Also where there is no checkpoint: a run that was killed before its first one left
            # memories of rounds that will be run again.
            self.engine.restore(memories)
            self.safe = Progress(progress.state, progress.done, dict(progress.heard))
            self.records = trim(self.folder / "metrics.jsonl", progress.done)
            self.curves = Curves(self.folder / "tensorboard", progress.done)
            self.watch.begin(self.setup, self.folder, progress.done)
            try:
                with self.peak, stoppable():
                    self._rounds(progress)
                    return self._finish()
            except KeyboardInterrupt:
                with contextlib.suppress(KeyboardInterrupt), undisturbed():
                    self._save()
                    self._summarise(interrupted=True)
                raise Interrupted(self.folder, self.safe.done, s.rounds) from None
            finally:
                self.curves.close()

    def _rounds(self, progress: Progress) -> None:
        s = self.setup.settings
        # the algorithm had ended the run before it was interrupted
        if progress.state.scalars.get("stop"):
            return
        run(
            self.setup.algorithm,
            self.engine,
            s.rounds,
            cohort=s.cohort,
            seed=s.seed,
            late=s.late,
            progress=progress,
            test=self.setup.federation.test,
            evaluate_every=s.evaluate_every,
            personal=s.personal,
            after_round=self._after_round,
        )

    def _after_round(self, here: Progress, finished: Round) -> None:
        memory = self.folder / "memory"
        full = next((x for x in finished.lost if os.strerror(errno.ENOSPC) in x.reason), None)
        # nobody here could keep its memory from now on; a real site's full disk is that site's
        # alone
        if full and memory.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(memory))
        with undisturbed():
            record = describe(finished)
            with naming(lines := self.folder / "metrics.jsonl"), lines.open("a") as f:
                f.write(json.dumps(record) + "\n")
            self.records.append(record)
            self.curves.add(record)
            # A copy, because an interrupt may find the run's own record between two of its lines.
            self.safe = Progress(here.state, here.done, dict(here.heard))
            every = self.setup.settings.checkpoint_every
            if every and (here.done % every == 0 or here.done == self.setup.settings.rounds):
                self._save()
        self.watch.round(record)
        if finished.metrics and here.done < self.setup.settings.rounds:
            self._show_progress(finished.number)

    def _save(self) -> None:
        self.checkpoint.save(self.safe, self.engine.snapshot())

    def _finish(self) -> Outcome:
        state, folder = self.safe.state, self.folder
        put_in_place(folder, lambda part: self.setup.task.save(state, part))
        self._draw(state)
        summary = self._summarise(interrupted=False)
        shutil.rmtree(folder / "memory", ignore_errors=True)
        write_report(folder, self.watch)
        self.watch.end(summary)
        return Outcome(folder, summary, self.records, self.setup, state)

    def _draw(self, state: Message) -> None:
        setup = self.setup
        if not any(h is not None for h in setup.federation.holdings):
            return
        state = state.note(seed=setup.settings.seed, population=len(setup.federation))
        own = setup.algorithm.pictures(state, setup.federation, self._remembered)
        if pictures := [
            *setup.task.pictures(setup.algorithm.result(state), setup.federation),
            *own,
        ]:
            save_pictures(pictures, self.folder / "pictures")

    def _remembered(self, client: int) -> Mapping[str, Tree]:
        """A simulated client's memory, as far as a checkpoint has it."""
        if client not in self.checkpoint.clients:
            return {}
        return read_record(self.checkpoint.folder / self.checkpoint.clients[client]).settle(
            self.safe.heard.get(client, NEVER)
        )

    def _show_progress(self, number: int) -> None:
        """Pictures as they improve, for whoever looks at the board. They cost little of the run's
        time and none of its bits: what is random in them has a stream of its own. A run is worth
        more than its pictures, so a failure is logged and they are left alone."""
        if sum(r["seconds"] for r in self.records) < PATIENCE + self.looking / LOOKING:
            return
        began = time.perf_counter()
        try:
            with seeded(generator(self.setup.settings.seed, number, 0x9C)):
                self._draw(self.safe.state)
        except OSError:
            raise
        except Exception as e:
            self.watch.log(f"no pictures while the run is under way: {type(e).__name__}: {e}")
            self.looking = math.inf
        self.looking += time.perf_counter() - began

    def _summarise(self, interrupted: bool) -> dict[str, Any]:
        setup, records = self.setup, self.records
        evaluated = [r["metrics"] for r in records if r["metrics"]]
        summary = {
            "recipe": setup.config.name,
            "algorithm": setup.stack,
            "metrics": evaluated[-1] if evaluated else {},
            "loss": next((r["loss"] for r in reversed(records) if r["loss"] is not None), None),
            "rounds": self.safe.done,
            "interrupted": interrupted,
            "seconds": sum(r["seconds"] for r in records),
            "peak_memory": self.peak.look(),
            "bytes_down": sum(r["bytes_down"] for r in records),
            "bytes_up": sum(r["bytes_up"] for r in records),
            "asked": sum(r["asked"] for r in records),
            "heard": sum(r["heard"] for r in records),
            "refused": sum(r["refused"] for r in records),
            # older lines do not have it
            "unevaluated": sum(len(r.get("unevaluated", ())) for r in records),
            "seed": setup.settings.seed,
            "clients": len(setup.federation),
            "engine": type(self.engine).__name__.lower(),
            "device": setup.device,
            "versions": versions(),
        }
        write(self.folder / "summary.json", json.dumps(summary, indent=1).encode())
        return summary


def write_report(folder: Path, watch: Watch) -> None:
    """A run is worth keeping even if its page cannot be drawn."""
    try:
        from fedlens.report import html as report  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return
    try:
        report.write(folder)
    except Exception as e:
        if isinstance(e, OSError):
            raise
        watch.log(f"report.html could not be written: {type(e).__name__}: {e}")
