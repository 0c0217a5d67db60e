r"""FBL (Li et al., "Federated Balanced Learning"): every client balances its own classes, by
sampling and by generating.

Balance point (Eqs. 3, 10): B_k = max(1, floor(mean_c n_c)) of a constrained client, max_c n_c of an
unconstrained one (a share lambda of the clients: `unconstrained`). Classes with n_c > B_k are
excessive: B_k of their samples are chosen, those with the largest loss under the received model
(Eq. 7, `sampling`). Scarce (0 < n_c < B_k) and missing classes are filled to B_k by a generator.
Every `period` rounds (m) the choice is made anew (Eq. 9): floor(gamma B_k) of the last choice
(`replay`), the rest from what was left out. Alignment (Eq. 4): one learnable vector P_c per class
is added to the features of generated samples, through `client.adapt`: it starts at zero, stays in
the client's memory and is neither sent nor used for testing. Drop (Eq. 5): in every batch zeta B
(`drop`) of the generated samples go without it.

Readings where the paper is silent, and deviations:

- The loss is that of the received global model, in evaluation mode and without augmentation, at the
  client's first work in a cycle. Cycles are counted by the global round. Both parts of Eq. 9 follow
  `sampling`; what the second lacks comes from the first.
- A client with fewer samples than classes has floor(mean) = 0. Its B_k is 1, and of the missing
  classes only so many are filled, drawn anew in every cycle, that it trains on no more samples than
  it holds: a constrained client's work never grows.
- Dropped samples are drawn among the generated ones of a batch: on real ones dropping would do
  nothing.
- Generated samples are not augmented, real ones are, as in the paper. What a client generated it
  keeps on its disk (`cache`).
- Clients decide for themselves. In a simulation, a draw by seed gives the exact shares
  `unconstrained` and `weak` (too weak to generate: plain training on what they have); a real site
  says what it is when it joins (`fedlens join ... generate=no`).
- The shifts learn as fast as the model (as in DBE, where they come from). At learning rates far
  above the paper's 1e-3 they then take over what the features should learn: a large shift makes a
  generated sample easy whatever it shows. `pace` slows them down.
- The paper's optimiser says momentum 1e-4, probably a slip for 0.9. That, and the uniform mean of
  Algorithm 1, are FedAvg's to set.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedlens.algorithms.fedavg import TrainingLayer
from fedlens.core.algorithm import Algorithm, SiteSettings, StackError
from fedlens.core.client import Batch, Client, Data, generator
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Natural, Positive, Share
from fedlens.core.message import Message
from fedlens.core.picture import Picture
from fedlens.core.replies import Scalar
from fedlens.core.tree import Tree
from fedlens.generators.generator import ImageGenerator, open_store

Role = Literal["constrained", "unconstrained", "no"]
ROLES: tuple[Role, ...] = ("constrained", "unconstrained", "no")
ALIGN = "balance.align"
_LOOK = 250  # samples at a time where only the loss is wanted


@dataclass
class Balance(TrainingLayer):
    """
    Args:
        generator: fills scarce and missing classes.
        sampling: of excessive ones, by loss or at random.
        period: rounds until the choice is made anew (m), 0 for never.
        replay: share of the last choice that stays (gamma).
        align: learn a shift of generated features per class.
        pace: learning rate of the shifts as a multiple of the model's (with SGD).
        drop: share of a batch whose shift is left out (zeta).
        unconstrained: share of clients that fill up to their largest class (lambda).
        weak: share of clients that do not generate.
        cache: folder of generated images; "auto" is in the user's home, "" keeps none.
    """

    generator: ImageGenerator
    sampling: Literal["loss", "random"] = "loss"
    period: Natural = 50
    replay: Share = 0.1
    align: bool = True
    pace: Positive = 1.0
    drop: Share = 1 / 32
    unconstrained: Share = 0.0
    weak: Share = 0.0
    cache: str = "auto"
    _classes: tuple[str, ...] = field(default=(), init=False, repr=False)
    _role: Role | None = field(default=None, init=False, repr=False)
    whole: ClassVar[bool] = True
    reports: ClassVar[Mapping[str, Scalar]] = {
        name: Scalar("sum", record=True) for name in ("made", "generated", "generating")
    }
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {"replay": (0.0, 0.3, 0.7)}
    site_options: ClassVar[Mapping[str, str]] = {
        "generate": f"{', '.join(ROLES)}: as this machine can (default: by the recipe's shares)"
    }

    def __post_init__(self) -> None:
        if self.unconstrained + self.weak > 1:
            raise StackError(
                f"Balance: unconstrained ({self.unconstrained}) and weak ({self.weak}) clients"
                " together are more than all"
            )

    def check(self, inner: Algorithm) -> None:
        model = self.under(inner).resident
        if not hasattr(model, "features") or not isinstance(
            getattr(model, "head", None), nn.Linear
        ):
            raise StackError(
                f"Balance shifts features in front of the head, but {type(model).__name__} has no"
                " split into features and a linear head"
            )

    def at_site(self, site: SiteSettings) -> Algorithm:
        layer = super().at_site(site)
        assert isinstance(layer, Balance)
        if (role := site.options.get("generate")) is None:
            return layer
        if role not in ROLES:
            raise StackError(f"generate is one of {', '.join(ROLES)}, not {role!r}")
        layer._role = role
        return layer

    @property
    def generates(self) -> bool:
        return self._role != "no" and (self._role is not None or self.weak < 1)

    def given(self, facts: Facts) -> Algorithm:
        """Binds the generator to the classes. What it cannot make is refused here, before any
        client starts. A site that does not generate needs nothing of what the generator needs."""
        layer = super().given(facts)
        assert isinstance(layer, Balance)
        layer._classes = names = facts.classes
        if not names or not layer.generates:
            return layer
        if len(names) < (wanted := self.head.out_features):
            raise StackError(
                f"Balance fills {wanted} classes, but the data has {len(names)}: set"
                f" task.classes={len(names)}"
            )
        layer.generator = self.generator.bind(names, facts.shape)
        if small := [
            (i, sum(held)) for i, held in enumerate(facts.labels) if 0 < sum(held) < len(held)
        ]:
            warnings.warn(
                f"clients with fewer images than there are classes: {len(small)} (client"
                f" {small[0][0]}: {small[0][1]} for {len(names)}); their balance point would be 0,"
                " so it is 1, and they fill only as many classes as they have images",
                stacklevel=2,
            )
        return layer

    def client_step(self, message: Message, client: Client) -> Message:
        if not len(client.data):
            raise ValueError(f"client {client.id} holds no images: there is nothing to balance")
        role = self.role(message, client.id)
        if role == "no":
            return self.inner.client_step(message, client).note(
                made=0.0, generated=0.0, generating=0.0
            )
        plan, kept = self._balance(message, client, role)
        began = time.perf_counter()
        made, fresh = self._fill(message, client.id, client.data, plan)
        spent = time.perf_counter() - began if fresh else 0.0
        data = Balanced.of(client.data, kept, made)
        inside = client.holding(data)
        if self.align and made:
            inside = inside.adapt(ALIGN, self._shifts(message, client))
        reply = self.inner.client_step(message, inside)
        return reply.note(
            made=float(sum(len(t) for t in made.values())), generated=float(fresh), generating=spent
        )

    def unrehearsed(self, reply: Message) -> str:
        return "the time to generate images" if reply.scalars.get("made") else ""

    def role(self, message: Message, client: int) -> Role:
        """What a client decides to be."""
        if self._role is not None:
            return self._role
        everyone = max(message.header.population, client + 1)
        order = torch.randperm(everyone, generator=generator(message.header.seed, 0xFB1))
        place = int(order[client])
        if place < round(self.unconstrained * everyone):
            return "unconstrained"
        return "no" if place >= everyone - round(self.weak * everyone) else "constrained"

    # -- the client's half, step by step -----------------------------------------------------------

    def _balance(self, message: Message, client: Client, role: Role) -> tuple[Plan, Tensor]:
        """The plan and the real samples of this cycle; they are chosen at a client's first work in
        it and remembered.
        """
        cycle = self._cycle(message)
        before = client.memory.get("balance")
        labels = before["labels"] if before else labels_of(client.data, self.head.out_features)
        plan, rng = self._plan(message, client.id, labels, role)
        if before and int(before["cycle"]) == cycle:
            return plan, before["kept"]
        kept = self._choose(message, client, plan, labels, before["kept"] if before else None, rng)
        client.memory["balance"] = {"labels": labels, "kept": kept, "cycle": torch.tensor(cycle)}
        return plan, kept

    def _plan(
        self, message: Message, client: int, labels: Tensor, role: Role
    ) -> tuple[Plan, Generator]:
        rng = generator(message.header.seed, client, self._cycle(message), 0xFB2)
        return (
            balance(
                torch.bincount(labels, minlength=self.head.out_features).tolist(),
                role == "unconstrained",
                rng,
            ),
            rng,
        )

    def _cycle(self, message: Message) -> int:
        return message.round // self.period if self.period else 0

    def _choose(
        self,
        message: Message,
        client: Client,
        plan: Plan,
        labels: Tensor,
        before: Tensor | None,
        rng: Generator,
    ) -> Tensor:
        excess = torch.tensor([n > plan.point for n in plan.held])[labels]
        index = excess.nonzero()[:, 0]
        scores = torch.zeros(len(labels))
        if self.sampling == "random":
            scores = torch.rand(len(labels), generator=rng)
        elif len(index):
            scores[index] = self._losses(message, client.data, index)
        old = torch.zeros(len(labels), dtype=torch.bool)
        if before is not None:
            old[before] = True
        chosen = ~excess
        for c in index.new_tensor(sorted(set(labels[index].tolist()))):
            own = (labels == c).nonzero()[:, 0]
            chosen[own[choose_samples(scores[own], old[own], plan.point, self.replay)]] = True
        return chosen.nonzero()[:, 0]

    def _losses(self, message: Message, data: Data, index: Tensor) -> Tensor:
        """Of each of these samples, under the received model as it would be used."""
        base = self.fedavg
        model = base.load(message.trees["model"]).eval()
        found = []
        with torch.no_grad():
            for some in index.split(_LOOK):
                batch = {k: v.to(base.place) for k, v in data.batch(some).items()}
                found.append(
                    F.cross_entropy(
                        base.task.forward(model, batch).prediction.float(),
                        batch["y"],
                        reduction="none",
                    ).cpu()
                )
        return torch.cat(found)

    def _fill(
        self, message: Message, client: int, data: Data, plan: Plan
    ) -> tuple[dict[int, Tensor], int]:
        """What a client lacks, and how many of these images had to be made just now. A dry run
        takes gray ones and leaves no trace.
        """
        shape = data.batch(torch.arange(1))["x"].shape[1:]
        if message.header.rehearsal:
            return {label: torch.full((n, *shape), 0.5) for label, n in plan.wanted.items()}, 0
        return open_store(self.cache).images(
            self.generator, plan.wanted, shape, message.header.seed, client
        )

    def _shifts(self, message: Message, client: Client) -> Shifts:
        rng = generator(message.header.seed, message.round, client.id, 0xFB3)
        return Shifts(self.head.out_features, self.head.in_features, self.drop, rng, self.pace)

    # -- what there is to see ----------------------------------------------------------------------

    def pictures(
        self, state: Message, federation: Federation, memory: Callable[[int], Mapping[str, Tree]]
    ) -> Sequence[Picture]:
        """Real beside generated images, and where their features lie with and without the shifts of
        one client.
        """
        from fedlens.layers.balance_pictures import show

        return [
            *self.inner.pictures(state, federation, memory),
            *show(self, state, federation, memory),
        ]

    def filled(self, state: Message, client: int, data: Data) -> dict[int, Tensor]:
        """What this client generates (or has generated) for its own classes; nothing if it is too
        weak.
        """
        role = self.role(state, client)
        if role == "no" or not len(data):
            return {}
        plan, _ = self._plan(state, client, labels_of(data, self.head.out_features), role)
        return self._fill(state, client, data, plan)[0]


@dataclass(frozen=True)
class Plan:
    """
    Args:
        held: real samples of each class.
        point: the balance point.
        made: how many are to be generated.
    """

    held: Sequence[int]
    point: int
    made: Sequence[int]

    @property
    def wanted(self) -> dict[int, int]:
        return {label: n for label, n in enumerate(self.made) if n}

    @property
    def total(self) -> int:
        return sum(min(n, self.point) + m for n, m in zip(self.held, self.made, strict=True))


def balance(held: Sequence[int], unconstrained: bool, rng: Generator) -> Plan:
    """Eqs. 3 and 10, and how much each class lacks."""
    total = sum(held)
    point = max(held) if unconstrained else max(1, total // len(held))
    made = [max(0, point - n) for n in held]
    if unconstrained:
        return Plan(held, point, made)
    room = total - sum(min(n, point) for n in held)
    if sum(made) > room:
        # fewer samples than classes, and B = 1: some of the missing classes have to stay missing
        lacking = [label for label, n in enumerate(made) if n]
        filled = {lacking[k] for k in torch.randperm(len(lacking), generator=rng)[:room].tolist()}
        made = [n if label in filled else 0 for label, n in enumerate(made)]
    return Plan(held, point, made)


def choose_samples(scores: Tensor, old: Tensor, point: int, replay: float) -> Tensor:
    """Places of `point` samples, the largest scores first. With an earlier choice, floor(replay
    point) come from it and the rest from the others, as far as there are enough of them (Eq. 9)."""
    ranked = scores.argsort(descending=True, stable=True)
    if not bool(old.any()):
        return ranked[:point]
    again, new = ranked[old[ranked]], ranked[~old[ranked]]
    fresh = min(len(new), point - int(replay * point + 1e-9))
    return torch.cat([again[: point - fresh], new[:fresh]])


class Shifts(nn.Module):
    """P = sqrt(pace) shift: one vector per class, added to the features of generated samples but
    those that are dropped (Eqs. 4 and 5). All parameters have one optimiser; written like this, a
    gradient step moves P by `pace` times its learning rate."""

    def __init__(
        self, classes: int, width: int, drop: float, rng: Generator, pace: float = 1.0
    ) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(classes, width))
        self.drop, self.rng, self.unit = drop, rng, pace**0.5

    def forward(self, features: Tensor, batch: Batch) -> Tensor:
        made = batch["made"].nonzero()[:, 0]
        dropped = int(self.drop * len(features) + 0.5)
        if dropped:
            made = made[torch.randperm(len(made), generator=self.rng)[dropped:].to(made.device)]
        return features.index_add(
            0, made, (self.unit * self.shift[batch["y"][made]]).to(features.dtype)
        )


@dataclass(frozen=True)
class Balanced:
    """A client's chosen samples and what it generated. Batches say which is which ("made"); only
    real ones are augmented.
    """

    real: Data
    kept: Tensor
    images: Tensor
    labels: Tensor

    @staticmethod
    def of(real: Data, kept: Tensor, made: Mapping[int, Tensor]) -> Balanced:
        labels = [torch.full((len(t),), label) for label, t in made.items()]
        none = torch.zeros(0, dtype=torch.long)
        return Balanced(
            real,
            kept,
            torch.cat(list(made.values())) if made else none,
            torch.cat(labels) if labels else none,
        )

    def __len__(self) -> int:
        return len(self.kept) + len(self.labels)

    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        made = index >= len(self.kept)
        parts = []
        if not bool(made.all()):
            own = self.real.batch(self.kept[index[~made]], rng)
            parts.append((own["x"], own["y"]))
        if bool(made.any()):
            which = index[made] - len(self.kept)
            x = self.images[which]
            parts.append((x.float() / 255 if x.dtype == torch.uint8 else x, self.labels[which]))
        # back to the order that was asked for
        place = torch.cat([(~made).nonzero()[:, 0], made.nonzero()[:, 0]]).argsort()
        x, y = (torch.cat([p[k].to(parts[0][k].dtype) for p in parts])[place] for k in (0, 1))
        return {"x": x, "y": y, "made": made}


def labels_of(data: Data, classes: int) -> Tensor:
    found = torch.cat([data.batch(index)["y"] for index in torch.arange(len(data)).split(1000)])
    if found.dim() != 1 or found.is_floating_point():
        raise ValueError(
            "Balance counts classes: it needs one whole number as label of every sample"
        )
    if len(found) and int(found.max()) >= classes:
        raise ValueError(
            f"a sample is of class {int(found.max())}, but the head knows {classes} classes"
        )
    return found
