"""DPSGD (Abadi et al., 2016): differential privacy for every single example of a client, made at
the client.

Gradients of single examples are clipped and noise is added to their sum in every local step
(`core/noisy_steps.py`), so the update may be shown to anybody. Each site spends on its own
examples; those of different sites are different ones, so the whole run costs the most that a site
spent. How many examples a site has is taken as public: it decides q = B / n and the steps.

The mean training loss is no longer part of a reply: it is not noisy. What compares the examples of
a batch (BatchNorm, some losses) and what pulls weights elsewhere is refused, as is any layer that
sends more about the data than the update.

In a simulation noise and batches follow from the seed: good for measuring what is learned, and no
protection. At a real site they come from the operating system, so that a run is not repeatable to
the bit; who is in a batch is nobody's business then, and counts as a secret.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from fedlens.algorithms.fedavg import FedAvg, TrainingLayer
from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.client import Client, Data, NoisySteps, generator, seeded
from fedlens.core.federation import Federation
from fedlens.core.limits import Count, Positive, ProperShare
from fedlens.core.message import Message
from fedlens.core.noise import secret_generator
from fedlens.core.privacy import Mechanism, Unit

_STREAM = 0xD9


@dataclass
class DPSGD(TrainingLayer):
    """Local steps with differential privacy for single examples.

    Args:
        noise: multiplier z: the deviation of the noise over `clip`.
        clip: C, the largest norm of one example's gradient.
        delta: the chance that is left to the guarantee to fail; below 1 / examples.
        max_epsilon: the run ends before a site would have spent more.
        microbatch: examples whose gradients are in memory together.
    """

    noise: Positive = 1.0
    clip: Positive = 1.0
    delta: ProperShare = 1e-5
    max_epsilon: Positive | None = None
    microbatch: Count = 32
    protects: ClassVar[Unit | None] = "example"
    post_processes: ClassVar[bool] = True  # it hands out less than it gets
    _real: bool = field(default=False, init=False, repr=False, compare=False)

    def check(self, inner: Algorithm) -> None:
        base = self.under(inner)
        for part in inner.parts():
            if not isinstance(part, Layer):
                continue
            name = type(part).__name__
            if part.steers:
                raise StackError(
                    f"{name} pulls the weights elsewhere than the clipped gradients of single"
                    " examples do: leave it out beside DPSGD"
                )
            if part.looks_at_data and not part.by_example:
                raise StackError(
                    f"{name} looks at a client's data or losses in a way that DPSGD does not make"
                    " noisy: leave one of them out"
                )
        if base.mixed_precision:
            raise StackError("DPSGD clips in full precision: set mixed_precision=false")
        self._check_task(base)

    @staticmethod
    def _check_task(base: FedAvg) -> None:
        task = type(base.task).__name__
        if not base.task.by_example:
            raise StackError(
                f"the loss of {task} compares the examples of a batch with each other, so no"
                " example has a gradient of its own: DPSGD needs another task"
            )
        for name, module in base.resident.train().named_modules():
            if _counts_examples(module) and not base.is_frozen(name):
                has_norm = hasattr(base.task, "norm") and not base.task.own_network
                cure = "set task.norm=group" if has_norm else "use a network without"
                raise StackError(
                    f"{name} of the network is a {type(module).__name__}, which mixes the examples"
                    f" of a batch and keeps their statistics; DPSGD cannot hide them: {cure}"
                )

    def rehearse(self, federation: Federation) -> None:
        """Two examples together must lose what they lose alone, on average."""
        self.inner.rehearse(federation)
        for holding in federation.holdings:
            _check_copies(holding)
        data = next((h for h in federation.holdings if isinstance(h, Data) and len(h) > 1), None)
        if data is None:
            return
        base, model = self.fedavg, self.fedavg.task.model().eval()
        batches = [data.batch(torch.tensor(index)) for index in ([0, 1], [0], [1], [0])]
        with torch.no_grad():
            both, one, other, again = (
                float(base.task.loss(base.task.forward(model, b), b)) for b in batches
            )
        if one == again and abs(both - (one + other) / 2) > 1e-3 * max(1.0, abs(both)):
            raise ValueError(
                f"the loss of two examples is {both:.4g}, that of each alone {one:.4g} and"
                f" {other:.4g}: DPSGD needs a loss that is the mean over single examples"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        _check_copies(client.data)
        seed = message.header.seed, message.round, client.id, _STREAM
        rng = None if self._real else generator(*seed)
        noisy = client.with_noise(NoisySteps(self.clip, self.noise, self.microbatch, rng))
        if self._real:
            # One more example in a batch moves the augmentation and dropout of those behind it: to
            # whoever knows that stream, many gradients would change and not one.
            own = secret_generator()
            with seeded(own):
                reply = self.inner.client_step(message, replace(noisy, rng=own))
        else:
            reply = self.inner.client_step(message, noisy)
        return replace(reply, scalars={k: v for k, v in reply.scalars.items() if k != "loss"})

    def mechanism(self, examples: int, population: int, cohort: int) -> Mechanism:
        base = self.fedavg
        return Mechanism(
            unit="example",
            noise=self.noise,
            rate=min(1.0, base.batch / max(1, examples)),
            sampling="poisson",
            steps=base.steps_of(examples),
            delta=self.delta,
            max_epsilon=self.max_epsilon,
            seeded=not self._real,
        )

    def deployed(self) -> Algorithm:
        layer = copy.copy(self)
        layer.inner, layer._real = self.inner.deployed(), True
        return layer


def _check_copies(data: object) -> None:
    """Data that counts an example several times could have it in a batch as often."""
    if (times := getattr(data, "repeat", 1)) > 1:
        raise ValueError(
            f"each example is counted {times} times (data.repeat), so that a batch can hold it more"
            " than once and DPSGD's clip would not bound what it does: set data.repeat=1, and more"
            " epochs instead"
        )


def _counts_examples(module: nn.Module) -> bool:
    """Does it normalise by a batch, or remember statistics of it? One that is not trained does
    neither.
    """
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.training and module.track_running_stats
    return module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
