"""A finished run as one of its clients has it: the common model with that client's own part, from
the checkpoint. In a simulation all memories lie there; of real sites none does, each keeps its own.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.algorithm import Algorithm
from fedlens.core.memory import NEVER, read_record
from fedlens.core.message import Message
from fedlens.core.tree import Tree
from fedlens.core.weights import read_weights
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.setup import make_setup


@dataclass(frozen=True)
class Ended:
    """How a run ended: the server's state, and what each client that has worked keeps."""

    state: Message
    memories: Mapping[int, Mapping[str, Tree]]

    @staticmethod
    def read(folder: Path) -> Ended:
        """From the checkpoint; of a run that has none, the model alone."""
        there = (folder / "checkpoint").is_dir()
        if there and (found := Checkpoint(folder / "checkpoint").load()) is not None:
            progress, files = found
            heard = progress.heard
            kept = {i: read_record(path).settle(heard.get(i, NEVER)) for i, path in files.items()}
            return Ended(progress.state, kept)
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(f"{folder} is not finished: it has no model.safetensors")
        return Ended(Message({"model": read_weights(folder / "model.safetensors")}), {})

    def own_weights(self, algorithm: Algorithm) -> dict[int, Tree]:
        """What clients keep of the model to themselves."""
        own = {i: algorithm.private_weights(memory) for i, memory in self.memories.items()}
        return {i: weights for i, weights in sorted(own.items()) if weights}


@contextlib.contextmanager
def run_of_client(folder: Path, client: int) -> Iterator[Path]:
    """A run folder for a while, with this client's whole model in it."""
    config = recipes.read(folder)
    task = config.build_task()
    algorithm = config.build_algorithm(task)
    ended = Ended.read(folder)
    own = own_weights_of(client, folder, ended, algorithm)
    state = ended.state.put(model={**ended.state.trees["model"], **own})
    with tempfile.TemporaryDirectory() as made:
        task.save(algorithm.as_saved(state), Path(made))
        for name in ("config.toml", "federation.json"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(made) / name)
        yield Path(made)


def own_weights_of(client: int, folder: Path, ended: Ended, algorithm: Algorithm) -> Tree:
    """What this client keeps of the model; refused where it has nothing of its own."""
    own = ended.own_weights(algorithm)
    if not own:
        raise ConfigError(
            f"no client has a model of its own in {folder}: the method has none, or there is no"
            " checkpoint of a simulation to take it from"
        )
    if client not in own:
        raise ConfigError(f"client {client} has no model of its own in {folder}: {_listed(own)} do")
    return own[client]


def own_models(folder: Path) -> str:
    """Which clients have a model of their own in a run, in words; nothing where none has."""
    try:
        config = recipes.read(folder)
        own = Ended.read(folder).own_weights(config.build_algorithm(config.build_task()))
    except (ValueError, OSError):
        return ""
    return _listed(own) if own else ""


def _listed(own: Mapping[int, Tree]) -> str:
    names = [str(i) for i in own]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def evaluate_run(
    folder: Path, overrides: Sequence[str] = ()
) -> tuple[Config, dict[str, float], dict[int, dict[str, Any]]]:
    """Metrics of the common model on the test set, and of every client's on what it held out.
    `overrides` may name other data of the same kind.
    """
    config = recipes.read(folder, overrides)
    setup = make_setup(config)
    ended, algorithm, federation = Ended.read(folder), setup.algorithm, setup.federation
    message = algorithm.broadcast(ended.state).with_header(ended.state.header, evaluate=True)
    test = federation.test
    common = algorithm.evaluate(message, test, {}) if test is not None and len(test) else {}
    clients: dict[int, dict[str, Any]] = {}
    for i in range(len(federation)):
        held_out = federation.held_out_of(i)
        if held_out is not None and len(held_out):
            found = algorithm.evaluate(message, held_out, ended.memories.get(i, {}))
            clients[i] = {"examples": len(held_out), **found}
    return config, common, clients
