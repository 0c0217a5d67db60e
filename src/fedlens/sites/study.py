"""A recipe over real sites: what the server does (`main`), what a site does (`make_site`), and how
a run is handed to Flower (`submit`).

A run's Flower app carries the recipe. A site that has its own copy answers only a server whose
recipe is the same in everything but [data]; where the data lies (`--data`) is each site's own
business. The server needs no client's data; what its own [data] finds, if anything, is only tested
on.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.parts import parameters
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.federation import Federation
from fedlens.data.source import DataError
from fedlens.engines.flower.site import FlowerConfig, Site, SiteError, federation_of_one
from fedlens.report.page_data import UNEVALUATED, remarks
from fedlens.runs import job
from fedlens.sites.programs import Crew, Say, await_port, connection, flower_home, split_address

PLACES = ("root", "folder", "file", "image")  # what data sources call the place their data lies in


def fingerprint(config: Config) -> str:
    """Of everything but [data]: what server and sites must agree on."""
    tables = {k: v for k, v in config.tables().items() if k not in ("data", "about")}
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


# -- inside Flower ---------------------------------------------------------------------------------


def main(grid: Any, run: FlowerConfig) -> None:
    """The ServerApp: an ordinary job whose engine is Flower. The run folder is written here, on the
    SuperLink's machine.
    """
    from fedlens.engines.flower.engine import Flower

    config = recipes.from_tables(tomllib.loads(str(run["recipe"])), str(run["name"]))
    agreed = fingerprint(config)
    # Sites remember one round back, not more: see engines/flower/site.py.
    config = replace(config, federation=config.federation.with_value("checkpoint_every", 1))
    s = config.settings

    def engine(setup: job.Setup, folder: Path, log: Say) -> Flower:
        return Flower(
            grid,
            setup.algorithm,
            len(setup.federation),
            recipe=agreed,
            job=token(folder),
            timeout=s.timeout,
            patience=float(run["patience"]),
            least=int(run["least"]),
            late=s.late,
            forgive=bool(run["forgive"]),
            log=log,
            classes=", ".join(setup.federation.facts.get("classes", ())),
        )

    watch = _Log()
    job.start(
        config,
        Path(str(run["out"])),
        engine=engine,
        resume=bool(run["resume"]),
        fresh=bool(run["fresh"]),
        watch=watch,
        setup=_server_setup(config, watch.log),
    )


def _server_setup(config: Config, log: Say) -> job.Setup:
    """The server needs no client's data. What the recipe's own [data] gives it, if it finds any, is
    something to test on.
    """
    try:
        return job.prepare(config)
    except DataError as e:
        log(f"nothing to test on at the server: {e}")
    task = config.build_task()
    return job.Setup(
        config,
        config.settings,
        task,
        Federation([None] * config.settings.clients),
        config.build_algorithm(task),
    )


class _Log(job.Watch):
    """A job's progress as lines for the Flower log."""

    def begin(self, setup: job.Setup, folder: Path, done: int) -> None:
        self.log(
            f"{setup.stack} with {len(setup.federation)} sites into {folder}, {done} of"
            f" {setup.settings.rounds} rounds done"
        )

    def round(self, record: Mapping[str, Any]) -> None:
        numbers = {"training loss": record["loss"], **dict(list(record["metrics"].items())[:3])}
        text = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if v is not None)
        self.log(
            f"round {record['round']}: {record['heard']} of {record['asked']} heard in"
            f" {record['seconds']:.1f} s  {text}"
        )
        for before, missing in (("", record["lost"]), (UNEVALUATED, record["unevaluated"])):
            for lost in missing:
                self.log(f"  client {lost['client']}: {before}{lost['reason']}")

    def log(self, text: str) -> None:
        print(f"fedlens: {text}", flush=True)

    def end(self, summary: Mapping[str, Any]) -> None:
        self.log("done")


def token(folder: Path) -> str:
    """The job's name for the sites; it stays with the run folder, so that a resumed run finds their
    memories again.
    """
    file = folder / "flower.json"
    if not file.exists():
        file.write_text(json.dumps({"job": secrets.token_hex(8)}))
    job: str = json.loads(file.read_text())["job"]
    return job


def make_site(node: FlowerConfig, run: FlowerConfig) -> Site:
    """The site's end: its own copy of the recipe if it has one, else the server's, over its own
    data.
    """
    id = site_number(node)
    if node.get("recipe"):
        config = recipes.read(str(node["recipe"]))
    else:
        config = recipes.from_tables(tomllib.loads(str(run["recipe"])), str(run["name"]))
    agreed = fingerprint(config)
    own = str(node.get("data", ""))
    if own:
        config = over(config, own)
    s = config.settings
    task = config.build_task()
    federation = task.admit(config.build_source().federation(1 if own else s.clients, s.seed))
    parts = s.clients if own else len(federation)
    if not 0 <= id < parts:
        raise SiteError(f"this site is client {id}, but the recipe has {parts} (0 to {parts - 1})")
    part = 0 if own else id
    here = federation_of_one(id, federation.holdings[part], federation.held_out_of(part))
    # What it decides for itself, and no recipe for it: see layers/balance.py.
    algorithm = config.build_algorithm(task).given(
        {**federation.facts, "generate": node.get("generate", "")}
    )
    classes, told = tuple(federation.facts.get("classes", ())), tuple(remarks(federation.facts))
    return Site(id, algorithm, here, Path(str(node["folder"])), agreed, s.threads, classes, told)


def site_number(node: FlowerConfig) -> int:
    for key in ("client", "partition-id"):
        if key in node:
            return int(node[key])
    raise SiteError("this site does not say which client it is: add client=N to its node config")


def over(config: Config, place: str) -> Config:
    """The same recipe over the data that lies here."""
    known = parameters(config.data.cls)
    key = next((k for k in PLACES if k in known), None)
    if key is None:
        raise ConfigError(
            f"{config.data.name} reads no files, so it cannot take data from {place}: leave"
            " --data out"
        )
    if not Path(place).exists():
        raise ConfigError(f"there is no data at {place}")
    return replace(config, data=config.data.with_value(key, place).checked())


def submit(
    config: Config,
    folder: Path,
    superlink: str,
    *,
    ca: Path,
    resume: bool,
    fresh: bool,
    patience: float,
    least: int,
    forgive: bool,
    say: Say,
) -> int:
    """Hand a recipe to a SuperLink and follow it; an exit code. superlink: an address, or a
    connection of the user's Flower config.
    """
    from fedlens.engines.flower.engine import write_app

    home = flower_home()
    with Crew(say, home) as crew, tempfile.TemporaryDirectory(prefix="fedlens-app-") as app:
        name = superlink
        if ":" in superlink:
            host, port = split_address(superlink)
            name = connection(home, superlink, ca)
            await_port(host, port, ca, crew)
        facts: dict[str, bool | int | float | str] = {
            "name": config.name,
            "recipe": config.to_toml(),
            "out": str(folder.absolute()),
            "resume": resume,
            "fresh": fresh,
            "patience": patience,
            "least": least,
            "forgive": forgive,
        }
        write_app(Path(app), "fedlens.sites.study:main", "fedlens.sites.study:make_site", facts)
        told = _json(crew.call("flwr", "run", app, name, "--format", "json"))
        number = str(told.get("run-id", ""))
        if not told.get("success") or not number:
            raise ConfigError(
                f"the SuperLink did not take the run: {told.get('error-message', told)}"
            )
        try:
            crew.start("flwr", "log", number, name, "--stream").wait()
            status = await_end(crew, number, name)
        except KeyboardInterrupt:
            say(
                "the run goes on at the SuperLink; to end it:"
                f" {crew.line('flwr', 'stop', number, name)}"
            )
            return 130
        say(
            f"run {number}: {status}" + (f", in {folder}" if status == "finished:completed" else "")
        )
        return 0 if status == "finished:completed" else 1


def await_end(crew: Crew, number: str, name: str) -> str:
    for _ in range(100):
        told = _json(crew.call("flwr", "list", "--run-id", number, name, "--format", "json"))
        found: list[dict[str, Any]] = told.get("runs", [])
        status = str(found[0]["status"]) if found else "unknown"
        if status.startswith("finished"):
            break
        time.sleep(3)
    return status


def _json(text: str) -> dict[str, Any]:
    """Flower prints warnings around its JSON."""
    start, end = text.find("{"), text.rfind("}")
    try:
        found: dict[str, Any] = json.loads(text[start : end + 1])
    except ValueError as e:
        raise ConfigError(f"Flower said: {' '.join(text.split())[:300]}") from e
    return found
