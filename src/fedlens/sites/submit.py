"""How a recipe becomes a run: handed to a SuperLink as a Flower app, and followed to its end."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.config.recipe import Config, ConfigError
from fedlens.core.log import Log
from fedlens.sites.monitor import note_run
from fedlens.sites.network import split_address, wait_for_port
from fedlens.sites.programs import Programs, flower_home, write_connection
from fedlens.sites.serve import read_served

_SERVER = "fedlens.sites.server:run_server"
SITE = "fedlens.sites.site:make_site"
COMPLETED = "finished:completed"


def submit(
    config: Config,
    folder: Path,
    superlink: str,
    *,
    ca: Path,
    unbound: bool,
    resume: bool,
    fresh: bool,
    wait: float,
    least: int,
    forgive: bool,
    log: Log,
) -> int:
    """Hand a recipe to a SuperLink and follow it; an exit code. superlink: the folder of `fedlens
    serve`, an address, or a connection of the user's Flower config. unbound: a SuperLink that
    `serve` did not start, whose sites are believed which client they are.
    """
    bindings: Mapping[int, str] | None = None
    state = None if unbound else Path(superlink)
    if state is not None:
        served = read_served(state, min(60.0, wait))
        superlink, ca, bindings = served.address, served.ca, served.bindings
    run_config: dict[str, bool | int | float | str] = {
        "name": config.name,
        "text": config.to_toml(),
        "out": str(folder.absolute()),
        "resume": resume,
        "fresh": fresh,
        "wait": wait,
        "least": least,
        "forgive": forgive,
        "keys": str(ca.parent.absolute()),
        "bindings": json.dumps(bindings),
    }
    home = flower_home()
    with Programs(log, home) as programs:
        connection = superlink
        if ":" in superlink:
            host, port = split_address(superlink)
            connection = write_connection(home, superlink, ca)
            wait_for_port(host, port, ca)
        run_id = _start_run(programs, run_config, connection)
        if state is not None:
            note_run(state, folder)
        try:
            programs.start("flwr", "log", run_id, connection, "--stream").wait()
            status = _final_status(programs, run_id, connection)
        except KeyboardInterrupt:
            stop = programs.shell_line("flwr", "stop", run_id, connection)
            log(f"the run goes on at the SuperLink; to end it: {stop}")
            return 130
    completed = status == COMPLETED
    log(f"run {run_id}: {status}" + (f", in {folder}" if completed else ""))
    return 0 if completed else 1


def _start_run(
    programs: Programs, run_config: dict[str, bool | int | float | str], connection: str
) -> str:
    """The id that the SuperLink gave the run."""
    from fedlens.engines.flower.engine import write_app

    with tempfile.TemporaryDirectory(prefix="fedlens-app-") as app:
        write_app(Path(app), _SERVER, SITE, run_config)
        reply = _read_json(programs.run("flwr", "run", app, connection, "--format", "json"))
    run_id = str(reply.get("run-id", ""))
    if not reply.get("success") or not run_id:
        raise ConfigError(
            f"the SuperLink did not take the run: {reply.get('error-message', reply)}"
        )
    return run_id


def _final_status(programs: Programs, run_id: str, connection: str) -> str:
    """Asked for a few minutes at most: the log ends a little before the run does."""
    for _ in range(100):
        command = ("flwr", "list", "--run-id", run_id, connection, "--format", "json")
        runs: list[dict[str, Any]] = _read_json(programs.run(*command)).get("runs", [])
        status = str(runs[0]["status"]) if runs else "unknown"
        if status.startswith("finished"):
            break
        time.sleep(3)
    return status


def _read_json(text: str) -> dict[str, Any]:
    """Flower prints warnings around its JSON."""
    start, end = text.find("{"), text.rfind("}")
    try:
        found: dict[str, Any] = json.loads(text[start : end + 1])
    except ValueError as e:
        raise ConfigError(f"Flower said: {' '.join(text.split())[:300]}") from e
    return found
