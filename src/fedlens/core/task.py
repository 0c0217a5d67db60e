"""A task: what is wanted, how well it was done, how that is shown and used. Algorithms know nothing
of it beyond this.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.client import Batch, Data, Output
from fedlens.core.facts import Facts
from fedlens.core.federation import Federation
from fedlens.core.limits import Limited
from fedlens.core.message import Message
from fedlens.core.picture import Picture

Adapt = Callable[[Tensor, Batch], Tensor]


class Task(metaclass=Limited):
    """What is wanted, how well it was done, how that is shown. Constructor arguments are the
    `[task]` table of a recipe. `result` is what `Algorithm.result` gives: a network, an image.

    Attributes:
        shared: arguments that are as much the data's, such as the size of an image: `size=64` sets
            it in both tables, and where nobody gives one it is the data's.
        telling: how the names of those metrics begin that not all data have: where clients are
            hidden in a sum they are left out, because who has one says something about its data,
            and what few have is theirs.
    """

    shared: ClassVar[tuple[str, ...]] = ()
    telling: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def arguments_from_facts(cls, facts: Facts) -> dict[str, Any]:
        """Arguments that the data knows, for those that nobody gives."""
        return {}

    @classmethod
    def arguments_from_weights(
        cls, weights: Mapping[str, Tensor], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments that a file of weights shows, for `apply`; those that are given win."""
        return {}

    @abstractmethod
    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        """Metrics; the first one is the headline. A name that ends in "loss" is better when
        smaller.
        """

    def admit(self, federation: Federation) -> Federation:
        """The federation as this task sees it: what it cannot learn from is left out and counted in
        the facts, before anything starts.
        """
        return federation

    def references(self, start: Any, data: Any) -> Mapping[str, Mapping[str, float]]:
        """What is reached on the test data without having learned anything, by name: a run shows it
        beside its own figures. `start` is the result before the first round.
        """
        return {}

    def pictures(self, result: Any, federation: Federation) -> Sequence[Picture]:
        return ()

    @abstractmethod
    def save(self, state: Message, folder: Path) -> None:
        """Write what users take away: model.safetensors, restored.png."""

    def apply(self, folder: Path, source: Path, target: Path, **options: Any) -> str:
        """Use a run's result on a user's file or folder; returns one line about what was
        written. folder: the run's, or a file of weights.
        """
        raise ValueError(f"{type(self).__name__} has nothing to apply to a file")


def check_options(task: Task, options: Mapping[str, Any], *known: str) -> None:
    """Refuse an option of `apply` that a task does not have."""
    if unknown := sorted(options.keys() - set(known)):
        there = f": there {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else ""
        raise ValueError(f"{type(task).__name__} has no option {unknown[0]!r}{there}")


class LearningTask(Task):
    """A task with a model and a loss: what FedAvg and its layers train.

    Attributes:
        init: a file of weights to start from, for a task whose constructor takes one.
        pretrained: the same for weights that were trained for something else: true for what the
            network's authors publish, a path, hub:OWNER/NAME or package:NAME (an installed one).
        heads: patterns of the names that need not fit such weights.
        multiple: the sides of an input must be multiples of this, because the model says so (a
            patch, a stride).
        by_example: the loss of a batch is the mean of its examples' losses; one that compares
            examples with each other is not.
        own_network: a user's network may have parts called `features` and `head` that are not all
            that it does.
    """

    init: str | None = None
    pretrained: bool | str = False
    heads: tuple[str, ...] = ("head.*", "keypoint_head.*")
    multiple: int = 1
    by_example: bool = True
    own_network: bool = False
    _split: bool | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh network; the caller has seeded torch."""

    def load_init(self, model: nn.Module) -> None:
        """Fill a fresh network with the weights of `pretrained`, then of `init`. Not in `model`: a
        worker, a site or `apply` gets its weights anyway, and the file need not be there."""
        self.load_pretrained(model)
        if self.init:
            from fedlens.core.weights import load_weights

            load_weights(model, self.init)

    def load_pretrained(self, model: nn.Module) -> None:
        from fedlens.core.weights import (
            adopt_weights,
            read_weights,
            weights_from_hub,
            weights_of_package,
        )

        if not self.pretrained:
            return
        if self.pretrained is True:
            found, source = self.published(), "what is published"
        elif self.pretrained.startswith("hub:"):
            found, source = weights_from_hub(self.pretrained[4:]), self.pretrained
        elif self.pretrained.startswith("package:"):
            found, source = weights_of_package(self.pretrained[8:]), self.pretrained
        else:
            found, source = read_weights(self.pretrained), self.pretrained
        adopt_weights(model, found, source, self.heads)

    def published(self) -> dict[str, Tensor]:
        """The weights that the network's authors publish: what `pretrained=true` means."""
        raise ValueError(
            f"{type(self).__name__} knows of no published weights: set task.pretrained=PATH"
        )

    def forward(self, model: nn.Module, batch: Batch, adapt: Adapt | None = None) -> Output:
        """Prediction, and the features in front of the head where the model is split into
        `features(x)` and `head`.
        """
        extract: Any = getattr(model, "features", None)
        head: Any = getattr(model, "head", None)
        if extract is None or head is None or not self._is_split(model, batch):
            if adapt is not None:
                raise ValueError(
                    f"{type(model).__name__} has no split into features and head, so nothing can"
                    " stand between them"
                )
            return Output(model(batch["x"]))
        features: Tensor = extract(batch["x"])
        features = adapt(features, batch) if adapt else features
        return Output(head(features), features)

    def _is_split(self, model: nn.Module, batch: Batch) -> bool:
        if not self.own_network:
            return True
        if self._split is None:
            self._split = is_split(model, batch["x"][:1])
        return self._split

    def fits(self, facts: Facts) -> None:
        """Refuse, before any work starts, data that this task cannot learn from: raise a
        ValueError. `facts` are the federation's.
        """

    def needs_head(self, data: Any) -> bool:
        """Does `evaluate` on this data use the head? Where heads stay with the clients, the server
        can only evaluate what does not.
        """
        return True

    @abstractmethod
    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Mean loss of a batch."""

    def lower(self, batch: Batch, size: tuple[int, int]) -> Batch:
        """The same batch as a camera of fewer pixels would have seen it. Labels stay as they are:
        nobody compares against them there.
        """
        return {
            **batch,
            "x": F.interpolate(
                batch["x"], size=size, mode="bilinear", align_corners=False, antialias=True
            ),
        }

    def distance(self, prediction: Any, target: Any) -> Tensor:
        """How far one prediction is from another of the same shape, with the same reduction as
        `loss`, so that the two may be added.
        """
        return F.mse_loss(prediction, target)

    def save(self, state: Message, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {n: t.contiguous() for n, t in state.trees["model"].items()},
            folder / "model.safetensors",
        )


def is_split(model: nn.Module, x: Tensor) -> bool:
    """Is head(features(x)) all that a network does? Compared on one example, without dropout."""
    extract: Any = getattr(model, "features", None)
    head: Any = getattr(model, "head", None)
    if not callable(extract) or not callable(head):
        return False
    if type(model).forward is nn.Module.forward:  # it has nothing else
        return True
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            whole, parts = model(x), head(extract(x))
        return isinstance(whole, Tensor) and torch.equal(whole, parts)
    except Exception:  # parts that do not even fit together are no split
        return False
    finally:
        model.train(training)


def in_batches(data: Data, size: int, device: torch.device | str = "cpu") -> Iterator[Batch]:
    """Evaluation batches: in order, without augmentation."""
    for low in range(0, len(data), size):
        batch = data.batch(torch.arange(low, min(low + size, len(data))))
        yield {k: v.to(device) for k, v in batch.items()}
