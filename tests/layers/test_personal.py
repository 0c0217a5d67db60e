"""Ditto, pFedMe and fine-tuning on the problem of `by_hand`: the gradient is w - y."""

from __future__ import annotations

import pytest
from by_hand import Rounds, fedavg, federation
from toy import Toy, same_bits, toy_federation

from fedlens import Federation, Layer, Message, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.engines.loopback import Loopback
from fedlens.layers import Ditto, FineTune, PFedMe


def own(game: Rounds, name: str, heard: int) -> list[float]:
    memory = game.engine.worker.memory
    return [float(memory.load(i).settle(heard)[name]["w"]) for i in game.engine.ids()]


def test_ditto_by_hand() -> None:
    """Targets 1 and 3, lr 0.5, lam 1. Round 1, from 0: w goes to 0.5 and 1.5, mean 1; v does the
    same, for the pull is 0 there. Round 2, from w = 1: w goes to 1 and 2, mean 1.5; v's gradients
    are (0.5 - 1) + (0.5 - 1) and (1.5 - 3) + (1.5 - 1), both -1, so v is 1 and 2."""
    game = Rounds(stack(fedavg(lr=0.5), Ditto(lam=1.0)), federation(1.0, 3.0))
    assert game.play().trees["model"]["w"].tolist() == [1.0]
    assert own(game, "ditto", 0) == [0.5, 1.5]
    assert game.play().trees["model"]["w"].tolist() == [1.5]
    assert own(game, "ditto", 1) == [1.0, 2.0]


def test_ditto_leaves_the_common_model_alone() -> None:
    with_ditto, without = (
        stack(FedAvg(Toy(), batch=8, momentum=0.9), *layers) for layers in ((Ditto(),), ())
    )
    assert same_bits(
        run(with_ditto, Loopback(with_ditto, toy_federation()), 2),
        run(without, Loopback(without, toy_federation()), 2),
    )


def test_pfedme_by_hand() -> None:
    """Target 4, lr 0.5, lam 1, eta 0.5, K = 2, four steps. From w = theta = 0: theta 2 (gradient
    -4), then 2 (-2 + 2). w goes half of the way: 1. theta 2.5 (-2 + 1), then 2.5 (-1.5 + 1.5). w:
    1.75. The other client, at 0, stays: mean 0.875."""
    layer = PFedMe(lam=1.0, eta=0.5, steps=2)
    game = Rounds(stack(fedavg(lr=0.5, epochs=4), layer), federation(4.0, 0.0))
    assert game.play().trees["model"]["w"].tolist() == [0.875]
    assert own(game, "pfedme", 0) == [2.5, 0.0]


def test_pfedme_that_would_overshoot_is_refused() -> None:
    with pytest.raises(StackError, match=r"eta \* lam is 1.5 and may be 1 at most"):
        stack(fedavg(), PFedMe(lam=15.0, eta=0.1))


def test_fine_tuning_by_hand() -> None:
    """Targets 1 and 3, lr 0.5, three rounds, the last of them for fine-tuning. w is 1, then 1.5,
    and stays; from there 1.5 - 0.25 and 1.5 + 0.75."""
    game = Rounds(stack(fedavg(lr=0.5), FineTune()), federation(1.0, 3.0), rounds=3)
    assert [game.play().trees["model"]["w"].item() for _ in range(3)] == [1.0, 1.5, 1.5]
    assert own(game, "finetune", 2) == [1.25, 2.25]
    sent = [Message.from_bytes(b) for b in game.engine.traffic][-2:]
    assert [m.trees["delta"]["w"].item() for m in sent] == [0.0, 0.0]


def test_fine_tuning_all_the_time_is_learning_alone() -> None:
    """Two rounds from 0: 0.5 then 0.75, and 1.5 then 2.25. The common model never moves."""
    game = Rounds(stack(fedavg(lr=0.5), FineTune(rounds=2)), federation(1.0, 3.0), rounds=2)
    game.play()
    assert game.play().trees["model"]["w"].item() == 0.0
    assert own(game, "finetune", 1) == [0.75, 2.25]


@pytest.mark.parametrize(
    ("layer", "mean"),
    [(Ditto(lam=1.0), (0.5 + 1.5) / 2), (FineTune(), (0.5 + 1.5) / 2)],
)
def test_clients_are_evaluated_with_their_own_model(layer: Layer, mean: float) -> None:
    """One round at lr 0.5 from 0: own models 0.5 and 1.5; client 2 was never asked and has the
    common one, which the server is evaluated with: 1 for Ditto, 0 for fine-tuning."""
    fed = federation(1.0, 3.0, 7.0)
    fed = Federation(fed.holdings, fed.holdings, test=fed.holdings[0])
    game = Rounds(stack(fedavg(lr=0.5), layer), fed, rounds=1)
    state = game.play(0, 1)
    common = 1.0 if isinstance(layer, Ditto) else 0.0
    memory = game.engine.worker.memory
    found = [
        game.algorithm.evaluate(state, fed.held_out[i], memory.load(i).settle(0))["w"]
        for i in range(3)
    ]
    assert found == [0.5, 1.5, common]
    assert game.algorithm.evaluate(state, fed.test, {})["w"] == common
    assert game.algorithm.personalises and not fedavg().personalises
