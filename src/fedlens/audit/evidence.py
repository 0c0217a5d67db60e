"""Where the messages of an audit come from: recorded while a run was under way (`fedlens run
--record-messages`), or replayed afterwards. Rounds are pure functions of recipe and seed, so that a
replay sends, bit for bit, what the run has sent.

Also what an audit holds beside them: the same rounds under a protection.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedlens.audit.attack import summed
from fedlens.config import recipe as recipes
from fedlens.core.algorithm import Algorithm, Layer
from fedlens.core.client import Client, generator
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message
from fedlens.core.rounds import Progress, Round, run
from fedlens.engines.loopback import Loopback
from fedlens.engines.recorder import Exchange, Recorder, read_exchanges
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.setup import Setup, make_setup

MESSAGES = "messages"  # the folder in a run folder


class _Enough(Exception):
    """The rounds that were asked for are over."""


@dataclass(frozen=True)
class Messages:
    """The messages of an audit. recorded: are they from the run itself? metrics: of the state after
    the last of these rounds, where there is a test set.
    """

    exchanges: Sequence[Exchange]
    recorded: bool
    metrics: dict[str, float]


def open_run(folder: Path) -> Setup:
    """The objects of a run, without the layers that hide single replies: an audit has to see what
    they hide, and then shows what is left of it behind them.
    """
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.toml")
    setup = make_setup(recipes.read(folder))
    return replace(setup, algorithm=without_hiding(setup.algorithm))


def hides_singles(setup: Setup) -> bool:
    """Did the run itself hide single replies?"""
    return setup.config.build_algorithm(setup.task).hides_singles


def without_hiding(algorithm: Algorithm) -> Algorithm:
    if not isinstance(algorithm, Layer):
        return algorithm
    inner = without_hiding(algorithm.inner)
    if algorithm.hides_replies:
        return inner
    layer = copy.copy(algorithm)
    layer.inner = inner
    return layer


def collect(folder: Path, setup: Setup, rounds: int) -> Messages:
    """What was recorded, or else a replay: the first `rounds` rounds of a run that trains nothing;
    of one that trains, its first round and one more from its last checkpoint. What was recorded
    under a mask says nothing about what the mask hides, so such a run is replayed without it.
    """
    if (folder / MESSAGES).is_dir() and not hides_singles(setup):
        found = read_exchanges(folder / MESSAGES)
        if not found:
            raise ValueError(f"{folder / MESSAGES} holds no rounds")
        return Messages(found, True, {})
    if not any(h is not None for h in setup.federation.holdings):
        raise ValueError(
            f"the data of {folder} is not here, so nothing can be replayed: run it with"
            " --record-messages"
        )
    if not setup.algorithm.trains:
        return replay(setup, rounds)
    first = replay(setup, 1)
    last = Checkpoint(folder / "checkpoint").load()
    if last is None or last[0].done < 2:
        return first
    again = replay(
        setup, 1, Progress(last[0].state, last[0].done - 1, dict(last[0].heard)), last[1]
    )
    return Messages([*first.exchanges, *again.exchanges], False, first.metrics)


def replay(
    setup: Setup,
    rounds: int,
    progress: Progress | None = None,
    memories: dict[int, Path] | None = None,
) -> Messages:
    """So many rounds with the real stack, every message through its byte form."""
    settings, algorithm = setup.settings, setup.algorithm
    engine = Recorder(Loopback(algorithm, setup.federation, threads=settings.threads))
    if memories:
        engine.restore(memories)
    here = progress or Progress(algorithm.init())
    until = min(here.done + rounds, settings.rounds)

    def stop(now: Progress, finished: Round) -> None:
        if now.done >= until:
            raise _Enough

    with contextlib.suppress(_Enough):
        run(
            algorithm, engine, settings.rounds, cohort=settings.cohort, seed=settings.seed,
            progress=here, after_round=stop,
        )  # fmt: skip
    test = setup.federation.test
    message = algorithm.broadcast(here.state).with_header(here.state.header, evaluate=True)
    metrics = algorithm.evaluate(message, test, {}) if test is not None else {}
    return Messages(engine.exchanges, False, metrics)


# -- protections -----------------------------------------------------------------------------------


class ClipAndNoise(Layer):
    """What differential privacy does to a reply, without its accounting: every tree is clipped to a
    norm and gets Gaussian noise. Seeded: for audits and experiments only, since whoever has the
    seed can subtract it.

    clip: the largest norm, as a multiple of the reply's own. noise: standard deviation of a number,
    as a share of the root mean square of what was sent.
    """

    stage = "wire"

    def __init__(self, clip: Positive = 1.0, noise: NotNegative = 0.1) -> None:
        self.clip, self.noise = clip, noise

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        rng = generator(message.header.seed, message.round, client.id, 0xD9)
        trees = {}
        for name, tree in reply.trees.items():
            # FedDeblur sends w, of which all but w - x is known
            known = message.trees.get("x", {}) if name == "w" else {}
            trees[name] = {
                k: known[k] + self._blurred(t - known[k], rng) if k in known
                else self._blurred(t, rng)
                for k, t in tree.items()
            }  # fmt: skip
        return replace(reply, trees=trees, _derived={})

    def _blurred(self, t: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        level = float(t.double().square().mean().sqrt())
        noise = torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t.dtype)
        return t * min(1.0, self.clip) + self.noise * level * noise


@dataclass(frozen=True)
class Protection:
    """A row of the page. change: the run's objects under it, None where only what the server sees
    changes. seen: what it sees of the rounds.
    """

    name: str
    about: str
    change: Callable[[Setup], Setup] | None = None
    seen: Callable[[Sequence[Exchange]], Sequence[Exchange]] = list


def noisy(noise: float) -> Callable[[Setup], Setup]:
    def change(setup: Setup) -> Setup:
        return replace(setup, algorithm=ClipAndNoise(noise=noise).around(setup.algorithm))

    return change


SECURE_SUM = Protection("SecureSum", "the server sees the sum of all replies only", seen=summed)
