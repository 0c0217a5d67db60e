"""Scenes small enough for tests, and Algorithm 1 of the FedDeblur paper written down line by line,
in float64 and with full spectra.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedlens import Federation, Message, run
from fedlens.deblur import FedDeblur
from fedlens.deblur.blur import gaussian, motion
from fedlens.deblur.observation import Observation, SceneFacts
from fedlens.deblur.task import Deblurring
from fedlens.engines.loopback import Loopback

SIZE = (24, 20)


def small_federation(
    partial: bool, clients: int = 3, channels: int = 1, seed: int = 0, size: tuple[int, int] = SIZE
) -> Federation:
    """A blocky random scene, seen through different kernels with noise; partial views are
    overlapping bands.
    """
    rng = np.random.default_rng(seed)
    height, width = size
    sharp = np.kron(rng.uniform(0, 255, (channels, 6, 5)), np.ones((1, height // 6, width // 5)))
    kernels = [motion(5, 30), gaussian(3, 1.0), motion(4, 90), gaussian(4, 0.8)]
    band = height // clients + 4
    holdings = []
    for k in range(clients):
        kernel = kernels[k % 4]
        y = blur(sharp, kernel.numpy()) + rng.normal(0, 1, sharp.shape)
        top = min(k * (height // clients), height - band)
        pixels = y[:, top : top + band, 2 : width - 1] if partial else y
        place = (top, 2) if partial else (None, None)
        holdings.append(
            {
                "scene": Observation(
                    torch.from_numpy(np.ascontiguousarray(pixels)), kernel, height, width, *place
                )
            }
        )
    facts = SceneFacts(
        scenes={"scene": (channels, height, width)},
        clients=clients,
        observe="partial" if partial else "complete",
        noise=1.0,
    )
    return Federation(holdings, test={"scene": torch.from_numpy(sharp).float()}, facts=facts)


def make(federation: Federation, **keys: Any) -> FedDeblur:
    return FedDeblur(
        Deblurring(), **{"eta": 2.0, "rho": 0.3, "double": True, "tol": 0.0, **keys}
    ).given(federation.facts)


def solve(
    federation: Federation, rounds: int, cohort: int | None = None, **keys: Any
) -> tuple[Message, Loopback]:
    algorithm = make(federation, **keys)
    engine = Loopback(algorithm, federation)
    return run(algorithm, engine, rounds, cohort=cohort), engine


def otf(kernel: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(size)
    for (i, j), value in np.ndenumerate(kernel):
        padded[(i - kernel.shape[0] // 2) % size[0], (j - kernel.shape[1] // 2) % size[1]] += value
    return np.fft.fft2(padded)


def blur(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    return np.fft.ifft2(np.fft.fft2(x) * otf(kernel, x.shape[-2:])).real


def gradient(x: np.ndarray) -> np.ndarray:
    return np.stack([x - np.roll(x, 1, -1), x - np.roll(x, 1, -2)])


def divergence(q: np.ndarray) -> np.ndarray:
    """The adjoint of `gradient`."""
    return q[0] - np.roll(q[0], -1, -1) + q[1] - np.roll(q[1], -1, -2)


def views(federation: Federation) -> list[dict[str, np.ndarray]]:
    """y and m in full size, and H."""
    out = []
    for held in federation.holdings:
        seen = held["scene"]
        mask = seen.mask(torch.float64).numpy()
        out.append(
            {
                "y": seen.embed(seen.pixels.double()).numpy(),
                "m": mask,
                "H": otf(seen.kernel.numpy(), (seen.height, seen.width)),
            }
        )
    return out


def algorithm_1(
    federation: Federation, eta: float, rho: float, rounds: int, x: np.ndarray
) -> dict[str, Any]:
    """Options 2 and B (m = 1 is option A's problem, but not its iteration, so that one is written
    out too).
    """
    known = views(federation)
    n = len(known)
    size = x.shape[-2:]
    partial = any((v["m"] == 0).any() for v in known)
    F, I = np.fft.fft2, lambda s: np.fft.ifft2(s).real
    local = [{"x": x, "lam": np.zeros_like(x), "beta": np.zeros_like(x)} for _ in known]
    D2 = np.abs(F(np.eye(1, size[1])[0] * 0 + _dirac(size) - np.roll(_dirac(size), 1, -1))) ** 2
    D2 = D2 + np.abs(F(_dirac(size) - np.roll(_dirac(size), 1, -2))) ** 2
    mu = np.zeros((2, *x.shape))
    for t in range(rounds):
        if t:
            w = sum(c["x"] + c["lam"] / rho for c in local) / n
            a = gradient(x) - mu / rho
            size_of = np.sqrt((a**2).sum((0, 1), keepdims=True))
            z = a * np.maximum(size_of - eta / rho, 0) / np.maximum(size_of, 1e-12)
            x = I(F(n * w + divergence(z + mu / rho)) / (n + D2))
            mu = mu + rho * (z - gradient(x))
        for v, c in zip(known, local, strict=True):
            H, y = v["H"], v["y"]
            if partial:
                r = (rho * (I(H * F(c["x"])) - y) - c["beta"]) / (2 / n * v["m"] + rho)
                c["x"] = I(
                    (H.conj() * F(r + y + c["beta"] / rho) + F(x - c["lam"] / rho))
                    / (np.abs(H) ** 2 + 1)
                )
                c["beta"] = c["beta"] + rho * (r - (I(H * F(c["x"])) - y))
            else:
                c["x"] = I(
                    (2 / n * H.conj() * F(y) + F(rho * x - c["lam"]))
                    / (2 / n * np.abs(H) ** 2 + rho)
                )
            c["lam"] = c["lam"] + rho * (c["x"] - x)
    return {"x": x, "local": local, "w": [c["x"] + c["lam"] / rho for c in local]}


def _dirac(size: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(size)
    out[0, 0] = 1
    return out


def objective(federation: Federation, x: np.ndarray, eta: float) -> float:
    known = views(federation)
    fit = sum(
        (v["m"] * (np.fft.ifft2(v["H"] * np.fft.fft2(x)).real - v["y"]) ** 2).sum() for v in known
    ) / len(known)
    return float(fit + eta * np.sqrt((gradient(x) ** 2).sum((0, 1))).sum())


def misfit_gradient(known: list[dict[str, np.ndarray]], x: np.ndarray) -> list[np.ndarray]:
    """grad f_k for every client, f_k = |m (h * x - y)|^2 / n, from `views`."""
    F, I = np.fft.fft2, lambda s: np.fft.ifft2(s).real
    return [
        2 / len(known) * I(v["H"].conj() * F(v["m"] * (I(v["H"] * F(x)) - v["y"]))) for v in known
    ]


def primal_dual(federation: Federation, eta: float, steps: int) -> np.ndarray:
    """Condat and Vu's algorithm for the same problem: gradients of the misfit, projections for
    total variation. No ADMM anywhere.
    """
    known = views(federation)
    x = np.full(known[0]["y"].shape, 127.5)
    q = np.zeros((2, *x.shape))
    sigma, tau = 0.02, 1 / (2 / 2 + 8 * 0.02)  # 1 / tau - 8 sigma >= L / 2, L <= 2
    for _ in range(steps):
        new = x - tau * (sum(misfit_gradient(known, x)) + divergence(q))
        q = q + sigma * gradient(2 * new - x)
        q = q / np.maximum(1, np.sqrt((q**2).sum((0, 1), keepdims=True)) / eta)
        x = new
    return x
