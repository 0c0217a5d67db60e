r"""Exact inversion of a fully connected layer (Phong et al., "Privacy-preserving deep learning via
additively homomorphic encryption", 2018; Geiping et al., "Inverting gradients", 2020, proposition
3.1).

For y = W f + b and one example, dL/dW_i = dL/dy_i f^T and dL/db_i = dL/dy_i, so that
    f = (dL/dW_i) / (dL/db_i)
for any row i whose bias moved: no search, no prior. Of a batch the same quotient is a mixture.
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

from fedlens.audit.attack import Comparison, Evidence, Finding, nearest, score_images
from fedlens.audit.probe import Caught, catch, fedavg_of, flat_image, labelled, others, some_rounds
from fedlens.audit.protections import FROM_THE_WORST
from fedlens.runs.setup import Setup

_STEPS = 600  # from features to an image
_MOST = 3  # clients of whom an image is sought


class LinearInversion:
    name = "linear"
    title = "Exact inversion of the first fully connected layer"
    paper = "Phong et al. 2018; Geiping et al. 2020, proposition 3.1"
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
        errors = [e for _, e in rows]
        return Finding(
            self.name,
            f"The input of the first fully connected layer comes back with an error of"
            f" {100 * mean(errors):.1f} %, the image at {mean(scores):.1f} dB; the nearest image of"
            f" somebody else has {mean(bases):.1f} dB.",
            "PSNR of the image, dB",
            mean(scores),
            mean(bases),
            numbers={"relative error of the features": f"{mean(errors):.2e}"},
            comparisons=[row for row, _ in rows],
            curve=self._curve(evidence),
            budget=f"closed form for the features, {_STEPS} steps from them to an image",
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
    ) -> tuple[Comparison, float]:
        base = fedavg_of(evidence.setup)
        assert base is not None
        caught = catch(evidence, client, number)
        name = first_linear(base.resident)
        received = caught.down.trees["model"]
        features = invert_linear(*_gradients(name, caught, received, base.weight_decay))
        truth = flat_image(caught.truth["x"][0])
        model = base.load(received).eval()
        own = _input_of(model, name, truth[None])[0].detach()
        error = float((features - own).norm() / own.norm().clamp_min(1e-12))
        guess = image_of(model, name, features, truth.shape)
        unrelated = nearest(truth, others(evidence.setup, truth))
        return (
            Comparison(
                f"client {client}", guess, truth, unrelated, score_images(guess, truth),
                score_images(unrelated, truth),
            ),
            error,
        )  # fmt: skip


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


def invert_linear(weight: Tensor, bias: Tensor) -> Tensor:
    """The layer's input, from the row whose bias moved most."""
    row = int(bias.abs().argmax())
    return (weight[row] / bias[row]).float()


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
    """The image whose features these are."""
    image = torch.full((1, *shape), 0.5, requires_grad=True)
    optimiser = torch.optim.Adam([image], lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
    scale = features.square().mean().clamp_min(1e-12)
    wanted = features.nan_to_num(0.0, 0.0, 0.0)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        misfit = (_input_of(model, name, image)[0] - wanted).square().mean() / scale
        (misfit + 1e-2 * total_variation(image)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            image.clamp_(0, 1)
    return image.detach()[0]


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbours."""
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    return down + (x[..., :, 1:] - x[..., :, :-1]).abs().mean()
