r"""Exact inversion of a fully connected layer (Phong et al., "Privacy-preserving deep learning via
additively homomorphic encryption", 2018; Geiping et al., "Inverting gradients", 2020, proposition
3.1; of batches: Boenisch et al., "When the curious abandon honesty", 2023, the passive part).

For y = W f + b and one example, dL/dW_i = dL/dy_i f^T and dL/db_i = dL/dy_i, so that
    f = (dL/dW_i) / (dL/db_i)
for any row i whose bias moved: no search, no prior. Least squares over all rows is the same with
less noise. Of a batch the quotient is a mixture, except in rows behind a ReLU that a single example
passed: several of these give one and the same quotient, mixtures do not, which tells them apart.
Where the layer sees the image itself, f is the image. Behind convolutions f is their output, and
the image is what gives these features (gradient descent with a little total variation: the network
is known).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean

import torch
from torch import Tensor, nn

from fedlens.audit.attack import MARGIN, Comparison, Evidence, Finding
from fedlens.audit.probe import Caught, catch, compare_best, fedavg_of, labelled, some_rounds
from fedlens.audit.protections import FROM_THE_WORST
from fedlens.core.client import generator
from fedlens.runs.setup import Setup

_STEPS = 300  # from features to an image
_BEGINNINGS = 2  # of that search
_SMOOTH = 3e-3  # weight of the total variation in it
_MOST = 2  # clients of whom an image is sought
_CANDIDATES = 3  # images that are sought of one client
ALIKE = 1e-2  # relative distance of two quotients of one example, and of features that came back


class LinearInversion:
    name = "linear"
    title = "Exact inversion of the first fully connected layer"
    paper = "Phong et al. 2018; Geiping et al. 2020, proposition 3.1; Boenisch et al. 2023"
    protections = FROM_THE_WORST

    def applies(self, setup: Setup) -> str:
        if why := labelled(setup):
            return why
        base = fedavg_of(setup)
        assert base is not None
        if base.optimizer != "sgd":
            return f"{base.optimizer} divides gradients away"
        return "" if first_linear(base.resident) else "no fully connected layer with a bias"

    def run(self, evidence: Evidence) -> Finding:
        began = time.perf_counter()
        rows = [self._of_client(evidence, c) for c in evidence.clients[:_MOST]]
        scores = [row.scores["psnr"] for row, _ in rows]
        bases = [row.baseline["psnr"] for row, _ in rows]
        best = mean(float(errors.min()) for _, errors in rows)
        back = sum(int((errors < ALIKE).sum()) for _, errors in rows)
        return Finding(
            self.name,
            f"The input of the first fully connected layer comes back with an error of"
            f" {100 * best:.1f} %, the image at {mean(scores):.1f} dB; without any message"
            f" {mean(bases):.1f} dB are possible.",
            "PSNR of the image, dB",
            mean(scores),
            mean(bases),
            margin=MARGIN,
            numbers={
                "relative error of the features": f"{best:.2e}",
                "images whose features came back": f"{back} of {sum(len(e) for _, e in rows)}",
            },
            comparisons=[row for row, _ in rows],
            curve=self._curve(evidence),
            budget=f"closed form for the features, {_BEGINNINGS} times {_STEPS} steps to an image",
            seconds=time.perf_counter() - began,
        )

    def _curve(self, evidence: Evidence) -> list[tuple[int, float]]:
        """Of the first client, over the rounds, where a picture may come out at all."""
        if not (evidence.probe and evidence.over_rounds):
            return []
        return [
            (
                evidence.exchanges[number].round,
                self._of_client(evidence, client, number)[0].scores["psnr"],
            )
            for number, client in some_rounds(evidence)
        ]

    def _of_client(
        self, evidence: Evidence, client: int, number: int | None = None
    ) -> tuple[Comparison, Tensor]:
        """The best image, and of every image that was in the batch how far its features are from
        the nearest that came back.
        """
        base = fedavg_of(evidence.setup)
        assert base is not None
        caught = catch(evidence, client, number)
        name = first_linear(base.resident)
        received = caught.down.trees["model"]
        found = find_inputs(*_gradients(name, caught, received, base.weight_decay))
        model = base.load(received).eval()
        truths = caught.truth["x"]
        with torch.no_grad():
            own = _input_of(model, name, truths)
        apart = torch.cdist(own, found) / own.norm(dim=1, keepdim=True).clamp_min(1e-12)
        guesses = [image_of(model, name, f, truths.shape[1:]) for f in found]
        return compare_best(evidence.setup, client, guesses, truths), apart.amin(1)


def first_linear(model: nn.Module) -> str:
    """The name of the first fully connected layer with a bias, "" if there is none."""
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return next((str(name) for name, layer in linear if layer.bias is not None), "")


def _gradients(
    name: str, caught: Caught, received: Mapping[str, Tensor], decay: float
) -> tuple[Tensor, Tensor]:
    """Of weight and bias, from a delta after SGD: without what weight decay did, which is known."""
    out = []
    for part in ("weight", "bias"):
        key = f"{name}.{part}"
        step = -caught.delta[key].double() / caught.lr
        out.append(step - decay * caught.steps * received[key].double())
    return out[0], out[1]


def find_inputs(weight: Tensor, bias: Tensor) -> Tensor:
    """(candidates, features): an input for each group of rows that agree; where none do, what all
    rows together say, and the row whose bias moved most.
    """
    moved = bias.abs() > 1e-3 * bias.abs().max()
    weight, bias, quotients = weight[moved], bias[moved], weight[moved] / bias[moved, None]
    sizes = quotients.norm(dim=1, keepdim=True)
    agree = torch.cdist(quotients, quotients) < ALIKE * torch.minimum(sizes, sizes.T)
    groups: list[Tensor] = []
    free = torch.ones(len(bias), dtype=torch.bool)
    for row in agree.sum(1).argsort(descending=True):
        group = agree[row] & free
        if free[row] and int(group.sum()) > 1:
            groups.append(group)
            free &= ~group
    if not groups:
        largest = int(bias.abs().argmax())
        groups = [torch.ones_like(free), torch.arange(len(bias)) == largest]
    return torch.stack([invert_linear(weight[g], bias[g]) for g in groups[:_CANDIDATES]])


def invert_linear(weight: Tensor, bias: Tensor) -> Tensor:
    """The layer's input by least squares over these rows, of which each is a multiple of it."""
    return (bias @ weight / bias.square().sum().clamp_min(1e-30)).float()


def _input_of(model: nn.Module, name: str, images: Tensor) -> Tensor:
    caught: list[Tensor] = []
    handle = dict(model.named_modules())[name].register_forward_pre_hook(
        lambda _, inputs: caught.append(inputs[0])
    )
    try:
        model(images)
    finally:
        handle.remove()
    return caught[0]


def image_of(model: nn.Module, name: str, features: Tensor, shape: torch.Size) -> Tensor:
    """The image whose features these are: of several beginnings the one that fits best. Adam on
    the signs of the slopes: on the slopes themselves it is caught by the kinks of ReLU and pooling
    (19 instead of 33 dB on the images of the tests).
    """
    noise = torch.randn((_BEGINNINGS, *shape), generator=generator(0, 0x11EA))
    images = (0.5 + 0.1 * noise).clamp(0, 1).requires_grad_()
    optimiser = torch.optim.Adam([images], lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
    wanted = features.nan_to_num(0.0, 0.0, 0.0)
    scale = wanted.square().mean().clamp_min(1e-12)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        misfit = (_input_of(model, name, images) - wanted).square().mean(1) / scale
        objective = misfit + _SMOOTH * total_variation(images)
        objective.sum().backward()  # type: ignore[no-untyped-call]
        assert images.grad is not None
        images.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()[int(objective.argmin())]


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, of each image or clip."""
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
    return down + (x[..., :, 1:] - x[..., :, :-1]).abs().flatten(1).mean(1)
