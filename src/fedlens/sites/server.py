"""The server's end of a recipe over real sites: Flower's ServerApp.

The server needs no client's data; what its own [data] finds, if anything, is only tested on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.config.recipe import Config
from fedlens.core.federation import Federation
from fedlens.core.log import Log
from fedlens.data.source import DataError
from fedlens.report.page_data import UNEVALUATED
from fedlens.runs.job import run_job
from fedlens.runs.listener import Listener
from fedlens.runs.setup import Setup, make_setup
from fedlens.sites.agreement import recipe_hash, recipe_of_request, secured
from fedlens.sites.programs import private_file
from fedlens.trust.receipts import Receipts
from fedlens.trust.signing import parse_public_pem

if TYPE_CHECKING:
    from fedlens.engines.flower.engine import Flower


def run_server(grid: Any, run: Mapping[str, Any]) -> None:
    """The ServerApp: an ordinary job whose engine is Flower. The run folder is written here, on the
    SuperLink's machine.
    """

    config, who_sees = secured(recipe_of_request(run))
    agreed, text = recipe_hash(config), config.to_toml()
    # Sites remember one round back, not more: see engines/flower/site.py.
    config = replace(config, federation=config.federation.with_value("checkpoint_every", 1))

    def make_engine(setup: Setup, folder: Path, log: Log) -> Flower:
        return _flower(grid, run, setup, agreed, text, folder, log)

    lines = _LogLines()
    lines.log(who_sees)
    run_job(
        config,
        Path(str(run["out"])),
        engine=make_engine,
        resume=bool(run["resume"]),
        fresh=bool(run["fresh"]),
        listener=lines,
        setup=_deployed(_prepare(config, lines.log), _bindings(run)),
    )


def _flower(
    grid: Any,
    run: Mapping[str, Any],
    setup: Setup,
    agreed: str,
    text: str,
    folder: Path,
    log: Log,
) -> Flower:
    from fedlens.engines.flower.engine import Flower

    own = own_facts(folder)
    return Flower(
        grid,
        setup.algorithm,
        len(setup.federation),
        recipe=agreed,
        text=text,
        job=own["job"],
        cohort_seed=own["cohort_seed"],
        timeout=setup.settings.timeout,
        wait=float(run["wait"]),
        least=int(run["least"]),
        late=setup.settings.late,
        forgive=bool(run["forgive"]),
        log=log,
        classes=", ".join(_class_names(setup)),
        receipts=Receipts(folder, own["job"], Path(str(run.get("keys") or "."))),
        bindings=_bindings(run),
    )


def _class_names(setup: Setup) -> tuple[str, ...]:
    """What labels mean: by the server's data, or the names in its [data]. Empty: sites say it."""
    return tuple(setup.federation.facts.classes or setup.config.data.given.get("names") or ())


def _bindings(run: Mapping[str, Any]) -> dict[int, bytes] | None:
    """client -> public key; None where nobody bound them."""
    found = json.loads(str(run.get("bindings", "null")))
    return None if found is None else {int(i): str(key).encode() for i, key in found.items()}


def _deployed(setup: Setup, bindings: Mapping[int, bytes] | None) -> Setup:
    algorithm = setup.algorithm.deployed()
    if bindings is not None:
        algorithm = algorithm.with_known({i: parse_public_pem(k) for i, k in bindings.items()})
    return replace(setup, algorithm=algorithm)


def _prepare(config: Config, log: Log) -> Setup:
    """With the recipe's own [data] to test on where it is there, else with no data at all."""
    try:
        return make_setup(config, learn=False)
    except DataError as e:
        log(f"nothing to test on at the server: {e}")
    task = config.build_task()
    return Setup(
        config,
        config.settings,
        task,
        Federation([None] * config.settings.clients),
        config.build_algorithm(task),
    )


def own_facts(folder: Path) -> dict[str, Any]:
    """What stays with the run folder, so that a resumed run goes on with it: the job's name for the
    sites, under which they find their memories again, and the seed of the cohorts, which nobody
    but the server knows.
    """
    file = private_file(folder / "flower.json")
    text = file.read_text()
    facts: dict[str, Any] = json.loads(text) if text else {"job": secrets.token_hex(8)}
    if "cohort_seed" not in facts:
        facts["cohort_seed"] = secrets.randbits(128)
        file.write_text(json.dumps(facts))
    return facts


class _LogLines(Listener):
    """A job's progress as lines for the Flower log."""

    def on_start(self, setup: Setup, folder: Path, done: int) -> None:
        self.log(
            f"{setup.stack} with {len(setup.federation)} sites into {folder}, {done} of"
            f" {setup.settings.rounds} rounds done"
        )

    def on_round(self, record: Mapping[str, Any]) -> None:
        numbers = {"training loss": record["loss"], **dict(list(record["metrics"].items())[:3])}
        text = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if v is not None)
        self.log(
            f"round {record['round']}: {record['heard']} of {record['asked']} heard in"
            f" {record['seconds']:.1f} s  {text}"
        )
        for prefix, missing in (("", record["lost"]), (UNEVALUATED, record["unevaluated"])):
            for lost in missing:
                self.log(f"  client {lost['client']}: {prefix}{lost['reason']}")

    def log(self, text: str) -> None:
        # metrics are named by sites: no control characters, whatever they are called
        plain = "".join(c if c.isprintable() else "?" for c in text)
        print(f"fedlens: {plain}", flush=True)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.log("done")
