"""FedAvg (McMahan et al., 2017).

State and broadcast: "model". Reply: "delta" = local - global, weighted by samples or uniformly,
with the scalars "loss" (mean of the total loss over all batches), "examples", "steps" and "lr_sum".
Buffers (BatchNorm) are part of the model and are averaged like weights.

The server step is x + server_lr * mean(delta). With server_lr = 1 this is the weighted mean of the
local models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedlens.core import tree
from fedlens.core.algorithm import Algorithm, Layer, Shortened, StackError
from fedlens.core.client import Batch, Client, Data, generator, seeded
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Fraction, Natural, NotNegative, Positive
from fedlens.core.message import Message
from fedlens.core.noisy_steps import chosen, noisy_gradients
from fedlens.core.replies import LOSS, SIZE, Replies, Scalar
from fedlens.core.task import Adapt, LearningTask
from fedlens.core.training import (
    Learner,
    Objective,
    find_device,
    lr_factor,
    shuffled,
    survives,
    train,
)
from fedlens.core.tree import Tree


@dataclass
class FedAvg(Learner):
    """Local training, averaged. Every other learning method is a layer around this one.

    The local optimiser is fresh in every round.

    Args:
        task: what is learned.
        lr: learning rate of the local optimiser.
        optimizer: the local optimiser: "sgd", "adam" or "adamw".
        momentum: of SGD.
        weight_decay: of the local optimiser.
        betas: of Adam.
        schedule: of the learning rate over the rounds; "step" multiplies by `decay` every
            `step_every` rounds, or at the rounds of `milestones`.
        step_every: rounds between two steps of the schedule "step".
        decay: factor of such a step.
        milestones: rounds of such steps, in place of `step_every`.
        warmup: rounds over which the rate rises to `lr`.
        epochs: passes over a client's data in a round.
        steps: batches in a round, in place of `epochs`.
        batch: examples in a batch.
        clip: largest norm of a gradient.
        weights: how much a client counts: by its "examples", or "uniform".
        server_lr: 1 is plain averaging.
        mixed_precision: bfloat16 autocast.
        channels_last: memory format.
        device: where to compute: "cpu", "cuda", or "auto".
        seed: of the first weights.
        init_from: weights to start from, after the task's `init`.
        lr_factors: pairs of a pattern and a factor, such as ("spynet.*", 0.25): parameters whose
            name fits learn with that multiple of lr; to hold them still, use `freeze`.
        freeze: patterns of names that do not learn; BatchNorm that is frozen keeps its statistics.
        freeze_rounds: for how many rounds they do not; None: never.
    """

    task: LearningTask
    lr: Positive = 0.1
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Fraction = 0.0
    weight_decay: NotNegative = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["constant", "cosine", "step"] = "constant"
    step_every: Count = 30
    decay: Positive = 0.1
    milestones: tuple[Natural, ...] = ()
    warmup: Natural = 0
    epochs: Count = 1
    steps: Count | None = None
    batch: Count = 32
    clip: Positive | None = None
    weights: Literal["examples", "uniform"] = "examples"
    server_lr: Positive = 1.0
    mixed_precision: bool = False
    channels_last: bool = False
    device: str = "auto"
    seed: Natural = 0
    init_from: str | None = None
    lr_factors: tuple[tuple[str, Positive], ...] = ()
    freeze: tuple[str, ...] = ()
    freeze_rounds: Natural | None = None
    _resident: nn.Module | None = field(default=None, init=False, repr=False, compare=False)
    # what a layer adds to every network that is built, after it has its first weights
    _wrap: Callable[[nn.Module], nn.Module] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    reports: ClassVar[Mapping[str, Scalar]] = {
        LOSS: Scalar("mean", weight=SIZE, record=True),
        SIZE: Scalar("sum", record=True),
        "steps": Scalar("local"),
        "lr_sum": Scalar("local"),
    }

    def __post_init__(self) -> None:
        if self.trains and not isinstance(self.task, LearningTask):
            raise ValueError(
                f"FedAvg trains a network, but the task {type(self.task).__name__} has none"
            )

    def init(self) -> Message:
        self.place  # noqa: B018  a device that is not here is refused now, not by every client
        model = self._bare()
        self.task.load_init(model)
        if self.init_from:
            from fedlens.core.weights import load_weights

            load_weights(model, self.init_from)
        model = self._wrap(model) if self._wrap else model
        self._check_patterns(model)
        return Message({"model": tree.clone(model.state_dict())})

    def given(self, facts: Facts) -> Algorithm:
        """Clients whose own resolution the model cannot take are refused here, not one by one in
        every round.
        """
        self.task.fits(facts)
        for client, (height, width) in enumerate(facts.resolutions):
            if height % self.task.multiple or width % self.task.multiple:
                raise StackError(
                    f"client {client} has {height}x{width} inputs, but the model takes multiples of"
                    f" {self.task.multiple}"
                )
        return self

    def broadcast(self, state: Message) -> Message:
        return Message({"model": state.trees["model"]})

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return {"delta": message.trees["model"]}

    def client_step(self, message: Message, client: Client) -> Message:
        received = message.trees["model"]
        model = self.load(received).train()
        adapters = self._adapters(client)

        def objective(batch: Batch) -> tuple[Tensor, Tensor | None]:
            output = self.task.forward(model, batch, _chain(adapters) if adapters else None)
            loss = self.task.loss(output, batch)
            for term in client.terms:
                loss = loss + term(model, batch, output)
            pulls = [pull(model) for pull in client.pulls]
            return loss, torch.stack(pulls).sum() if pulls else None

        if client.noisy is None:
            batches = shuffled(
                client.data, self.batch, client.rng, epochs=self.epochs, steps=self.steps
            )
        else:
            steps = self.steps_of(len(client.data))
            batches = chosen(client.data, self.batch, steps, client.noisy, client.rng)
        with self.thawed(model, message, client):
            groups = self._groups(model, adapters, message)
            parameters = [p for group in groups for p in group["params"]]
            optimizer = self.make_optimizer(groups, self.lr_at(message))
            trained = train(
                parameters,
                map(self._place, batches),
                objective,
                optimizer,
                clip=self.clip,
                amp=self._autocast(),
                after_step=self._drift(model, message, client),
                differentiate=self._with_noise(model, objective, client),
            )
        for name, module in client.adapters.items():
            client.memory[name] = tree.map_tree(
                lambda t: t.detach().cpu().clone(), module.state_dict()
            )
        local = model.state_dict()
        delta = {n: local[n].to("cpu") - t for n, t in received.items()}
        examples = float(len(client.data))
        reply = Message({"delta": delta}).note(
            loss=trained.loss, examples=examples, steps=float(trained.steps), lr_sum=trained.lr_sum
        )
        return reply.weigh("delta", examples if self.weights == "examples" else 1.0)

    def _with_noise(
        self, model: nn.Module, objective: Objective, client: Client
    ) -> Callable[[Batch], Tensor] | None:
        if client.noisy is None:
            return None
        if client.pulls or client.adapters or client.drifts:
            raise ValueError("steps with noise have no room for pulls, adapters or drifts")
        size = min(self.batch, max(1, len(client.data)))  # what is expected of a batch
        return noisy_gradients(model, lambda batch: objective(batch)[0], client.noisy, size)

    def steps_of(self, examples: int) -> int:
        """Local steps of a client with so many examples, where batches are drawn by chance."""
        return self.steps or self.epochs * max(1, -(-examples // self.batch))

    def server_step(self, state: Message, replies: Replies) -> Message:
        model, delta = state.trees["model"], replies.mean("delta")
        step = delta if self.server_lr == 1 else tree.scale(delta, self.server_lr)
        return state.put(model=tree.cast({n: t + step[n] for n, t in model.items()}, like=model))

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        with torch.no_grad():
            return self.task.evaluate(self.result(message), data)

    def result(self, state: Message) -> nn.Module:
        return self.load(state.trees["model"]).eval()

    def rehearse(self, federation: Federation) -> None:
        """One example through a fresh model, where the data is here."""
        if federation.holdings[0] is None:
            return
        if not isinstance(federation.holdings[0], Data):
            raise ValueError("it has no batches of examples to learn from")
        data = next((h for h in federation.holdings if len(h)), None)
        if data is None:
            raise ValueError("no client has any data")
        with seeded(generator(self.seed)), torch.no_grad():
            try:
                batch = data.batch(torch.arange(1))
                self.task.loss(self.task.forward(self.task.model().eval(), batch), batch)
            except (ValueError, OSError):
                raise
            except Exception as e:  # a user's data, network and loss
                raise ValueError(_in_words(e)) from e
        if self.mixed_precision and (why := survives(lambda: self._try_mixed(data))):
            raise ValueError(
                f"this {self.place.type} cannot train in mixed precision (a trial step ended with"
                f" {why}): set mixed_precision=false"
            )

    def _try_mixed(self, data: Data) -> None:
        """One step in bfloat16. Processors announce instructions that a virtual machine then does
        not allow, and what comes of that is no exception."""
        model = self.task.model().to(self.place).train()
        batch = self._place(data.batch(torch.arange(min(self.batch, len(data)))))
        with self._autocast() or nullcontext():
            loss = self.task.loss(self.task.forward(model, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]

    def shortened(self, steps: int) -> Shortened:
        short = copy.copy(self)
        short.epochs, short.steps = 1, min(steps, self.steps) if self.steps else None
        times = self.steps / min(steps, self.steps) if self.steps else float(self.epochs)
        return Shortened(short, times, self.batch, by_data=not self.steps)

    # -- the resident model ------------------------------------------------------------------------

    @property
    def resident(self) -> nn.Module:
        """One network per process, filled anew for every client: building it would cost more than
        training a small one.
        """
        if self._resident is None:
            model = self._bare()
            model = self._wrap(model) if self._wrap else model
            if self.channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._resident = model.to(self.place)
        return self._resident

    def load(self, weights: Mapping[str, Tensor]) -> nn.Module:
        current = self.resident.state_dict()
        with torch.no_grad():
            for name, t in weights.items():
                current[name].copy_(t)
        return self.resident

    def _bare(self) -> nn.Module:
        with seeded(generator(self.seed, 0x1417)):
            return self.task.model()

    def wrapped(self, wrap: Callable[[nn.Module], nn.Module]) -> FedAvg:
        """The same, but `wrap` adds to every network that it builds."""
        changed = copy.copy(self)
        changed._wrap, changed._resident = wrap, None
        return changed

    @property
    def parameter_names(self) -> set[str]:
        """What is trained, as opposed to buffers, which are only averaged."""
        return {n for n, p in self.resident.named_parameters() if p.requires_grad}

    def gradient(self, message: Message, client: Client) -> Tree:
        """Mean gradient of the local objective (loss and terms, no pulls) at the received model,
        over all local data.
        """
        model = self.load(message.trees["model"]).train()
        total = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
        adapt = _chain(self._adapters(client)) if client.adapters else None
        with self.thawed(model, message, client):
            named = {n: p for n, p in model.named_parameters() if p.requires_grad}
            self._add_gradients(model, named, client, adapt, total)
        return tree.map_tree(lambda t: t.to("cpu"), total)

    def _add_gradients(
        self,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        client: Client,
        adapt: Adapt | None,
        total: Tree,
    ) -> None:
        for low in range(0, len(client.data), self.batch):
            index = torch.arange(low, min(low + self.batch, len(client.data)))
            batch = self._place(client.data.batch(index))
            output = self.task.forward(model, batch, adapt)
            loss = self.task.loss(output, batch) + sum(
                term(model, batch, output) for term in client.terms
            )
            share = len(index) / len(client.data)
            for (n, _), g in zip(
                named.items(),
                torch.autograd.grad(loss, list(named.values()), allow_unused=True),
                strict=True,
            ):
                if g is not None:
                    total[n] += share * g

    @property
    def place(self) -> torch.device:
        if self.device != "auto":
            return find_device(self.device)
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

    def _place(self, batch: Batch) -> Batch:
        place = self.place
        moved = {
            k: v if v.device == place else v.to(place, non_blocking=True) for k, v in batch.items()
        }
        if self.channels_last and moved and moved["x"].dim() == 4:
            moved["x"] = moved["x"].contiguous(memory_format=torch.channels_last)
        return moved

    def _autocast(self) -> AbstractContextManager[Any] | None:
        return (
            torch.autocast(self.place.type, dtype=torch.bfloat16) if self.mixed_precision else None
        )

    def _adapters(self, client: Client) -> list[nn.Module]:
        for name, module in client.adapters.items():
            if name in client.memory:
                module.load_state_dict(client.memory[name])
            module.to(self.place).train()
        return list(client.adapters.values())

    # -- the local optimiser -----------------------------------------------------------------------

    def lr_at(self, message: Message) -> float:
        rising = min(1.0, (message.round + 1) / (self.warmup + 1))
        if self.schedule == "step" and self.milestones:
            passed = sum(message.round >= m for m in self.milestones)
            return rising * self.lr * float(self.decay**passed)
        return (
            rising
            * self.lr
            * lr_factor(
                self.schedule, message.round, message.header.rounds, self.step_every, self.decay
            )
        )

    @property
    def paced_by(self) -> str | None:
        """See `runs.folder.check_rounds`."""
        return "schedule=cosine" if self.schedule == "cosine" else None

    def factor(self, name: str, message: Message) -> float:
        """What the learning rate of a parameter is multiplied by in this round; 0 if it is
        frozen.
        """
        if (self.freeze_rounds is None or message.round < self.freeze_rounds) and any(
            fnmatchcase(name, p) for p in self.freeze
        ):
            return 0.0
        return next(
            (factor for pattern, factor in self.lr_factors if fnmatchcase(name, pattern)), 1.0
        )

    def is_frozen(self, module: str) -> bool:
        """Does no parameter of this module ever learn?"""
        own = [n for n, _ in self.resident.named_parameters() if n.startswith(f"{module}.")]
        always = bool(own) and self.freeze_rounds is None
        return always and all(any(fnmatchcase(n, p) for p in self.freeze) for n in own)

    @contextmanager
    def thawed(self, model: nn.Module, message: Message, client: Client) -> Iterator[None]:
        """Inside, only what learns in this stretch asks for gradients: what is frozen or held
        costs no backward pass, and no pull reaches it. Frozen BatchNorm uses the statistics it has,
        and they stay; one that is only held goes on with its batches.
        """
        learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        frozen = [p for n, p in learning if not self.factor(n, message)]
        for p in frozen:
            p.requires_grad_(False)
        norms = [m for m in model.modules() if m.training and _is_frozen_norm(m)]
        for m in norms:
            m.eval()
        held = [p for n, p in learning if p.requires_grad and any(s(n) for s in client.holds)]
        for p in held:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in (*frozen, *held):
                p.requires_grad_(True)
            for m in norms:
                m.train()

    def _groups(
        self, model: nn.Module, adapters: list[nn.Module], message: Message
    ) -> list[dict[str, Any]]:
        """Parameters by their factor, in the order of the model; one group where there are no
        factors.
        """
        lr = self.lr_at(message)
        groups: dict[float, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                groups.setdefault(self.factor(name, message), []).append(p)
        if own := [p for m in adapters for p in m.parameters() if p.requires_grad]:
            groups.setdefault(1.0, []).extend(own)
        if not groups:
            raise ValueError("everything is frozen: nothing can learn")
        return [
            {"params": ps, "lr": lr * factor, "factor": factor} for factor, ps in groups.items()
        ]

    def _drift(
        self, model: nn.Module, message: Message, client: Client
    ) -> Callable[[float], None] | None:
        """What `Client.drift` asks for, at each parameter's own learning rate."""
        if not client.drifts:
            return None
        moved, ways = [], []
        for name, p in model.named_parameters():
            if p.requires_grad:
                for way in (d[name] for d in client.drifts if name in d):
                    moved.append(p.data)
                    ways.append(way.to(p.device) * self.factor(name, message))

        def after_step(lr: float) -> None:
            torch._foreach_add_(moved, ways, alpha=-lr)

        return after_step

    def _check_patterns(self, model: nn.Module) -> None:
        names = [n for n, _ in model.named_parameters()]
        for pattern in (*(p for p, _ in self.lr_factors), *self.freeze):
            if not any(fnmatchcase(n, pattern) for n in names):
                parts = ", ".join(sorted({n.split(".")[0] for n in names}))
                raise ValueError(
                    f"no parameter's name fits {pattern!r}: the model consists of {parts}"
                )

    def make_optimizer(self, parameters: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay
            )
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr=lr, betas=self.betas, weight_decay=self.weight_decay)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resident": None}


class TrainingLayer(Layer):
    """A layer that stands on FedAvg: on its model, its local steps or its mean update. One that has
    more to check begins with `under`.
    """

    # builds a second network, so what it sees must be all of the model
    whole: ClassVar[bool] = False

    def under(self, inner: Algorithm) -> FedAvg:
        name = type(self).__name__
        if not isinstance(inner.base, FedAvg):
            raise StackError(
                f"{name} needs FedAvg's model and training, {type(inner.base).__name__} has none"
            )
        for part in inner.parts() if self.whole else ():
            if isinstance(part, Layer) and part.stage == "share":
                raise StackError(
                    f"{name} needs the whole model, but {type(part).__name__} hides a part of it:"
                    f" put {name} before it in the stack"
                )
        return inner.base

    def check(self, inner: Algorithm) -> None:
        self.under(inner)

    @property
    def fedavg(self) -> FedAvg:
        base = self.inner.base  # `check` has seen to it
        assert isinstance(base, FedAvg)
        return base

    @property
    def head(self) -> nn.Linear:
        """The model's head, for a layer whose `check` made sure that it is one linear layer."""
        head = self.fedavg.resident.head
        assert isinstance(head, nn.Linear)
        return head


def _in_words(error: Exception) -> str:
    """Its first line; of what is no error of torch's, also what kind it is."""
    text = (str(error).strip().splitlines() or [""])[0]
    plain = isinstance(error, RuntimeError | IndexError)
    return text if plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _is_frozen_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return norm and bool(own) and not any(p.requires_grad for p in own)


def _chain(adapters: list[nn.Module]) -> Adapt:
    def adapt(features: Tensor, batch: Batch) -> Tensor:
        for module in adapters:
            features = module(features, batch)
        return features

    return adapt
