r"""FedDeblur's duals and local estimates, exactly, from what every server holds.

The server knows what it broadcast (x) and what a client sent (w). The dual begins at 0 and
w = v + 2 u' with v = x - u (`deblur/feddeblur.py`), so that
    u' = (w - x + u) / 2,   x_k = w - u'
for every client and every round in which it was heard. Nothing is guessed: both hold for complete
and for partial views alike. An over-relaxed client puts relax x + (1 - relax) x_k of its last round
in place of x, which the server knows just as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedlens.engines.recorder import Exchange


@dataclass(frozen=True)
class Iterate:
    """What the server works out about a client from one round's messages, for one scene.

    x: what was broadcast. v = x - u, over-relaxed where the recipe says so. u: the dual after the
    round. local: the estimate x_k.
    """

    x: Tensor
    v: Tensor
    u: Tensor
    local: Tensor


def follow(
    exchanges: Sequence[Exchange], client: int, scene: str, relax: float = 1.0
) -> list[Iterate]:
    """u and x_k after every round in which this client was heard."""
    rounds: list[Iterate] = []
    last: Tensor | None = None  # the w it last sent, where only differences travel
    for exchange in exchanges:
        reply = exchange.replies.get(client)
        if reply is None:
            continue
        x = exchange.down.trees["x"][scene].double()
        if "dw" in reply.trees:
            w = reply.trees["dw"][scene].double() + (0 if last is None else last)
        else:
            w = reply.trees["w"][scene].double()
        last = w
        v = relax * x + (1 - relax) * rounds[-1].local - rounds[-1].u if rounds else x
        u = (w - v) / 2
        rounds.append(Iterate(x, v, u, w - u))
    return rounds
