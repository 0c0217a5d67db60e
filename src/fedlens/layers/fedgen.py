r"""FedGen (Zhu et al., 2021): the server learns to make features of every class, clients train
their heads on them.

Server (Eq. 4): G = argmin over y and noise of sum_k w_k(y) CE(head_k(G(y, noise)), y) + eta
diversity, where head_k are this round's local heads and w_k(y) is client k's share of class y.
Client (Eq. 5): loss += alpha CE(head(G(y'))), y') for drawn labels y', + beta KL(head(G(y)) ||
prediction) for the batch's own labels y, as in the public code; alpha and beta shrink by `decay`
every round.

WHAT IT DISCLOSES: every client tells the server how many images of each class it holds, and its own
head; the sums over clients go down to everybody. So single replies are needed, and secure
aggregation is refused. Nothing generated is an image.

Deviations: noise is Gaussian as the paper says (the code draws it uniformly although it calls it
Gaussian); the adversarial student term of the code, whose weight is zero in its settings, is left
out, as is its generator's weight decay (0.01); drawn labels are uniform over the classes anybody
holds; w_k(y) goes with the sample it belongs to (the code multiplies losses (n) by weights (n, 1),
so that all samples get the mean weight) and counts held images (there: drawn ones, plus one). The
features are those in front of the last linear layer, whatever their number. The generator is
trained by the one training loop of `core/training.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, StackError, server_rng
from fedlens.core.client import Batch, Client, Data, Output, Term, generator, seeded
from fedlens.core.limits import Count, NotNegative, Positive, Several
from fedlens.core.message import Message
from fedlens.core.replies import Needs, Replies
from fedlens.core.training import train
from fedlens.core.tree import Tree


class FeatureGenerator(nn.Module):
    """One-hot label and noise -> one hidden layer with BatchNorm -> a feature vector."""

    def __init__(self, classes: int, noise: int, hidden: int, features: int) -> None:
        super().__init__()
        self.classes = classes
        self.net = nn.Sequential(
            nn.Linear(classes + noise, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, features),
        )

    def forward(self, y: Tensor, noise: Tensor) -> Tensor:
        made: Tensor = self.net(torch.cat([F.one_hot(y, self.classes).to(noise.dtype), noise], 1))
        return made


@dataclass
class FedGen(TrainingLayer):
    """
    Args:
        alpha: weight of the first client term.
        beta: weight of the second client term.
        decay: of both weights, per round.
        eta: weight of the diversity term.
        noise: length of the generator's random input.
        hidden: width of the generator's hidden layer.
        steps: of the generator's training (Adam) in every round.
        batch: of the generator's training.
        lr: of the generator's training.

    The generator has BatchNorm, so that one example is no batch.
    """

    alpha: NotNegative = 10.0
    beta: NotNegative = 10.0
    decay: Positive = 0.98
    eta: NotNegative = 1.0
    noise: Count = 32
    hidden: Count = 256
    steps: Count = 50
    batch: Several = 32
    lr: Positive = 3e-4
    own_needs: ClassVar[Needs] = "replies"
    whole: ClassVar[bool] = True
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"alpha": (0.1, 1.0, 100.0)}

    def check(self, inner: Algorithm) -> None:
        if not isinstance(getattr(self.under(inner).resident, "head", None), nn.Linear):
            raise StackError(
                "FedGen generates what the head reads: the model needs a `head` that is one linear"
                " layer"
            )

    def init(self) -> Message:
        with seeded(generator(self.fedavg.seed, 0x6E)):
            made = tree.clone(self._network().state_dict())
        return self.inner.init().put(
            generator=made,
            seen={"counts": torch.zeros(self.head.out_features, dtype=torch.float64)},
        )

    def broadcast(self, state: Message) -> Message:
        return self.inner.broadcast(state).put(
            generator=state.trees["generator"], seen=state.trees["seen"]
        )

    def expects(self, message: Message) -> Mapping[str, Tree]:
        model = message.trees["model"]
        heads = {n: t for n, t in model.items() if n.startswith("head.")}
        return {**self.inner.expects(message), "head": heads, "labels": message.trees["seen"]}

    def client_step(self, message: Message, client: Client) -> Message:
        counts = label_counts(client.data, self.head.out_features)
        seen = message.trees["seen"]["counts"]
        if float(seen.sum()) > 0:  # before the first server step there is nothing to learn from
            client = client.plus(self._term(message, client, (seen > 0).double()))
        reply = self.inner.client_step(message, client)
        head = {n: t.clone() for n, t in reply.trees["delta"].items() if n.startswith("head.")}
        return reply.put(head=head, labels={"counts": counts})

    def server_step(self, state: Message, replies: Replies) -> Message:
        new = self.inner.server_step(state, replies)
        singles = list(replies)
        # nobody holds less than no image of a class, whatever it says
        counts = torch.stack([r.trees["labels"]["counts"] for r in singles]).clamp_min(0)
        if not float(counts.sum()):
            return new
        old = state.trees["model"]
        heads = [{n: old[n] + t for n, t in r.trees["head"].items()} for r in singles]
        made = self._learn(state, heads, counts)
        if not tree.is_finite(made):  # extreme heads: the generator stays as it was
            made = dict(state.trees["generator"])
        return new.put(generator=made, seen={"counts": counts.sum(0)})

    def _learn(self, state: Message, heads: list[Tree], counts: Tensor) -> Tree:
        weights = torch.stack([h["head.weight"] for h in heads])
        biases = torch.stack(
            [
                h["head.bias"] if "head.bias" in h else torch.zeros(len(h["head.weight"]))
                for h in heads
            ]
        )
        shares = (counts / counts.sum(0).clamp_min(1)).to(weights.dtype)
        rng = server_rng(state, "FedGen")
        network = self._network(state.trees["generator"]).train()
        parameters = list(network.parameters())

        def draws() -> Iterator[Batch]:
            for _ in range(self.steps):
                y = torch.multinomial(
                    (counts.sum(0) > 0).double(), self.batch, replacement=True, generator=rng
                )
                yield {"y": y, "noise": torch.randn(self.batch, self.noise, generator=rng)}

        def objective(batch: Batch) -> tuple[Tensor, None]:
            z = network(batch["y"], batch["noise"])
            return (
                ensemble_loss(z, batch["y"], weights, biases, shares)
                + self.eta * diversity(batch["noise"], z),
                None,
            )

        train(parameters, draws(), objective, torch.optim.Adam(parameters, lr=self.lr))
        return tree.clone(network.state_dict())

    def _term(self, message: Message, client: Client, open_: Tensor) -> Term:
        network = (
            self._network(message.trees["generator"])
            .eval()
            .requires_grad_(False)
            .to(self.fedavg.place)
        )
        fade = self.decay**message.round

        def term(model: nn.Module, batch: Batch, output: Output) -> Tensor:
            y, head = batch["y"], model.head
            assert isinstance(head, nn.Linear)
            drawn = torch.multinomial(open_, len(y), replacement=True, generator=client.rng).to(
                y.device
            )
            noise = torch.randn(2, len(y), self.noise, generator=client.rng).to(y.device)
            made = F.cross_entropy(head(network(drawn, noise[0])), drawn)
            with torch.no_grad():
                target = head(network(y, noise[1])).log_softmax(1)
            agree = F.kl_div(
                output.prediction.log_softmax(1), target, reduction="batchmean", log_target=True
            )
            return fade * (self.alpha * made + self.beta * agree)

        return term

    def _network(self, weights: Mapping[str, Tensor] | None = None) -> FeatureGenerator:
        network = FeatureGenerator(
            self.head.out_features, self.noise, self.hidden, self.head.in_features
        )
        if weights is not None:
            network.load_state_dict(dict(weights))
        return network


def label_counts(data: Data, classes: int) -> Tensor:
    labels = torch.cat(
        [
            data.batch(torch.arange(low, min(low + 1000, len(data))))["y"]
            for low in range(0, len(data), 1000)
        ]
    )
    return torch.bincount(labels, minlength=classes).double()


def ensemble_loss(z: Tensor, y: Tensor, weights: Tensor, biases: Tensor, shares: Tensor) -> Tensor:
    """mean over the batch of sum_k share_k(y) CE(W_k z + b_k, y); weights are (clients, classes,
    features), shares (clients, classes).
    """
    logits = torch.einsum("kcf,nf->knc", weights, z) + biases[:, None]
    each = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(weights)), reduction="none").view(
        len(weights), len(y)
    )
    return (shares[:, y] * each).sum(0).mean()


def diversity(noise: Tensor, z: Tensor) -> Tensor:
    """exp(-mean of |noise_i - noise_j|^2 |z_i - z_j|_1): small where different noise gives
    different features.
    """
    far = (noise[:, None] - noise[None]).square().mean(2)
    apart = (z[:, None] - z[None]).abs().mean(2)
    return (-(far * apart).mean()).exp()
