r"""Gradient inversion (Geiping et al., "Inverting gradients: how easy is it to break privacy in
federated learning?", 2020; several local steps: Dimitrov et al., "Data leakage in federated
averaging", 2022).

Made-up examples x are changed until a client that trained on them would have sent this delta:
    min_x  1 - cos(delta(x), delta) + alpha TV(x)
delta(x) is `steps` differentiable local steps from the received model. Labels are taken from the
bias of the last layer (`audit/labels.py`) or given, as the worst case, as are joints and boxes.
Targets that are images themselves (video) are unknown too and are sought together with the input.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from statistics import mean

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlens.algorithms.fedavg import FedAvg
from fedlens.audit.attack import MARGIN, Comparison, Evidence, Finding
from fedlens.audit.labels import BIAS, estimate_shares, single_label
from fedlens.audit.linear import total_variation
from fedlens.audit.probe import (
    Caught,
    catch,
    compare_best,
    fedavg_of,
    first_heard,
    parameters_of,
    pixel_range,
    some_rounds,
)
from fedlens.audit.protections import FROM_THE_WORST
from fedlens.core.client import Batch, generator
from fedlens.core.task import LearningTask
from fedlens.runs.setup import Setup

ITERATIONS = 600
MOST_STEPS = 8  # local steps that are differentiated through
MOST_EXAMPLES = 8
_MOST_CLIENTS = 2
SMOOTH = 1e-4  # weight of the total variation: 27.8 dB where 1e-3 has 21.7 (experiments/leakage)
_PACE = 0.1  # of the search


class GradientInversion:
    """known_labels: the worst case, where the server has them from elsewhere. iterations, smooth,
    pace: of the search.
    """

    name = "gradient"
    title = "Images from a model update, by matching it"
    paper = "Geiping et al. 2020; Dimitrov et al. 2022"
    protections = FROM_THE_WORST

    def __init__(
        self,
        known_labels: bool = False,
        iterations: int = ITERATIONS,
        smooth: float = SMOOTH,
        pace: float = _PACE,
    ) -> None:
        self.known_labels, self.iterations = known_labels, iterations
        self.smooth, self.pace = smooth, pace

    def applies(self, setup: Setup) -> str:
        if fedavg_of(setup) is None:
            return f"{type(setup.algorithm.base).__name__} trains no network"
        held = next((h for h in setup.federation.holdings if h is not None and len(h)), None)
        if held is None:
            return "the clients' data is not here"
        example = held.batch(torch.arange(1))
        if "x" not in example or not example["x"].is_floating_point():
            return "its examples are not images"
        return once_only(setup, example)

    def run(self, evidence: Evidence) -> Finding:
        began = time.perf_counter()
        places = [(first_heard(evidence, c), c) for c in list(evidence.clients)[:_MOST_CLIENTS]]
        # where a picture may come out at all, also over the rounds
        later = some_rounds(evidence)[1:] if evidence.probe and evidence.over_rounds else []
        seconds = 60 * evidence.minutes / len(places + later)
        found = [self._of_client(evidence, c, k, seconds) for k, c in places + later]
        rows = [row for row, _ in found[: len(places)]]
        cosines = [cosine for _, cosine in found[: len(places)]]
        curve = [
            (evidence.exchanges[k].round, row.scores["psnr"])
            for (k, _), (row, _) in zip(
                [places[0], *later], [found[0], *found[len(places) :]], strict=True
            )
        ]
        score, base = (mean(getattr(r, k)["psnr"] for r in rows) for k in ("scores", "baseline"))
        better = score > base + MARGIN
        return Finding(
            self.name,
            f"Matching the update gives the best image at {score:.1f} dB,"
            f" {'beyond' if better else 'not beyond'} the {base:.1f} dB that are possible"
            " without any message.",
            "PSNR of the image, dB",
            score,
            base,
            margin=MARGIN,
            numbers={
                "targets": self._targets(evidence),
                "cosine reached": f"{mean(cosines):.4f}",
            },
            comparisons=rows,
            curve=curve if later else (),
            budget=f"{self.iterations} steps a client, {60 * evidence.minutes:.0f} s at most",
            seconds=time.perf_counter() - began,
        )

    def _targets(self, evidence: Evidence) -> str:
        caught = catch(evidence, evidence.clients[0])
        if self._guesses_labels(caught):
            return "labels from the last layer's bias"
        sought = [n for n, t in caught.truth.items() if holds_images(t)]
        return "sought too" if "y" in sought else "known to the attacker"

    def _of_client(
        self, evidence: Evidence, client: int, number: int, seconds: float
    ) -> tuple[Comparison, float]:
        caught = catch(evidence, client, number)
        made, cosine = self.reconstruct(evidence.setup, caught, seconds)
        return compare_best(evidence.setup, client, list(made["x"]), caught.truth["x"]), cosine

    def reconstruct(self, setup: Setup, caught: Caught, seconds: float) -> tuple[Batch, float]:
        """Examples that would have given this delta, and the cosine they reach."""
        base = fedavg_of(setup)
        assert base is not None
        count = min(caught.examples, MOST_EXAMPLES)
        made = self._beginning(setup, caught, count)
        unknown = [t for t in made.values() if t.requires_grad]
        delta_of = local_work(base, caught)
        names = parameters_of(base, caught.delta)
        wanted = torch.cat([caught.delta[n].float().reshape(-1) for n in names])
        low, high = pixel_range(setup)
        optimiser = torch.optim.Adam(unknown, lr=self.pace * float((high - low).mean()))
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimiser, [int(self.iterations * s) for s in (0.4, 0.65, 0.85)], 0.3
        )
        least, reached = math.inf, -1.0
        kept = {n: t.detach().clone() for n, t in made.items()}
        began = time.perf_counter()
        for _ in range(self.iterations):
            optimiser.zero_grad()
            with sdpa_kernel(SDPBackend.MATH):  # of the quick kinds there is no second derivative
                moved = delta_of(made)
            found = torch.cat([moved[n].reshape(-1) for n in names])
            cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=0)
            objective = 1 - cosine + self.smooth * total_variation(made["x"]).mean()
            objective.backward()  # type: ignore[no-untyped-call]
            if float(objective.detach()) < least:
                least, reached = float(objective.detach()), float(cosine.detach())
                kept = {n: t.detach().clone() for n, t in made.items()}
            for t in unknown:
                assert t.grad is not None
                t.grad.sign_()
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                for t in unknown:
                    t.copy_(torch.minimum(torch.maximum(t, low), high))
            if time.perf_counter() - began > seconds:
                break
        return kept, reached

    def _beginning(self, setup: Setup, caught: Caught, count: int) -> Batch:
        """Noise around grey for images; labels as far as the last layer tells them; other targets
        are given, as the worst case.
        """
        rng = generator(0, 0x6AD)
        low, high = pixel_range(setup)
        made: Batch = {}
        for name, t in caught.truth.items():
            if holds_images(t):
                shape = (count, *t.shape[1:])
                start = (0.5 + 0.1 * torch.randn(shape, generator=rng)).clamp(0, 1)
                made[name] = (low + (high - low) * start).requires_grad_()
            else:
                made[name] = t[:count].clone()
        if self._guesses_labels(caught):
            made["y"] = guess_labels(setup, caught, count)
        return made

    def _guesses_labels(self, caught: Caught) -> bool:
        y = caught.truth.get("y")
        classes = y is not None and not y.is_floating_point() and y.dim() == 1
        return classes and not self.known_labels and BIAS in caught.delta


def once_only(setup: Setup, example: Batch) -> str:
    """Empty where the slope of a gradient can be had, which matching one needs; otherwise which
    operation has none (such as the roi_align of CtP).
    """
    base = fedavg_of(setup)
    assert base is not None
    model = base.resident.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            loss = base.task.loss(base.task.forward(model, example), example)
            slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            sizes = torch.stack([s.square().sum() for s in slopes if s is not None])
            torch.autograd.grad(sizes.sum(), parameters, allow_unused=True)
    except RuntimeError as e:
        return f"its network cannot be differentiated twice: {str(e).splitlines()[0]}"
    return ""


def holds_images(t: Tensor) -> bool:
    """Images and clips, (N, ..., H, W), not coordinates or boxes."""
    return t.is_floating_point() and t.dim() >= 4 and min(t.shape[-2:]) >= 8


def guess_labels(setup: Setup, caught: Caught, count: int) -> Tensor:
    """One image: the class whose bias rose. Several: the shares that the bias tells, in whole
    images, the largest remainders rounded up.
    """
    if count == 1:
        return single_label(caught.delta)
    wanted = count * estimate_shares(setup, caught)
    whole = wanted.floor().long()
    rest = (wanted - whole).argsort(descending=True)[: count - int(whole.sum())]
    whole[rest] += 1
    return torch.arange(len(whole)).repeat_interleave(whole)


def local_work(base: FedAvg, caught: Caught) -> Callable[[Batch], Mapping[str, Tensor]]:
    """delta(batch): differentiable local steps from the received model, with the client's own
    optimiser. Adam's quotient g / |g| has no slope, so a softer one takes its place: it has the
    same signs.
    """
    received = {n: t.clone() for n, t in caught.down.trees["model"].items()}
    model = base.load(received).train()
    objective = _Objective(base.task, model)
    trained = base.parameter_names
    fixed = {n: t.clone() for n, t in model.state_dict().items() if n not in trained}
    start = {n: p.detach().clone() for n, p in model.named_parameters() if n in trained}
    steps = max(1, min(caught.steps, MOST_STEPS))

    def loss(weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        held = {**weights, **{n: t.clone() for n, t in fixed.items()}}
        out: Tensor = functional_call(
            objective, {f"model.{n}": t for n, t in held.items()}, (batch,)
        )
        return out

    def delta(batch: Batch) -> Mapping[str, Tensor]:
        weights = {n: t.clone().requires_grad_() for n, t in start.items()}
        pace: dict[str, Tensor] = {}
        for _ in range(steps):
            grads = torch.autograd.grad(
                loss(weights, batch), list(weights.values()), create_graph=True, allow_unused=True
            )
            for (n, w), g in zip(list(weights.items()), grads, strict=True):
                if g is None:
                    continue
                if base.optimizer == "sgd":
                    g = g + base.weight_decay * w
                    pace[n] = base.momentum * pace[n] + g if n in pace else g
                else:
                    pace[n] = g / (g.abs() + g.detach().abs().mean() + 1e-12)
                weights[n] = w - caught.lr * pace[n]
        return {n: w - start[n] for n, w in weights.items()}

    return delta


class _Objective(torch.nn.Module):
    """A task's loss as a function of a model's weights."""

    def __init__(self, task: LearningTask, model: torch.nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.task.forward(self.model, batch), batch)
