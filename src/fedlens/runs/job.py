"""A job: a config runs, from the beginning or from a checkpoint, and leaves a run folder.

What is in the folder, and who may write there: `folder.py`.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.client import generator, seeded
from fedlens.core.files import lock_folder, name_in_errors, write_atomically
from fedlens.core.imports import module_option, named_modules
from fedlens.core.memory import NEVER, read_record
from fedlens.core.message import Message
from fedlens.core.picture import save_pictures
from fedlens.core.rounds import Progress, Round, Stalled, evaluate, run, unusable
from fedlens.core.tree import Tree
from fedlens.engines.recorder import Recorder
from fedlens.engines.worker import threads
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.engines import MakeEngine, make_engine, require_engine
from fedlens.runs.folder import (
    check_rounds,
    check_settings,
    clear_folder,
    default_folder,
    holds_run,
    read_records,
    save_result,
    trim_records,
)
from fedlens.runs.listener import Listener
from fedlens.runs.records import Curves, Peak, describe, describe_federation, versions
from fedlens.runs.setup import Setup, make_setup, try_one_example
from fedlens.runs.stopping import interrupts_deferred, sigterm_interrupts
from fedlens.trust import accounting
from fedlens.trust.accounting import Account, BudgetSpent, Journal

# pictures of a run under way may take this share of its time, and none in its first seconds
PICTURE_SHARE = 0.05
PICTURE_DELAY = 10.0


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

    def __init__(self, folder: Path, done: int, rounds: int, modules: Sequence[str] = ()) -> None:
        super().__init__(
            f"stopped after round {done} of {rounds}"
            if done
            else "stopped before the first round was complete"
        )
        allowed = [word for m in modules for word in ("--module", module_option(m))]
        self.folder = folder
        self.again = shlex.join(["fedlens", "run", str(folder), "--resume", *allowed])


def experiment(
    recipe: str | Path,
    *,
    algorithm: str | None = None,
    out: str | Path | None = None,
    engine: str = "simulator",
    resume: bool = False,
    fresh: bool = False,
    listener: Listener | None = None,
    **overrides: Any,
) -> Outcome:
    """A recipe from Python: `experiment("demo", rounds=3, algorithm="fedprox")`.

    Args:
        recipe: the name of a shipped one, or a file.
        algorithm: a name of `fedlens list algorithms`, or parts joined by +, in place of the
            recipe's own.
        out: the run folder; `runs/NAME` by default.
        engine: "simulator", "ray" or "flower".
        resume: go on with the run in `out`.
        fresh: start over in `out`.
        listener: hears how the run goes.
        overrides: keys of the recipe; dotted ones go in as `**{"data.alpha": 0.1}`.
    """
    config = recipes.read(recipe, overrides, algorithm)
    folder = Path(out) if out else default_folder(config.name, resume, fresh)
    return run_job(config, folder, engine=engine, resume=resume, fresh=fresh, listener=listener)


def run_job(
    config: Config,
    folder: Path,
    *,
    engine: str | MakeEngine = "simulator",
    resume: bool = False,
    fresh: bool = False,
    listener: Listener | None = None,
    setup: Setup | None = None,
    record: bool = False,
) -> Outcome:
    """Run a config into a folder, from the beginning or from its newest checkpoint. `setup`: where
    it is not simply what the config says, because the clients' data is elsewhere or already loaded.
    `record`: keep all messages, for an audit.
    """
    listener = listener or Listener()
    with contextlib.closing(listener), lock_folder(folder):
        if fresh:
            clear_folder(folder)
        checkpoint = Checkpoint(folder / "checkpoint", listener.log)
        if resume:
            checkpoint.check_format()
            planned = check_settings(config, folder)
        elif holds_run(folder):
            raise ConfigError(
                f"{folder} already holds a run: --resume goes on with it, --fresh starts over,"
                " --out DIR puts the new one elsewhere (in Python: resume=True, fresh=True,"
                " out=DIR)"
            )
        if isinstance(engine, str):
            require_engine(engine)
        setup = setup or make_setup(config)
        if not resume:
            try_one_example(setup)
        found = resume_point(checkpoint, folder, listener) if resume else None
        if found:
            check_rounds(setup.algorithm, folder, found[0].done, planned, setup.settings.rounds)
        return _Job(setup, folder, engine, listener, checkpoint, record).run(found)


def resume_point(
    checkpoint: Checkpoint, folder: Path, listener: Listener
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
        listener.log(
            f"there is no checkpoint yet, so the run starts over: {behind}"
            f" round{'s' if behind > 1 else ''} will be run again"
        )
    return None


@dataclass
class _Job:
    """One run under way: keeps the files of the folder in step with the rounds."""

    setup: Setup
    folder: Path
    engine_kind: str | MakeEngine
    listener: Listener
    checkpoint: Checkpoint
    record: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)
    peak: Peak = field(default_factory=Peak)
    picture_seconds: float = 0.0  # spent on pictures so far
    start: Mapping[str, float] = field(default_factory=dict)  # metrics of a run without rounds
    account: Account | None = None  # of a stack with differential privacy
    sizes: Mapping[int, int] = field(default_factory=dict)  # examples by client, where known
    stopped: str = ""  # why the run ended before its last round
    references: dict[str, dict[str, float]] | None = None  # as far as they are known

    def run(self, found: tuple[Progress, dict[int, Path]] | None) -> Outcome:
        settings = self.setup.settings
        with threads(settings.threads):
            # weights to start from or a package may be missing: before anything is written
            start = self.setup.algorithm.init()
            self._open_account(found[0].done if found else 0)
        self._describe()
        with (
            threads(settings.threads),
            contextlib.closing(
                make_engine(self.engine_kind, self.setup, self.folder, self.listener.log)
            ) as engine,
        ):
            self.engine: Any = engine
            if self.record:
                self.engine = Recorder(engine, self.folder / "messages")
            progress, memories = found or (Progress(start), {})
            if why := unusable(progress.state, start):
                raise ConfigError(f"the checkpoint in {self.folder} is of another model: {why}")
            # Also where there is no checkpoint: a run that was killed before its first one left
            # memories of rounds that will be run again.
            self.engine.restore(memories)
            self.safe = Progress(progress.state, progress.done, dict(progress.heard))
            self.records = trim_records(self.folder / "metrics.jsonl", progress.done)
            self.curves = Curves(self.folder / "tensorboard", progress.done)
            self.listener.on_start(self.setup, self.folder, progress.done)
            try:
                with self.peak, sigterm_interrupts():
                    self._rounds(progress)
                    return self._finish()
            except KeyboardInterrupt:
                with contextlib.suppress(KeyboardInterrupt), interrupts_deferred():
                    self._save()
                    self._summarise(interrupted=True)
                own = named_modules(self.setup.config.tables())
                raise Interrupted(self.folder, self.safe.done, settings.rounds, own) from None
            except Stalled:
                with interrupts_deferred():
                    self._save()
                    self._summarise(interrupted=True)
                raise
            finally:
                self.curves.close()

    def _describe(self) -> None:
        """What can be said before the first round."""
        (self.folder / "summary.json").unlink(missing_ok=True)
        config, federation = self.setup.config, describe_federation(self.setup.federation)
        write_atomically(self.folder / "config.toml", config.to_toml(with_folders=True))
        write_atomically(self.folder / "federation.json", json.dumps(federation, indent=1))

    def _rounds(self, progress: Progress) -> None:
        settings = self.setup.settings
        # the algorithm had ended the run before it was interrupted
        if progress.state.header.stop:
            return
        if not settings.rounds and settings.evaluate_every:
            self.start = self._evaluate_start(progress)
        run(
            self.setup.algorithm,
            self.engine,
            settings.rounds,
            cohort=settings.cohort,
            seed=settings.seed,
            # a server over real sites has one of its own, which they never learn
            cohort_seed=getattr(self.engine, "cohort_seed", None),
            late=settings.late,
            max_weight=settings.max_weight,
            patience=settings.patience,
            progress=progress,
            test=self.setup.federation.test,
            evaluate_every=settings.evaluate_every,
            personal=self.setup.personal,
            before_round=self._charge if self.account else None,
            after_round=self._after_round,
        )
        if self.stopped:
            self._save()
            if settings.evaluate_every and not self.records[-1]["metrics"]:
                self.start = self._evaluate_start(progress)

    def _open_account(self, done: int) -> None:
        """What the run has spent before, whatever its checkpoint remembers of it."""
        held = enumerate(self.setup.federation.holdings)
        self.sizes = {i: len(data) for i, data in held if hasattr(data, "__len__")}
        self.account = accounting.open_account(
            self.setup.algorithm,
            len(self.setup.federation),
            self.setup.settings.cohort,
            self._size,
            self.setup.personal,
        )
        if self.account is not None:
            part: Any = accounting.private_part(self.setup.algorithm)
            seeded = part.mechanism(1, 1, 1).seeded
            self.journal = Journal(self.folder / accounting.PRIVACY_FILE, seeded)
            try:
                self.journal.replay(self.account, done)
            except ValueError as e:
                raise ConfigError(str(e)) from e

    def _size(self, client: int) -> int | None:
        """How many examples a client has; of all that it ever had, what costs most. A site that is
        not here any more has spent all the same."""
        part: Any = accounting.private_part(self.setup.algorithm)
        found = set(self.journal.sizes.get(client, ()))
        if client in self.sizes:
            found.add(self.sizes[client])
        if len(found) < 2:
            return next(iter(found), None)
        people = len(self.setup.federation), self.setup.settings.cohort or 1
        return max(found, key=lambda n: accounting.spent_by_round(part.mechanism(n, *people), [1]))

    def _charge(self, number: int, asked: Sequence[int]) -> Mapping[str, float] | None:
        """On the disk before anybody is asked: a kill gives nothing back."""
        assert self.account is not None
        if hasattr(self.engine, "sizes"):  # over real sites, as each of them says
            self.sizes = self.engine.sizes()
        if not self.journal.knows(number):
            asked = self._affordable(asked)
            try:
                self.account.charge(asked)
            except BudgetSpent as e:
                if not number:
                    raise ConfigError(f"{e}: not even one round can be run") from e
                self.stopped = f"stopped after round {number}: {e}"
                self.listener.log(self.stopped)
                return None
            self.journal.write(number, asked, self.sizes)
        spent = self.account.epsilon()
        return {} if spent is None else {"epsilon": spent}

    def _affordable(self, asked: Sequence[int]) -> Sequence[int]:
        """Over real sites a round costs what each says that it has: one that is too dear by its own
        word, or has spent what it may, is left out and does not end the run for the others. Where
        too few would be left it is all of them, and the run ends.
        """
        if not hasattr(self.engine, "left_out"):
            return asked
        assert self.account is not None
        out = {
            i: f"is left out: by the {self.sizes[i]} examples that it says it has, another round"
            f" would cost it epsilon {cost:.4g}, more than max_epsilon"
            for i, cost in self.account.overdrawn(asked).items()
        }
        left = [i for i in asked if i not in out]
        if out and len(left) < self.setup.algorithm.quorum(len(asked)):
            for i in out if left else ():
                self.listener.log(f"client {i} {out[i]}; {len(left)} others are too few")
            return asked
        self.engine.left_out = out
        return left

    def _evaluate_start(self, progress: Progress) -> Mapping[str, float]:
        """What a run without rounds can say: how good it is to begin with."""
        settings = self.setup.settings
        state = progress.state.with_header(
            rounds=settings.rounds,
            seed=settings.seed,
            population=len(self.setup.federation),
            max_weight=settings.max_weight,
        )
        here = Progress(state, 0, progress.heard)
        test, personal = self.setup.federation.test, settings.personal
        return evaluate(self.setup.algorithm, self.engine, here, test, personal).metrics

    def _after_round(self, here: Progress, finished: Round) -> bool:
        memory = self.folder / "memory"
        full = next((x for x in finished.lost if os.strerror(errno.ENOSPC) in x.reason), None)
        # nobody here could keep its memory from now on; a real site's full disk is that site's
        # alone
        if full and memory.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(memory))
        with interrupts_deferred():
            record = describe(finished, self.setup.algorithm)
            if self.account and (told := self.account.statement()):
                record["privacy"] = told.sentence()  # no epsilon without it
            with name_in_errors(lines := self.folder / "metrics.jsonl"), lines.open("a") as f:
                f.write(json.dumps(record) + "\n")
            self.records.append(record)
            self.curves.add(record)
            # A copy, because an interrupt may find the run's own record between two of its lines.
            self.safe = Progress(here.state, here.done, dict(here.heard))
            every = self.setup.settings.checkpoint_every
            if every and (here.done % every == 0 or here.done == self.setup.settings.rounds):
                self._save()
        if finished.metrics:
            record = {**record, "references": self._references()}
        ended = self.listener.on_round(record) is True
        if ended:
            self._save()
        elif finished.metrics and here.done < self.setup.settings.rounds:
            self._show_progress(finished.number)
        return ended

    def _save(self) -> None:
        self.checkpoint.save(self.safe, self.engine.snapshot())

    def _finish(self) -> Outcome:
        state, folder = self.safe.state, self.folder
        whole = self.setup.algorithm.as_saved(state)
        save_result(folder, lambda part: self.setup.task.save(whole, part))
        self._draw(state)
        summary = self._summarise(interrupted=False, references=self._references())
        shutil.rmtree(folder / "memory", ignore_errors=True)
        self._write_report()
        self.listener.on_end(summary)
        return Outcome(folder, summary, self.records, self.setup, state)

    def _draw(self, state: Message) -> None:
        setup = self.setup
        if not any(h is not None for h in setup.federation.holdings):
            return
        state = state.with_header(seed=setup.settings.seed, population=len(setup.federation))
        own = setup.algorithm.pictures(state, setup.federation, self._remembered)
        shown = setup.task.pictures(setup.algorithm.result(state), setup.federation)
        if pictures := [*shown, *own]:
            save_pictures(pictures, self.folder / "pictures")

    def _remembered(self, client: int) -> Mapping[str, Tree]:
        """A simulated client's memory, as far as a checkpoint has it."""
        if client not in self.checkpoint.clients:
            return {}
        record = read_record(self.checkpoint.folder / self.checkpoint.clients[client])
        return record.settle(self.safe.heard.get(client, NEVER))

    def _show_progress(self, number: int) -> None:
        """Pictures as they improve, for whoever looks at the board. They cost little of the run's
        time and none of its bits: what is random in them has a stream of its own. A run is worth
        more than its pictures, so a failure is logged and they are left alone."""
        least = PICTURE_DELAY + self.picture_seconds / PICTURE_SHARE
        if sum(r["seconds"] for r in self.records) < least:
            return
        began = time.perf_counter()
        try:
            with seeded(generator(self.setup.settings.seed, number, 0x9C)):
                self._draw(self.safe.state)
        except OSError:
            raise
        except Exception as e:
            self.listener.log(f"no pictures while the run is under way: {type(e).__name__}: {e}")
            self.picture_seconds = math.inf
        self.picture_seconds += time.perf_counter() - began

    def _references(self) -> dict[str, dict[str, float]]:
        """See `Task.references`; of a run that has figures to hold against them. Computed once, at
        the first evaluation, without touching the run's random numbers."""
        setup, test = self.setup, self.setup.federation.test
        if test is None or not any(r["metrics"] for r in self.records):
            return {}
        if self.references is None:
            with seeded(generator(setup.settings.seed, 0x9D)):
                start = setup.algorithm.result(setup.algorithm.init())
                found = setup.task.references(start, test)
            self.references = {name: dict(m) for name, m in found.items()}
        return self.references

    def _summarise(
        self, interrupted: bool, references: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, Any]:
        setup, records = self.setup, self.records
        evaluated = [r["metrics"] for r in records if r["metrics"]]
        summary = {
            "recipe": setup.config.name,
            "algorithm": setup.stack,
            "metrics": dict(self.start) or (evaluated[-1] if evaluated else {}),
            "references": references or {},
            "loss_name": setup.algorithm.base.loss_name,
            "loss": next((r["loss"] for r in reversed(records) if r["loss"] is not None), None),
            "rounds": self.safe.done,
            "interrupted": interrupted,
            "stopped": self.stopped,
            "privacy": self._privacy(),
            "seconds": sum(r["seconds"] for r in records),
            "peak_memory": self.peak.look(),
            "bytes_down": sum(r["bytes_down"] for r in records),
            "bytes_up": sum(r["bytes_up"] for r in records),
            "evaluation_bytes": sum(r["evaluation_bytes"] for r in records),
            "asked": sum(r["asked"] for r in records),
            "heard": sum(r["heard"] for r in records),
            "refused": sum(r["refused"] for r in records),
            "skipped": sum(bool(r["skipped"]) for r in records),
            "unevaluated": sum(len(r["unevaluated"]) for r in records),
            "seed": setup.settings.seed,
            "clients": len(setup.federation),
            "engine": type(getattr(self.engine, "engine", self.engine)).__name__.lower(),
            "device": setup.device,
            "versions": versions(),
        }
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=1))
        return summary

    def _privacy(self) -> dict[str, Any]:
        """The whole statement, and what each site spent."""
        found = self.account.statement() if self.account else None
        if found is None or self.account is None:
            return {}
        spent = self.account.by_client() if found.unit == "example" else {}
        by_site = {str(i): epsilon for i, epsilon in spent.items()}
        return {**found.table(), "sentence": found.sentence(), "by_site": by_site}

    def _write_report(self) -> None:
        """A run is worth keeping even if its page cannot be drawn."""
        from fedlens.report.html import write_report

        try:
            write_report(self.folder)
        except OSError:
            raise
        except Exception as e:
            self.listener.log(f"report.html could not be written: {type(e).__name__}: {e}")
