"""`fedlens.fit`: a network, a loss and data sets from Python become a run, in one call.

It is a thin front over `runs/job.py`: the objects go into the same config that a recipe makes, and
everything else (engines, run folder, progress, checkpoint, resume, report) is the job's. What
cannot be written down, such as a network, is described in `config.toml` instead; whoever resumes
such a run gives the same objects again.
"""

from __future__ import annotations

import copy
import html
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedlens.config import recipe as recipes
from fedlens.config.parts import DEFAULT_BASE, part_of
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.algorithm import Algorithm, Layer
from fedlens.core.files import write_atomically
from fedlens.core.imports import allow, named_modules
from fedlens.runs.folder import default_folder
from fedlens.runs.job import Interrupted, Outcome, run_job
from fedlens.runs.listener import Listener
from fedlens.runs.notebook import NotebookProgress, in_notebook
from fedlens.runs.personal import Ended, own_weights_of
from fedlens.runs.progress import live
from fedlens.runs.setup import Setup
from fedlens.runs.text import count, rounded

RoundRow = dict[str, Any]
Callback = Callable[[RoundRow], Any]


def fit(
    model: Any,
    loss: Any,
    clients: Any,
    *,
    test: Any = None,
    metrics: Any = None,
    algorithm: Any = "fedavg",
    rounds: int = 10,
    out: str | Path | None = None,
    engine: str = "simulator",
    held_out: Any = None,
    partition: str | None = None,
    n_clients: int | None = None,
    name: str | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    verbose: bool = True,
    resume: bool = False,
    fresh: bool = False,
    **settings: Any,
) -> FitResult:
    """Train a network together: federated learning in one call.

        result = fedlens.fit(Net(), F.cross_entropy, [data_0, data_1], test=data, rounds=20)
        result.model, result.metrics, result.history.table(), result.report()

    Args:
        model: an `nn.Module`, which starts as it is and is never changed itself, or a class or
            function that makes one.
        loss: (prediction, target) -> one number.
        clients: a list of torch Datasets, one for each client; or one Dataset, which is divided
            among `n_clients` by the rule `partition`.
        test: what the server tests on after each round.
        metrics: functions (prediction, target) -> number or torchmetrics objects; one, a list, or
            a dict by name. The first is the headline.
        algorithm: a name of `fedlens list algorithms` or parts joined by +; or layers, classes or
            objects of your own: `[FedProx(mu=0.1), MyLayer()]`, on FedAvg unless a base is first.
        rounds: how many to run.
        out: the run folder; `runs/NAME` by default.
        engine: "simulator" or "ray".
        held_out: for each client a Dataset that it evaluates on, with `personal=True`.
        partition: the rule by which one Dataset is divided: iid, dirichlet, shards, classes,
            quantity; further keys of a rule (`alpha=0.3`) are given beside it.
        n_clients: among how many clients one Dataset is divided.
        name: of the run; that of the network by default.
        callbacks: functions of a round's row of the history; one that returns True ends the run.
        verbose: a live bar, lines in a pipe, a table in a notebook; or nothing.
        resume: go on with the run in `out`, given the same objects.
        fresh: start over in `out`.
        settings: any key of a recipe: lr=0.05, batch=64, epochs=2, cohort=10, seed=1, mu=0.1.

    Raises:
        ValueError: for what cannot work, before any work, and where no client could answer.
    """
    named = {"rounds": rounds, "clients": n_clients}
    keys: dict[str, Any] = {f"federation.{k}": v for k, v in named.items() if v is not None}
    keys |= {"data.partition": partition} if partition is not None else {}
    task = {"model": model, "loss": loss, "metrics": metrics}
    data = {"clients": clients, "test": test, "held_out": held_out}
    config = _config(task, data, algorithm, name, {**keys, **settings})
    if engine == "flower":
        raise ConfigError(
            "fit cannot send a network and data of this Python process to real sites: put them"
            " into a module, name it in a recipe, and use fedlens run --engine flower"
        )
    folder = Path(out) if out else default_folder(config.name, resume, fresh)
    heard = callbacks if isinstance(callbacks, Sequence) else (callbacks,)
    listener = _Callbacks(_progress() if verbose else Listener(), heard)
    try:
        outcome = run_job(
            config, folder, engine=engine, resume=resume, fresh=fresh, listener=listener
        )
    except Interrupted as e:
        again = f"fedlens.fit(..., out={str(folder)!r}, resume=True)"
        e.args = (f"{e}; what was done is saved. Go on with {again} and the same objects",)
        raise
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        if "pickle" not in str(e).lower():
            raise
        raise ConfigError(
            f"the engine {engine} has to send what was given to other processes, and cannot ({e}):"
            " define it in a module, or use workers=0"
        ) from e
    return FitResult(outcome)


def _config(
    task: Mapping[str, Any],
    data: Mapping[str, Any],
    algorithm: Any,
    name: str | None,
    settings: Mapping[str, Any],
) -> Config:
    tables = {
        "task": {"name": "Custom", **_without_none(task)},
        "data": {"name": "TorchDatasets", **_without_none(data)},
        "algorithm": _stack(algorithm),
    }
    allow(named_modules(tables))
    model = task["model"]
    made = type(model) if isinstance(model, nn.Module) else model
    called = name or getattr(made, "__name__", "fit").strip("<>").lower()
    return recipes.from_tables(tables, called, settings)


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if v is not None}


def _stack(algorithm: Any) -> list[Any]:
    """A name, or parts: classes and objects as they are, with FedAvg below layers."""
    if isinstance(algorithm, str):
        return list(recipes.algorithm_tables(algorithm))
    given = algorithm if isinstance(algorithm, list | tuple) else [algorithm]
    if not given:
        raise ConfigError("algorithm is an empty list: name one, or give a layer")
    parts: list[Any] = []
    for thing in given:
        if isinstance(thing, str):
            parts += recipes.algorithm_tables(thing)[1 if parts else 0 :]
            continue
        kind = thing if isinstance(thing, type) else type(thing)
        if not issubclass(kind, Algorithm):
            raise ConfigError(f"algorithm: {kind.__name__} is neither a layer nor an algorithm")
        if not parts and issubclass(kind, Layer):
            parts.append({"name": DEFAULT_BASE})
        parts.append(part_of(thing, f"algorithm.{kind.__name__}"))
    return parts


# -- while it runs ---------------------------------------------------------------------------------


def _progress() -> Listener:
    return NotebookProgress() if in_notebook() else live()


class _Callbacks(Listener):
    """Tells each of them about a round, beside whoever shows it."""

    def __init__(self, shown: Listener, callbacks: Sequence[Callback]) -> None:
        self.shown, self.callbacks = shown, callbacks

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        self.shown.on_start(setup, folder, done)

    def on_round(self, record: Mapping[str, Any]) -> bool:
        self.shown.on_round(record)
        row = as_row(record)
        answers = [callback(dict(row)) for callback in self.callbacks]
        return any(answer is True for answer in answers)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.shown.on_end(summary)

    def log(self, text: str) -> None:
        self.shown.log(text)

    def close(self) -> None:
        self.shown.close()


# -- what comes out --------------------------------------------------------------------------------


def as_row(record: Mapping[str, Any]) -> RoundRow:
    """A round of `metrics.jsonl` as a flat row, counted from 1."""
    return {
        "round": record["round"] + 1,
        "training_loss": record["loss"],
        **record["metrics"],
        "heard": record["heard"],
        "asked": record["asked"],
        "seconds": record["seconds"],
        "bytes_down": record["bytes_down"],
        "bytes_up": record["bytes_up"],
    }


class History(list[RoundRow]):
    """A row for every round."""

    def table(self) -> Any:
        """A pandas DataFrame with the rounds as its index; the plain list without pandas."""
        try:
            import pandas
        except ImportError:
            return self
        return pandas.DataFrame(list(self)).set_index("round") if self else pandas.DataFrame()


@dataclass(frozen=True)
class Report:
    """A run's report: shown inline in a notebook, a path elsewhere."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:0"'
            ' sandbox="allow-scripts"></iframe>'
        )


def _ready(network: nn.Module) -> nn.Module:
    net: nn.Module = copy.deepcopy(network)
    return net.eval()


class FitResult:
    """What `fit` gives: the network, the rounds, the folder with everything else.

    Args:
        outcome: of the job, for whoever wants the state or the setup.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.history = History(as_row(r) for r in outcome.rounds)

    @property
    def model(self) -> nn.Module:
        """The network with what was learned, ready to be used; a copy each time."""
        if any(getattr(p, "keeps_private", False) for p in self.outcome.setup.algorithm.parts()):
            warnings.warn(
                "a part of this network stays with the clients and is as it began:"
                " result.client_model(0) is the whole one of client 0",
                stacklevel=2,
            )
        return _ready(self.outcome.result)

    def client_model(self, client: int) -> nn.Module:
        """The network of one client, where clients have their own."""
        state, algorithm = self.outcome.state, self.outcome.setup.algorithm
        own = own_weights_of(client, self.folder, Ended.read(self.folder), algorithm)
        return _ready(algorithm.result(state.put(model={**state.trees["model"], **own})))

    @property
    def folder(self) -> Path:
        return self.outcome.folder

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation."""
        return self.outcome.metrics

    def report(self) -> Report:
        """Shown inline where it is the last line of a notebook's cell."""
        path = self.folder / "report.html"
        if not path.exists():
            from fedlens.report.html import write_report

            path = write_report(self.folder)
        return Report(path)

    def save(self, path: str | Path) -> None:
        """The weights, as safetensors."""
        write_atomically(Path(path), (self.folder / "model.safetensors").read_bytes())

    def _facts(self) -> dict[str, str]:
        summary = self.outcome.summary
        rows = {"algorithm": str(summary["algorithm"])}
        clients = count(summary["clients"], "client")
        rows["rounds"] = f"{summary['rounds']}, {clients}, {summary['seconds']:.1f} s"
        rows |= {k: rounded(v) for k, v in list(self.metrics.items())[:4] if v is not None}
        if summary["loss"] is not None:
            rows["training loss"] = rounded(summary["loss"])
        if summary["asked"] > summary["heard"]:
            rows["lost replies"] = f"{summary['asked'] - summary['heard']} of {summary['asked']}"
        return {**rows, "folder": str(self.folder)}

    def __repr__(self) -> str:
        facts = self._facts()
        wide = max(map(len, facts))
        lines = [f"  {key:<{wide}}  {value}" for key, value in facts.items()]
        return "\n".join([f"FitResult of {self.outcome.setup.config.name}", *lines])

    def __rich_repr__(self) -> Any:
        yield from self._facts().items()

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(k)}</th>"
            f"<td style='text-align:left'>{html.escape(v)}</td></tr>"
            for k, v in self._facts().items()
        )
        return f"<table>{rows}</table>"
