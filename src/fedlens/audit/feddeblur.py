"""FedDeblur: what its server can work out about every camera. No training, no guessing of images:
algebra on what was sent (`audit/duals.py`, `audit/complete_views.py`, `audit/partial_views.py`).

The two systems of equations are this project's own; phase retrieval is Fienup's (1982).

Baseline. The server holds the restored scene x by design, so an unrelated photo would be too weak a
comparison: the third picture is the published x under the Gaussian blur that comes closest to the
truth, with a width that only the truth could tell.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor

from fedlens.audit.attack import Comparison, Evidence, Finding, score_images
from fedlens.audit.complete_views import find_kernel, find_photo, sent_by
from fedlens.audit.duals import Iterate, follow
from fedlens.audit.partial_views import find_partial, find_view, overlap
from fedlens.audit.protections import DEBLURRING
from fedlens.data.video.frames import Box
from fedlens.deblur import spectrum
from fedlens.deblur.blur import gaussian
from fedlens.deblur.feddeblur import FedDeblur
from fedlens.deblur.observation import Observation
from fedlens.runs.setup import Setup

_WIDTHS = (0.0, 0.5, 0.8, 1.2, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)  # of the baseline's blur
_LEAST = 4  # rounds that the equations need
EVERY = 2  # of how many more rounds the photo is drawn again
_MARGIN = 3.0  # dB beyond the published scene, of which the best blur was chosen by the truth


@dataclass(frozen=True)
class _Loot:
    """What was taken from one client of one scene. photo: (C, h, w) in grey levels."""

    photo: Tensor
    kernel: Tensor | None
    box: Box | None
    note: str = ""


class CuriousDeblurring:
    name = "feddeblur"
    title = "Kernel, photo and field of view from FedDeblur's messages"
    paper = "Fienup 1982 (phase retrieval); equations: docs/privacy.md"
    protections = DEBLURRING
    budget: ClassVar[str] = "two unknowns a frequency, 24 phase retrievals of 600 steps a client"

    def applies(self, setup: Setup) -> str:
        if isinstance(setup.algorithm.base, FedDeblur):
            return ""
        return f"{type(setup.algorithm.base).__name__} sends no w_k of a consensus"

    def run(self, evidence: Evidence) -> Finding:
        began = time.perf_counter()
        scene = next(iter(evidence.exchanges[0].down.trees["x"]))
        compared: list[Comparison] = []
        ious: list[float] = []
        local: list[float] = []
        failed = 0
        for client in evidence.clients:
            if (found := self.attack(evidence, client, scene)) is None:
                failed += 1
                continue
            seen = observation(evidence.setup, client, scene)
            row, loot = self.compare(evidence, client, scene, found, seen)
            compared.append(row)
            if seen is not None and seen.partial and loot.box is not None:
                ious.append(overlap(loot.box, true_box(seen)))
            if (error := self.local_error(evidence, client, scene)) is not None:
                local.append(error)
        result = self.finding(evidence, compared, ious, local, failed)
        curve = self._curve(evidence, scene) if evidence.over_rounds else ()
        return replace(result, curve=curve, seconds=time.perf_counter() - began)

    def _curve(self, evidence: Evidence, scene: str) -> list[tuple[int, float]]:
        """The first client's photo from the first so many rounds."""
        client = evidence.clients[0]
        seen = observation(evidence.setup, client, scene)
        points: list[tuple[int, float]] = []
        for rounds in range(_LEAST, len(evidence.exchanges) + 1, EVERY):
            first = replace(evidence, exchanges=evidence.exchanges[:rounds])
            found = self.attack(first, client, scene)
            if seen is not None and found is not None:
                row, _ = self.compare(first, client, scene, found, seen)
                points.append((evidence.exchanges[rounds - 1].round, row.scores["psnr"]))
        return points

    def attack(self, evidence: Evidence, client: int, scene: str) -> list[_Loot] | None:
        """One candidate for each thing that cannot be known (the mirror image); None where the
        client was heard too seldom.
        """
        relax = relax_of(evidence)
        rounds = follow(evidence.exchanges, client, scene, relax)
        if len(rounds) < _LEAST:
            return None
        down = evidence.exchanges[0].down
        n, rho = down.header.population, down.scalars["rho"]
        width = self.width(evidence, scene)
        if is_partial(evidence.setup):
            return self._partial(rounds, n, rho, width)
        sent = sent_by(rounds, n, rho, relax)
        kernel = find_kernel(sent, width)
        return [
            _Loot(find_photo(sent, kernel, width, mirrored), kernel, None)
            for mirrored in (False, True)
        ]

    def _partial(self, rounds: Sequence[Iterate], n: float, rho: float, width: int) -> list[_Loot]:
        view = find_partial(rounds, n, rho, width)
        if view is not None:
            return [_Loot(view.pixels, view.kernel, view.box)]
        box = find_view(rounds[0].u, width)
        rough = spectrum.backward(2 * rounds[0].u + rounds[0].x, width)  # |H| = 1 gives u = d / 2
        return [_Loot(cut(rough, box), None, box, "field of view only")]

    def width(self, evidence: Evidence, scene: str) -> int:
        base = evidence.setup.algorithm.base
        assert isinstance(base, FedDeblur)
        return base._scenes[scene][2]

    def compare(
        self,
        evidence: Evidence,
        client: int,
        scene: str,
        found: Sequence[_Loot],
        seen: Observation | None,
    ) -> tuple[Comparison, _Loot]:
        label = f"client {client}"
        if seen is None:
            return Comparison(label, _shown(found[0].photo)), found[0]
        truth = seen.pixels.double()
        placed = [(fit_to(loot, seen), loot) for loot in found]
        scored = [(score_images(_shown(p), _shown(truth)), p, loot) for p, loot in placed]
        scores, photo, loot = max(scored, key=lambda s: s[0]["psnr"])
        x = torch.view_as_complex(evidence.exchanges[-1].down.trees["x"][scene].double())
        guess = best_of_published(x, seen)
        return (
            Comparison(
                label + (f", {loot.note}" if loot.note else ""),
                _shown(photo),
                _shown(truth),
                _shown(guess),
                scores,
                score_images(_shown(guess), _shown(truth)),
            ),
            loot,
        )

    def local_error(self, evidence: Evidence, client: int, scene: str) -> float | None:
        """Largest error of any recovered x_k, in grey levels, against the client's own arithmetic;
        None where its data is not here.
        """
        seen = observation(evidence.setup, client, scene)
        base = evidence.setup.algorithm.base
        if seen is None or not isinstance(base, FedDeblur):
            return None
        down = evidence.exchanges[0].down
        from fedlens.deblur.fits import fit_of

        fit = fit_of(seen, down.header.population, down.scalars["rho"], base.dtype, base.relax)
        kept = None
        worst = 0.0
        width = self.width(evidence, scene)
        for exchange, found in zip(
            [e for e in evidence.exchanges if client in e.replies],
            follow(evidence.exchanges, client, scene, base.relax),
            strict=True,
        ):
            w, kept = fit.step(exchange.down.trees["x"][scene], kept)
            local = spectrum.backward((w - kept["u"]).double(), width)
            worst = max(worst, float((local - spectrum.backward(found.local, width)).abs().max()))
        return worst

    def finding(
        self,
        evidence: Evidence,
        compared: Sequence[Comparison],
        ious: Sequence[float],
        local: Sequence[float],
        failed: int,
    ) -> Finding:
        scored = [c for c in compared if c.scores]
        score = mean(c.scores["psnr"] for c in scored) if scored else float("nan")
        base = mean(c.baseline["psnr"] for c in scored) if scored else float("nan")
        rounds = len(evidence.exchanges)
        numbers = {"rounds used": str(rounds), "clients attacked": str(len(compared))}
        if failed:
            numbers["heard too seldom"] = str(failed)
        if local:
            numbers["error of the recovered x_k"] = f"at most {max(local):.1e} grey levels"
        if scored:
            numbers["photo, worst to best"] = (
                f"{min(c.scores['psnr'] for c in scored):.1f} to"
                f" {max(c.scores['psnr'] for c in scored):.1f} dB"
            )
        if ious:
            numbers["field of view, IoU"] = f"{mean(ious):.3f} (worst {min(ious):.3f})"
        return Finding(
            self.name,
            _describe(score, base, rounds, bool(scored), len(compared)),
            "PSNR of the photo, dB",
            score,
            base,
            margin=_MARGIN,
            numbers=numbers,
            comparisons=compared,
            budget=self.budget,
            unrelated="best guess from the published scene alone",
        )


def _describe(score: float, base: float, rounds: int, known: bool, clients: int) -> str:
    if not clients:
        return "No client was heard often enough to be attacked."
    if not known:
        return (
            f"From {rounds} rounds the server draws a photo of every client; nobody here knows the"
            " truth."
        )
    if score > base + _MARGIN:
        return (
            f"From {rounds} rounds of messages the server has every attacked client's photo at"
            f" {score:.1f} dB, up to a shift and a mirrored blur; from the published scene alone it"
            f" would be {base:.1f} dB."
        )
    return (
        f"From {rounds} rounds the attack reaches {score:.1f} dB, not clearly beyond the"
        f" {base:.1f} dB that the published scene alone gives."
    )


def is_partial(setup: Setup) -> bool:
    return bool(getattr(setup.federation.facts, "partial", False)) or bool(
        getattr(setup.federation.facts, "pad", 0)
    )


def observation(setup: Setup, client: int, scene: str) -> Observation | None:
    held = setup.federation.holdings[client]
    return held[scene] if held is not None else None


def relax_of(evidence: Evidence) -> float:
    base = evidence.setup.algorithm.base
    return base.relax if isinstance(base, FedDeblur) else 1.0


def true_box(seen: Observation) -> Box:
    assert seen.top is not None and seen.left is not None
    return seen.top, seen.left, seen.pixels.shape[-2], seen.pixels.shape[-1]


def cut(image: Tensor, box: Box) -> Tensor:
    top, left, tall, wide = box
    return image[..., top : top + tall, left : left + wide]


def fit_to(loot: _Loot, seen: Observation) -> Tensor:
    """The photo on the truth's grid, moved to where it fits best."""
    if loot.box is None:
        return shifted(loot.photo, seen.pixels)
    whole = torch.full((len(loot.photo), seen.height, seen.width), float(loot.photo.mean()))
    whole = whole.double()
    cut(whole, loot.box).copy_(loot.photo)
    return seen.cut(shifted(whole, seen.embed(seen.pixels.double() - seen.pixels.mean())))


def shifted(image: Tensor, like: Tensor) -> Tensor:
    """The image, rolled to where it fits best (circular cross-correlation)."""
    flat = image.double() - image.double().mean()
    alike = torch.fft.irfft2(
        torch.fft.rfft2(like.double()) * torch.fft.rfft2(flat).conj(), s=like.shape[-2:]
    ).sum(0)
    down, right = divmod(int(alike.argmax()), like.shape[-1])
    return image.roll((down, right), (-2, -1))


def best_of_published(x: Tensor, seen: Observation) -> Tensor:
    """x as it is, or under the Gaussian blur that comes closest to the truth."""
    tried = []
    for sigma in _WIDTHS:
        side = 2 * int(3 * sigma) + 1
        kernel = gaussian(side, sigma) if sigma else torch.ones(1, 1)
        h = spectrum.otf(kernel, seen.height, seen.width, torch.float64)
        tried.append(seen.cut(torch.fft.irfft2(x * h, s=(seen.height, seen.width))))
    return min(tried, key=lambda t: float((t - seen.pixels).square().sum()))


def _shown(image: Tensor) -> Tensor:
    return (image / 255).clamp(0, 1).float()
