"""MOON, FedNTD and FedGen: the terms by hand, and what the layers make of them in a round."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import Rounds
from torch import Tensor, nn
from torch.nn import functional as F
from toy import Toy, same_bits, toy_federation

from fedlens import Batch, Federation, Message, Output, StackError, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.layers import BackboneOnly, FedGen, FedNTD, Moon
from fedlens.layers.fedgen import diversity, ensemble_loss, label_counts
from fedlens.layers.fedntd import not_true
from fedlens.layers.moon import contrast


class Small(nn.Module):
    """Without BatchNorm, so that a network says the same in training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Classes(LearningTask):
    def model(self) -> nn.Module:
        return Small()

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def evaluate(self, result: nn.Module, data: Tensors) -> dict[str, float]:
        return {}


FED = Federation(toy_federation(3).holdings)


def small(**options: object) -> FedAvg:
    return FedAvg(Classes(), **{"lr": 0.5, "batch": 1000, "device": "cpu", **options})  # type: ignore[arg-type]


def test_contrast_by_hand() -> None:
    """z = (1, 0), global (2, 0), previous (0, 3), tau 0.5: similarities 1 and 0, -log(e^2 / (e^2 +
    1)) = log(1 + e^-2) = 0.12693. If both look alike it is log 2."""
    z, near, far = (
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[2.0, 0.0]]),
        torch.tensor([[0.0, 3.0]]),
    )
    assert contrast(z, near, far, 0.5).item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert contrast(z, near, near, 0.5).item() == pytest.approx(math.log(2))


def test_moon_is_fedavg_until_there_is_a_previous_model() -> None:
    a, b = Rounds(small(), FED), Rounds(stack(small(), Moon(5.0)), FED)
    assert same_bits(a.play(), b.play())
    assert not same_bits(a.play(), b.play())


def test_moon_adds_its_term_to_the_loss() -> None:
    """One full-batch step: the loss is that of the received model, so z = z_glob, similarity 1, and
    the term is log(1 + e^((s - 1) / tau)) with s the similarity to the client's model of the round
    before."""
    game = Rounds(stack(small(), Moon(mu=2.0, tau=0.5)), FED)
    received = [game.play().trees["model"]]
    game.play()
    # kept: of round 1; the draft is of round 2
    memory = game.engine.worker.memory.load(1).kept["moon"]
    net = Small()
    x, y = FED.holdings[1].columns["x"], FED.holdings[1].columns["y"]
    net.load_state_dict(received[0])
    now, plain = net.features(x), F.cross_entropy(net.head(net.features(x)), y)
    net.load_state_dict(memory)
    s = F.cosine_similarity(now, net.features(x))
    expected = plain + 2 * torch.log(1 + torch.exp((s - 1) / 0.5)).mean()
    assert game.replies.scalars[1]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_not_true_by_hand() -> None:
    """Class 0 is true. Local logits of the others (0, ln 3): 1/4 and 3/4. Global (0, 0): 1/2 each.
    KL = 1/2 ln 2 + 1/2 ln 2/3 = 1/2 ln 4/3 = 0.14384.
    The true class's logit does not matter. With tau = 2 and doubled logits it is 4 times that."""
    local, known, y = (
        torch.tensor([[9.0, 0.0, math.log(3)]]),
        torch.tensor([[-5.0, 1.0, 1.0]]),
        torch.tensor([0]),
    )
    assert not_true(local, known, y, 1.0).item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-5)
    assert not_true(2 * local, known, y, 2.0).item() == pytest.approx(2 * math.log(4 / 3), rel=1e-5)


def test_fedntd_starts_from_agreement() -> None:
    """The received model agrees with itself: KL and its gradient are zero in the first step, so one
    step is FedAvg and two are not.
    """
    for epochs, same in ((1, True), (2, False)):
        a, b = (
            Rounds(small(epochs=epochs), FED),
            Rounds(stack(small(epochs=epochs), FedNTD(5.0)), FED),
        )
        one, two = a.play().trees["model"], b.play().trees["model"]
        gap = max(float((one[n] - two[n]).abs().max()) for n in one)
        assert (gap < 1e-6) is same


def test_ensemble_loss_by_hand() -> None:
    """One feature z = 1, class 0. Head 0 is zero: CE ln 2. Head 1 says (ln 3, 0): 3/4, CE ln 4/3.
    Client 0 has a quarter of class 0: 0.25 * 0.69315 + 0.75 * 0.28768 = 0.38905."""
    weights = torch.tensor([[[0.0], [0.0]], [[math.log(3)], [0.0]]])
    shares = torch.tensor([[0.25, 0.5], [0.75, 0.5]])
    loss = ensemble_loss(torch.ones(1, 1), torch.tensor([0]), weights, torch.zeros(2, 2), shares)
    assert loss.item() == pytest.approx(0.25 * math.log(2) + 0.75 * math.log(4 / 3))


def test_diversity_by_hand() -> None:
    """Noise 0 and 2, features 0 and 3: squared distance 4, distance 3; mean over the four pairs (0
    + 12 + 12 + 0) / 4 = 6; e^-6.
    """
    assert diversity(
        torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [3.0]])
    ).item() == pytest.approx(math.exp(-6))


def test_label_counts_by_hand() -> None:
    data = Tensors({"x": torch.zeros(5, 1), "y": torch.tensor([0, 2, 2, 2, 0])})
    assert label_counts(data, 4).tolist() == [2, 0, 3, 0]


def test_fedgen_learns_features_that_the_heads_recognise() -> None:
    """The generator's loss is the ensemble's: after training, most generated features must be
    classified as what was asked for.
    """
    layer = FedGen(alpha=0.1, beta=0.1, noise=4, hidden=32, steps=60, lr=0.01, eta=0.1)
    algorithm = stack(small(epochs=5), layer)
    state = run(algorithm, Loopback(algorithm, FED), 6)
    net = algorithm.result(state)
    built = algorithm._network(state.trees["generator"]).eval()  # type: ignore[attr-defined]
    y = torch.arange(300) % 3
    said = net.head(
        built(y, torch.randn(300, 4, generator=torch.Generator().manual_seed(0)))
    ).argmax(1)
    assert (said == y).float().mean() > 0.9


def test_fedgen_says_what_it_discloses() -> None:
    """Up: label counts and the head; down: their sum over clients. Nothing else."""
    algorithm = stack(small(), FedGen(noise=4, hidden=8, steps=2))
    engine = Loopback(algorithm, FED)
    state = run(algorithm, engine, 1)
    down, *up = [Message.from_bytes(b) for b in engine.traffic]
    assert down.trees.keys() == {"model", "generator", "seen"} and up[0].trees.keys() == {
        "delta",
        "head",
        "labels",
    }
    counts = [torch.bincount(h.columns["y"], minlength=3).double() for h in FED.holdings]
    assert torch.equal(up[1].trees["labels"]["counts"], counts[1])
    assert torch.equal(state.trees["seen"]["counts"], sum(counts))


def test_the_whole_model_is_needed() -> None:
    for layer in (Moon(), FedNTD(), FedGen()):
        with pytest.raises(StackError, match="BackboneOnly hides a part of it: put"):
            stack(FedAvg(Toy()), BackboneOnly(), layer)
