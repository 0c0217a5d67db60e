r"""What FedDeblur is compared with, on the same core, with the same priors and scores (appendix C.3
and D.5 of its paper).

CenDeblur (Algorithms 2 and 3): the server collects every observation, kernel and mask in the first
round and solves the same problem by ADMM, one iteration a round. The bound that privacy is measured
against. z = W x for split priors, z = x for the others. LocDeblur (Algorithms 4 and 5): every
client restores alone, from its own observation; results are averaged for scoring only. FedAvgDeblur
(same): as LocDeblur, but each local iteration begins at the average of all local images, which
therefore travel. FedGDDeblur (Algorithm 7): clients send the gradient of their misfit, the server
descends on it and on smoothed total variation; with a denoiser (not in the paper) the server takes
a proximal gradient step.

Partial views: LocDeblur and FedAvgDeblur follow the paper in knowing no mask, so a client deblurs
its view in a black scene; each pixel is averaged over those who observed it. Deviations: LocDeblur
and FedAvgDeblur minimise |h * x - y|^2 / 2 (Algorithm 4 has no factor 2); the authors' code also
clamps FedAvgDeblur's average and starts it from the mean observation, which is not done here.
`relax` is FedDeblur's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.core.client import Client
from fedlens.core.limits import Positive
from fedlens.core.message import Message
from fedlens.core.replies import Replies
from fedlens.core.tree import Tree
from fedlens.deblur import spectrum
from fedlens.deblur.consensus import by_pixel
from fedlens.deblur.feddeblur import FedDeblur
from fedlens.deblur.observation import Observation, SceneFacts
from fedlens.deblur.settings import published_alone


def as_complex(s: Tensor) -> Tensor:
    return torch.view_as_complex(s)


@dataclass
class CenDeblur(FedDeblur):
    """Everything in one place: no privacy at all. Keys as FedDeblur's."""

    needs = "replies"
    relaxes: ClassVar[bool] = False
    varies: ClassVar[bool] = False

    def suggested(self, facts: SceneFacts, n: int) -> tuple[float, float]:
        """The same problem has the same eta. Without a splitting z = W x, n clients with penalty
        rho each hold x like one with n rho.
        """
        eta, rho = super().suggested(facts, n)
        return (eta, rho) if self.regulariser.split else (eta, n * rho)

    def broadcast(self, state: Message) -> Message:
        return super().broadcast(state).note(collect=float("ids" not in state.trees), measure=0.0)

    def expects(self, message: Message) -> Mapping[str, Tree]:
        if not message.scalars["collect"]:
            return {}
        empty = {n: torch.empty(shape, dtype=self.dtype) for n, shape in self._scenes.items()}
        masks = {n: x[:1] for n, x in empty.items()}
        kernels = {
            n: torch.empty(h, w // 2 + 1, 2, dtype=self.dtype)
            for n, (_, h, w) in self._scenes.items()
        }
        return {"y": empty, "m": masks, "h": kernels}

    def client_step(self, message: Message, client: Client) -> Message:
        if not message.scalars["collect"]:
            return Message()
        views: Mapping[str, Observation] = client.data
        y = {n: v.embed(v.pixels.to(self.dtype)) for n, v in views.items()}
        m = {n: v.mask(self.dtype) for n, v in views.items()}
        h = {n: torch.view_as_real(v.otf(self.dtype)) for n, v in views.items()}
        return Message({"y": y, "m": m, "h": h})

    def server_step(self, state: Message, replies: Replies) -> Message:
        state = state if "ids" in state.trees else self._collect(state, replies)
        images = {name: self._solve(state, name) for name in self._scenes}
        trees = {"image": images, "x": {n: spectrum.forward(x) for n, x in images.items()}}
        t = self._strength(state) / state.scalars["rho"]
        trees["q"] = {
            n: self.regulariser.next_q(x, state.trees["q"][n], t) for n, x in images.items()
        }
        trees |= self._residuals(state, trees["x"])
        return self.measured_state(state, trees, replies, {})

    def _collect(self, state: Message, replies: Replies) -> Message:
        """Keep what the clients sent, start from the mean observation."""
        came = list(replies)
        ids = [m.sender for m in came]
        n, rho = len(came), state.scalars["rho"]
        masked = any(bool((m.trees["m"][s] == 0).any()) for m in came for s in m.trees["m"])
        start: Tree = {}
        for s in self._scenes:
            total = torch.stack([m.trees["y"][s] for m in came]).sum(0)
            start[s] = total / torch.stack([m.trees["m"][s] for m in came]).sum(0).clamp_min(1)
        state = Message(
            {**state.trees, **self.begin(start).trees, "ids": {"ids": torch.tensor(ids)}},
            state.scalars,
        )
        if "q" not in state.trees:
            t = state.scalars["eta"] / rho
            state = state.put(q={s: self.regulariser.prox(x.clone(), t) for s, x in start.items()})
        power, fixed = {}, {}
        for s in self._scenes:
            hs = [as_complex(m.trees["h"][s]) for m in came]
            power[s] = torch.stack([h.abs().square() for h in hs]).sum(0)
            if not masked:
                ys = [torch.fft.rfft2(m.trees["y"][s]) for m in came]
                fixed[s] = torch.view_as_real(
                    torch.stack([h.conj() * y for h, y in zip(hs, ys, strict=True)]).sum(0)
                    * (2 / n)
                )
        state = state.put(power=power, **({} if masked else {"fixed": fixed})).note(
            collected=float(n)
        )
        if masked:
            views = {f"{what}{m.sender}": m.trees[what] for m in came for what in ("y", "m", "h")}
            zeros = {f"b{i}": {s: torch.zeros_like(x) for s, x in start.items()} for i in ids}
            # r + y + beta / rho = h * x at the start: the misfit begins at that of the mean
            # observation
            blurred = {
                f"p{m.sender}": {
                    s: self._blurred(state.trees["x"][s], m.trees["h"][s], s) for s in self._scenes
                }
                for m in came
            }
            state = state.put(**views, **zeros, **blurred)
        return state

    def _solve(self, state: Message, s: str) -> Tensor:
        """Lines 5 and 7 of Algorithms 2 and 3."""
        prior, rho, n = self.regulariser, state.scalars["rho"], state.scalars["collected"]
        _, height, width = self._scenes[s]
        gram, prior_part = (
            prior.gram(height, width, self.dtype),
            torch.fft.rfft2(prior.adjoint(state.trees["q"][s])),
        )
        power = state.trees["power"][s]
        if "fixed" in state.trees:
            top, below = (
                as_complex(state.trees["fixed"][s]) + rho * prior_part,
                2 / n * power + rho * gram,
            )
        else:
            ids = state.trees["ids"]["ids"].tolist()
            top = prior_part
            for i in ids:
                top = top + as_complex(state.trees[f"h{i}"][s]).conj() * torch.fft.rfft2(
                    state.trees[f"p{i}"][s]
                )
            below = power + gram
        image: Tensor = torch.fft.irfft2(top / below, s=(height, width))
        return image

    def _residuals(self, state: Message, spectra: Tree) -> dict[str, Tree]:
        """Lines 9 and 10: r_k, then beta_k; kept as p = r + y + b and b = beta / rho."""
        if "fixed" in state.trees:
            return {}
        rho, n = state.scalars["rho"], state.scalars["collected"]
        out: dict[str, Tree] = {}
        for i in state.trees["ids"]["ids"].tolist():
            p, b = {}, {}
            for s, x in spectra.items():
                y, old = state.trees[f"y{i}"][s], state.trees[f"b{i}"][s]
                fit = self._blurred(x, state.trees[f"h{i}"][s], s) - y
                r = rho * (fit - old) / (2 / n * state.trees[f"m{i}"][s] + rho)
                b[s] = old + r - fit
                p[s] = r + y + b[s]
            out |= {f"p{i}": p, f"b{i}": b}
        return out

    def _blurred(self, x: Tensor, h: Tensor, s: str) -> Tensor:
        image: Tensor = torch.fft.irfft2(as_complex(x) * as_complex(h), s=self._scenes[s][1:])
        return image


@dataclass
class LocDeblur(FedDeblur):
    """Everyone alone. Keys as FedDeblur's."""

    varies: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    def suggested(self, facts: SceneFacts, n: int) -> tuple[float, float]:
        return published_alone(self.prior, self.shared, facts)

    def broadcast(self, state: Message) -> Message:
        return Message(
            {"image": state.trees["image"]},
            {"rho": state.scalars["rho"], "eta": self._strength(state), "measure": 0.0},
        )

    def expects(self, message: Message) -> Mapping[str, Tree]:
        images = message.trees["image"]
        return {"image": images, "seen": {n: x[:1] for n, x in images.items()}}

    def client_step(self, message: Message, client: Client) -> Message:
        prior, rho = self.regulariser, message.scalars["rho"]
        t = message.scalars["eta"] / rho
        sent, masks = {}, {}
        for name, mean in message.trees["image"].items():
            seen: Observation = client.data[name]
            fixed, inverse, mask = self._once(
                client, name, lambda seen: self._alone(seen, rho), rho
            )
            kept = client.memory.get(name)
            x = (
                mean
                if self.shared
                else kept["x"]
                if kept
                else seen.embed(seen.pixels.to(self.dtype))
            )
            d = prior.transform(x)
            mu = kept["mu"] if kept else torch.zeros_like(d)  # mu / rho
            q = prior.prox(d.sub_(mu), t).add_(mu)
            top = (
                torch.view_as_real(torch.fft.rfft2(prior.adjoint(q)))
                .mul(rho)
                .add_(fixed)
                .mul_(inverse)
            )
            new = spectrum.backward(top, seen.width)
            mu = q - prior.transform(new)
            client.memory[name] = {"mu": mu} if self.shared else {"mu": mu, "x": new}
            sent[name], masks[name] = new * mask if seen.partial else new, mask
        return Message({"image": sent, "seen": masks})

    def server_step(self, state: Message, replies: Replies) -> Message:
        images = by_pixel(replies.mean("image"), replies.mean("seen"), state.trees["image"])
        return self.measured_state(state, {"image": images}, replies, {})

    def begin(self, images: Tree) -> Message:
        assert self.eta is not None and self.rho is not None
        return Message({"image": images}).note(eta=self.eta, rho=self.rho, pad=self._pad)

    def images(self, message: Message) -> Tree:
        return dict(message.trees["image"])

    def _alone(self, seen: Observation, rho: float) -> tuple[Tensor, Tensor, Tensor]:
        """conj(H) F(y), 1 / (|H|^2 + rho W^T W) and the mask."""
        h = seen.otf(self.dtype)
        y = seen.embed(seen.pixels.to(self.dtype))
        below = h.abs().square() + rho * self.regulariser.gram(seen.height, seen.width, self.dtype)
        return (
            torch.view_as_real(h.conj() * torch.fft.rfft2(y)),
            spectrum.twice(1 / below),
            seen.mask(self.dtype),
        )


@dataclass
class FedAvgDeblur(LocDeblur):
    """Local iterations from the average of the local images. Keys as FedDeblur's."""

    shared: ClassVar[bool] = True


@dataclass
class FedGDDeblur(FedDeblur):
    """Gradient descent.

    Args:
        step: its length (the misfit curves by 2 at most, so 1 is the limit).
        smooth: |Dx| is sqrt(|Dx|^2 + smooth^2).
    """

    relaxes: ClassVar[bool] = False
    varies: ClassVar[bool] = False
    step: Positive = 0.8
    smooth: Positive = 1.0

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return {"g": message.trees["x"]}

    def client_step(self, message: Message, client: Client) -> Message:
        out: Tree = {}
        misfit = 0.0
        for name, x in message.trees["x"].items():
            seen: Observation = client.data[name]
            power, fixed = self._once(client, name, self._gradient)
            if seen.partial:
                h = as_complex(power)
                fit = (seen.through(x, h) - seen.pixels.to(self.dtype)) * seen.weight(self.dtype)
                out[name] = torch.view_as_real(2 * h.conj() * torch.fft.rfft2(seen.embed(fit)))
            else:
                out[name] = torch.mul(power, x).sub_(fixed)
            misfit += seen.misfit(x) if message.scalars["measure"] else 0.0
        return (
            Message({"g": out}).note(loss=misfit)
            if message.scalars["measure"]
            else Message({"g": out})
        )

    def server_step(self, state: Message, replies: Replies) -> Message:
        images: Tree = {}
        for name, g in replies.mean("g").items():
            x = state.trees["image"][name]
            down = spectrum.backward(g, x.shape[-1])
            if self.prior == "tv":
                d = self.regulariser.transform(x)
                d.div_((d.square().sum((0, 1)) + self.smooth**2).sqrt())
                images[name] = x - self.step * (
                    down + state.scalars["eta"] * self.regulariser.adjoint(d)
                )
            else:
                images[name] = self.regulariser.prox(
                    x - self.step * down, self.step * self._strength(state)
                )
        trees = {"image": images, "x": {n: spectrum.forward(x) for n, x in images.items()}}
        return self.measured_state(state, trees, replies, {})

    def _gradient(self, seen: Observation) -> tuple[Tensor, Tensor]:
        """2 |H|^2 and 2 conj(H) F(y), each entry twice; or H itself for a partial view."""
        h = seen.otf(self.dtype)
        fixed = torch.view_as_real(
            2 * h.conj() * torch.fft.rfft2(seen.embed(seen.pixels.to(self.dtype)))
        )
        return (
            torch.view_as_real(h) if seen.partial else spectrum.twice(2 * h.abs().square())
        ), fixed
