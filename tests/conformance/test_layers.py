"""What every algorithm and layer must do, whatever its idea: `fedlens.testing` over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stacks import SCENES, STACKS
from toy import flat

import fedlens.layers
from fedlens import Layer, run
from fedlens.engines.loopback import Loopback
from fedlens.testing import ALGORITHM_CHECKS, check_layer


def test_every_exported_layer_is_in_the_suite() -> None:
    used = {type(p).__name__ for case in STACKS.values() for p in case.make().parts()}
    exported = {n for n in fedlens.layers.__all__ if issubclass(getattr(fedlens.layers, n), Layer)}
    assert exported <= used, f"add to tests/stacks.py: {sorted(exported - used)}"


@pytest.mark.parametrize("check", ALGORITHM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [*STACKS, *SCENES])
def test_conformance(name: str, check: Callable[..., Any]) -> None:
    case = (STACKS | SCENES)[name]
    check(case.make, case.federation)


@pytest.mark.parametrize("name", [n for n in STACKS if "private" in n or n == "fedvssl"])
def test_private_parts_do_not_travel(name: str) -> None:
    algorithm, federation = STACKS[name].make(), STACKS[name].federation
    engine = Loopback(algorithm, federation)
    run(algorithm, engine, 1)
    sent = [flat(fedlens.Message.from_bytes(b)) for b in engine.traffic]
    assert sent and not any("/head" in n for arrays in sent for n in arrays)


class WritesIntoTheMessage(Layer):
    def client_step(self, message: fedlens.Message, client: fedlens.Client) -> fedlens.Message:
        message.trees["model"]["head.bias"].add_(1)
        return self.inner.client_step(message, client)


class ReadsSingles(Layer):
    """Looks at single scalars and does not say so."""

    def server_step(self, state: fedlens.Message, replies: fedlens.Replies) -> fedlens.Message:
        worst = max(replies.values("loss"))
        return self.inner.server_step(state.note(worst=worst), replies)


class Drifts(Layer):
    """Depends on something that is neither in the message nor in memory."""

    calls = 0

    def client_step(self, message: fedlens.Message, client: fedlens.Client) -> fedlens.Message:
        Drifts.calls += 1
        reply = self.inner.client_step(message, client)
        scaled = {n: t * (1 + Drifts.calls) for n, t in reply.trees["delta"].items()}
        return reply.put(delta=scaled)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (WritesIntoTheMessage(), "was written to"),
        (ReadsSingles(), 'own_needs = "scalars"'),
        (Drifts(), "two runs with one seed differ"),
    ],
)
def test_the_checks_find_what_is_wrong(layer: Layer, why: str) -> None:
    with pytest.raises((AssertionError, PermissionError), match=why):
        check_layer(layer)
