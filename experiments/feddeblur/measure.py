"""What the tables do not show: python experiments/feddeblur/measure.py privacy | memory | views |
kernels | varying | acceleration | denoiser

privacy: over the rounds, how near what a client sends comes to what it should hide. w_k against its
observation and its own estimate x_k (PSNR inside its view), and how well its field of view can be
guessed from |w_k - x| (intersection over union): with Otsu's threshold, which anyone can apply, and
with the best threshold, which nobody knows. memory: peak resident memory and seconds a round of a
2040 x 1356 scene, 16 clients of 600 x 500, 25 x 25 kernels; grey, then colour. views: five
hand-held photos of a castle, blurred by known kernels, then aligned and restored: what they are
worth alone and together. kernels: known, estimated from a sharp reference or from the photo alone.
varying: cameras that rotate, with a grid of kernels and with their mean. acceleration: rounds with
and without over-relaxation. denoiser: ways of using FFDNet with partial views, on two images at
half size that are in no table, with motion half as long.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from run import GREY, PACK
from tables import record
from torch import Tensor

from fedlens.core.client import Client
from fedlens.core.federation import Federation
from fedlens.core.message import Message
from fedlens.core.picture import to_uint8
from fedlens.core.rounds import run
from fedlens.data.images.reading import read_image, resize
from fedlens.deblur import CenDeblur, FedDeblur
from fedlens.deblur import blur as blurs
from fedlens.deblur.alone import best_view
from fedlens.deblur.blur import client_kernel, disk, gaussian, motion, shake
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import backward, circular_blur
from fedlens.deblur.task import Deblurring
from fedlens.engines.simulator import Simulator
from fedlens.metrics.image import psnr

ROUNDS = (1, 2, 3, 5, 10, 20, 50, 100, 200)


class Overheard(FedDeblur):
    """FedDeblur with an ear on the wire and an eye on the clients, for measuring only."""

    def client_step(self, message: Message, client: Client) -> Message:
        reply = super().client_step(message, client)
        if message.round + 1 in ROUNDS:
            for name, seen in client.data.items():
                w, x = (
                    backward(t[name], seen.width) for t in (reply.trees["w"], message.trees["x"])
                )
                own = w - backward(client.memory[name]["u"], seen.width)
                guess = torch.nn.functional.avg_pool2d(
                    (w - x).abs().mean(0, keepdim=True), 9, 1, 4
                )[0]
                row = {
                    "round": message.round + 1,
                    "w_y": psnr(seen.cut(w), seen.pixels),
                    "w_x_k": psnr(seen.cut(w), seen.cut(own)),
                    "w_x": psnr(w, x),
                }
                if seen.partial:
                    row |= overlap(guess, seen.mask()[0] > 0)
                HEARD.append(row)
        return reply


HEARD: list[dict[str, float]] = []


def overlap(guess: Tensor, mask: Tensor) -> dict[str, float]:
    from skimage.filters import threshold_otsu

    def iou(threshold: float) -> float:
        found = guess > threshold
        return float((found & mask).sum() / (found | mask).sum().clamp_min(1))

    return {
        "iou_otsu": iou(threshold_otsu(guess.numpy())),
        "iou_best": max(
            iou(float(t)) for t in torch.quantile(guess, torch.linspace(0.3, 0.99, 60))
        ),
    }


def privacy() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for observe in ("complete", "partial"):
        HEARD.clear()
        scene = Scene(image=str(GREY / "01.png"), kernels="authors", observe=observe)  # type: ignore[arg-type]
        federation = scene.federation(scene.default_clients(), 0)
        algorithm = Overheard(Deblurring(), tol=0.0).given(federation.facts)
        with Simulator(algorithm, federation, workers=0) as engine:
            run(algorithm, engine, max(ROUNDS))
        names = [n for n in HEARD[0] if n != "round"]
        out[observe] = [
            {
                "round": r,
                **{
                    n: round(float(np.mean([h[n] for h in HEARD if h["round"] == r])), 3)
                    for n in names
                },
            }
            for r in ROUNDS
        ]
    return out


def castle(size: tuple[int, int], colour: str) -> Path:
    """A crop of a real photo, in the temporary folder."""
    target = Path(tempfile.gettempdir()) / f"castle-{size[0]}x{size[1]}-{colour}.png"
    if not target.exists():
        photo = read_image(sorted((PACK / "multiview" / "sceaux_castle").glob("*.JPG"))[0], colour)
        Image.fromarray(to_uint8(photo[:, 300 : 300 + size[0], 300 : 300 + size[1]] / 255)).save(
            target
        )
    return target


def large(colour: str, rounds: int) -> dict[str, Any]:
    scene = Scene(
        image=str(castle((1356, 2040), colour)),
        observe="partial",
        blur="synthesis",
        kernel_size=25,
        patch=(500, 600),
    )
    federation = scene.federation(16, 0)
    algorithm = FedDeblur(Deblurring()).given(federation.facts)
    times: list[float] = []
    with Simulator(algorithm, federation, workers=0) as engine:
        run(algorithm, engine, rounds, after_round=lambda p, r: times.append(round(r.seconds, 2)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "colour": colour,
        "rounds": rounds,
        "seconds": times,
        "peak_gb": round(peak, 2),
        "clients": 16,
        "kernel": [25, 25],
    }


def memory() -> list[dict[str, Any]]:
    """Each in a process of its own: a peak does not come down again."""
    out = []
    for colour, rounds in (("grey", 2), ("rgb", 2)):
        done = subprocess.run(
            [sys.executable, __file__, "large", colour, str(rounds)],
            capture_output=True,
            text=True,
            check=True,
        )
        out.append(json.loads(done.stdout))
    return out


def views() -> list[dict[str, Any]]:
    """Real photos, each blurred through a kernel of its own and made noisy FIRST; what comes
    afterwards knows the blurred photos and their kernels only. The sharp first photo is the truth
    of what it shows."""
    photos = sorted((PACK / "multiview" / "sceaux_castle").glob("*.JPG"))[:5]
    found = []
    for by, blur in ((6, "mixed"), (6, "motion"), (3, "mixed")):
        folder = Path(tempfile.mkdtemp())
        for k, path in enumerate(photos):
            sharp = torch.nn.functional.avg_pool2d(read_image(path, "grey"), by)
            take_photo(folder, k, sharp, client_kernel(blur, k, "fspecial", 0))  # type: ignore[arg-type]
        found.append({"by": by, "blur": blur, **restored_from(folder)})
    return found


RIM = 20  # a photo is blurred from beyond its edges


def take_photo(folder: Path, k: int, sharp: Tensor, kernel: Tensor, noise: float = 1.0) -> None:
    """Blurred, noisy, rounded to eight bits, without what a circular blur brought over the edge."""
    rng = torch.Generator().manual_seed(k)
    seen = circular_blur(sharp, kernel) + noise * torch.randn(sharp.shape, generator=rng)
    (folder / f"view{k}").mkdir()
    inner = (slice(None), slice(RIM, -RIM), slice(RIM, -RIM))
    Image.fromarray(to_uint8(seen[inner] / 255)).save(folder / f"view{k}" / "observation.png")
    np.save(folder / f"view{k}" / "kernel.npy", kernel.numpy())
    if k == 0:
        Image.fromarray(to_uint8(sharp[inner] / 255)).save(folder / "truth.png")


def restored_from(folder: Path, **keys: Any) -> dict[str, Any]:
    """What the photos are worth alone, and together."""
    source = Scene(scene=str(folder), align=True, **keys)
    federation = source.federation(source.default_clients(), 0)
    task = Deblurring()
    algorithm = FedDeblur(task, still=0.05, relax=1.6).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 300)
    counted = [round(float(h["scene"].weight().mean()), 3) for h in federation.holdings]
    together = task.evaluate(algorithm.result(state), federation.test)
    scores = {**task.references(None, federation.test), "together": together}
    return {
        "size": list(federation.test["scene"].shape[-2:]),  # type: ignore[index]
        "scores": {what: {m: round(v, 4) for m, v in s.items()} for what, s in scores.items()},
        "confidence": counted,
        "rounds": state.round + 1,
        "notes": list(federation.facts.notes),
    }


def kernels() -> list[dict[str, Any]]:
    """Four photos from one place, their kernels known, taken from a sharp reference, or found in
    each photo alone. A kernel found blindly is known up to a shift, so all scores are taken after
    the restored scene was laid over the truth (a translation, sub-pixel)."""
    blurs_of = [motion(9, 30), disk(3), gaussian(9, 1.5), shake(13, np.random.default_rng(0))]
    found = []
    for name in ("woman", "zebra"):
        sharp = read_image(PACK / "classic" / "color" / f"{name}.png", "grey")
        sharp = resize(sharp, 256)
        for way in ("known", "reference", "blind"):
            folder = Path(tempfile.mkdtemp())
            for k, kernel in enumerate(blurs_of):
                take_photo(folder, k, sharp, kernel)
                if way != "known":
                    (folder / f"view{k}" / "kernel.npy").unlink()
            if way == "reference":
                Image.open(folder / "truth.png").save(folder / "reference.png")
            found.append({"image": name, "kernels": way, **laid_over(folder, sharp)})
    return found


def laid_over(folder: Path, sharp: Tensor) -> dict[str, Any]:
    began = time.perf_counter()
    federation = Scene(scene=str(folder), align=True, kernel_size=13).federation(4, 0)
    seconds = time.perf_counter() - began
    algorithm = FedDeblur(Deblurring(), still=0.05, relax=1.6).given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        state = run(algorithm, engine, 300)
    truth = sharp[:, RIM:-RIM, RIM:-RIM]
    views = [h["scene"] for h in federation.holdings]
    best = best_view(views, federation.facts.pad, federation.facts.noise or 1.0)
    assert best is not None
    shown = {
        "photo": best.photo,
        "alone": best.restored,
        "together": algorithm.result(state)["scene"],
    }
    return {
        **{what: round(shifted_psnr(x.clamp(0, 255), truth), 2) for what, x in shown.items()},
        "seconds_to_prepare": round(seconds, 1),
    }


def shifted_psnr(image: Tensor, truth: Tensor) -> float:
    """After the best translation, away from the edges."""
    import cv2

    a, b = truth[0].numpy(), np.ascontiguousarray(image[0].float().numpy())
    stop = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 200, 1e-7)
    start = np.eye(2, 3, dtype=np.float32)
    _, by = cv2.findTransformECC(a, b, start, cv2.MOTION_TRANSLATION, stop, None, 5)
    size = (a.shape[1], a.shape[0])
    over = cv2.warpAffine(b, by, size, flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP)
    inner = (slice(8, -8), slice(8, -8))
    return psnr(torch.from_numpy(over[inner])[None], torch.from_numpy(a[inner])[None])


def varying() -> list[dict[str, Any]]:
    """Three cameras that rotate while they take *woman*: each photo is a mean of turned pictures,
    no kernel is involved. Restored with the grid of motions that the rotation is, and with its
    mean."""
    sharp = resize(read_image(PACK / "classic" / "color" / "woman.png", "grey"), 256)
    folder = Path(tempfile.mkdtemp())
    for k, about in enumerate(((127.5, 127.5), (60.0, 200.0), (230.0, 30.0))):
        (folder / f"view{k}").mkdir()
        seen = turned(sharp[0].double().numpy(), 5.0, about)
        seen = seen + np.random.default_rng(k).normal(size=seen.shape)
        photo = torch.from_numpy(seen)[None, RIM:-RIM, RIM:-RIM]
        Image.fromarray(to_uint8(photo / 255)).save(folder / f"view{k}" / "observation.png")
        said = motions_of(5.0, about, 256 - 2 * RIM, 7)
        (folder / f"view{k}" / "kernel.json").write_text(json.dumps(said))
    Image.fromarray(to_uint8(sharp[:, RIM:-RIM, RIM:-RIM] / 255)).save(folder / "truth.png")
    federation = Scene(scene=str(folder)).federation(3, 0)
    mean = [{"scene": replace(h["scene"], grid=None)} for h in federation.holdings]
    task, found = Deblurring(), []
    for what, holdings in (("mean kernel", mean), ("grid", federation.holdings)):
        here = Federation(holdings, test=federation.test, facts=federation.facts)
        algorithm = FedDeblur(task, relax=1.6, tol=0.0).given(here.facts)
        began = time.perf_counter()
        with Simulator(algorithm, here, workers=0) as engine:
            state = run(algorithm, engine, 60)
        scores = task.evaluate(algorithm.result(state), federation.test)
        seconds = round(time.perf_counter() - began, 1)
        found.append({"kernels": what, **scores, "rounds": 60, "seconds": seconds})
    photos = [h["scene"].pixels for h in federation.holdings]
    best = max(psnr(p, federation.test["scene"]) for p in photos)  # type: ignore[index]
    return [{"kernels": "best photo", "psnr": best}, *found]


def turned(sharp: np.ndarray, degrees: float, about: tuple[float, float]) -> np.ndarray:
    """The mean of what a camera sees that rotates by so much about a pixel."""
    from scipy.ndimage import affine_transform

    total, middle = np.zeros_like(sharp), np.array(about)
    angles = np.radians(np.linspace(-degrees / 2, degrees / 2, 41))
    for a in angles:
        turn = np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        total += affine_transform(sharp, turn, middle - turn @ middle, order=3, mode="mirror")
    return np.asarray(total / len(angles))


def motions_of(
    degrees: float, about: tuple[float, float], side: int, count: int
) -> list[list[dict[str, dict[str, float]]]]:
    """kernel.json of that camera: at each place of a grid over the photo, which begins at RIM, the
    arc that a point takes there."""
    spots = [(i + 0.5) * side / count - 0.5 + RIM for i in range(count)]
    return [[_arc(r - about[0], c - about[1], degrees) for c in spots] for r in spots]


def _arc(down: float, right: float, degrees: float) -> dict[str, dict[str, float]]:
    length = 1 + math.hypot(down, right) * math.radians(degrees)
    return {"motion": {"length": length, "angle": math.degrees(math.atan2(-right, -down)) % 360}}


def acceleration() -> list[dict[str, Any]]:
    """Rounds until PSNR stays within so many dB of the end of the published run: as published, with
    over-relaxation alone, with its rho alone, and with both. Camera man, 96 x 96."""
    found = []
    for views, clients, rounds in (
        ("complete", 10, 120),
        ("complete", 5, 120),
        ("complete", 3, 120),
        ("partial", 9, 240),
    ):
        federation = Scene(size=96, observe=views).federation(clients, 0)  # type: ignore[arg-type]
        first = FedDeblur().given(federation.facts)
        quick = FedDeblur(relax=1.6).given(federation.facts)
        end = None
        for relax, rho in ((1.0, first.rho), (1.6, first.rho), (1.0, quick.rho), (1.6, quick.rho)):
            curve = scored(
                FedDeblur(Deblurring(), tol=0.0, relax=relax, rho=rho), federation, rounds
            )
            end = curve[-1] if end is None else end
            within = {str(d): reached(curve, end - d) for d in (0.2, 0.05, 0.01)}
            row = {"views": views, "clients": clients, "relax": relax, "rho": rho}
            found.append({**row, "end": round(curve[-1], 3), "within": within})
    return found


def scored(algorithm: FedDeblur, federation: Any, rounds: int) -> list[float]:
    """PSNR after every round."""
    curve: list[float] = []
    algorithm = algorithm.given(federation.facts)
    with Simulator(algorithm, federation, workers=0) as engine:
        run(
            algorithm,
            engine,
            rounds,
            test=federation.test,
            evaluate_every=1,
            after_round=lambda p, r: curve.append(r.metrics["psnr"]),
        )
    return curve


def reached(curve: list[float], level: float) -> int | None:
    """The first round from which on the curve stays at or above a level."""
    below = [k for k, value in enumerate(curve, 1) if value < level]
    last = below[-1] if below else 0
    return last + 1 if last < len(curve) else None


def denoiser() -> dict[str, dict[str, dict[str, float]]]:
    blurs.MOTION = tuple((max(5, length // 2), angle) for length, angle in blurs.MOTION)  # type: ignore[assignment]
    theirs = {"sigma": 25.0, "rho": 0.02, "decay": 0.97}
    ways: dict[str, tuple[type[FedDeblur], dict[str, Any], int]] = {
        **{
            f"eq5-{e}-{r}": (FedDeblur, {"eta": e, "rho": r, "split": False}, 125)
            for e, r in ((1.1, 0.005), (0.3, 0.03), (0.25, 0.001))
        },
        "decay": (FedDeblur, {**theirs, "split": False}, 125),
        "masks": (FedDeblur, {**theirs, "masks": True}, 125),
        **{
            f"split-{e}-{r}": (FedDeblur, {"eta": e, "rho": r}, 125)
            for e, r in ((0.25, 0.005), (0.25, 0.02), (0.6, 0.02))
        },
        **{
            f"cen-{e}-{r}": (CenDeblur, {"eta": e, "rho": r}, 125)
            for e, r in ((0.25, 0.005), (0.25, 0.045))
        },
        "tv": (FedDeblur, {"prior": "tv"}, 150),
    }
    return {
        name: {i: rounds_of(i, kind, keys, rounds) for i in ("woman", "zebra")}
        for name, (kind, keys, rounds) in ways.items()
    }


def rounds_of(
    image: str, kind: type[FedDeblur], keys: dict[str, Any], rounds: int
) -> dict[str, float]:
    """PSNR every 25 rounds."""
    path = str(PACK / "classic" / "color" / f"{image}.png")
    federation = Scene(
        image=path, colour="grey", size=128, kernels="authors", observe="partial"
    ).federation(9, 0)
    algorithm = kind(Deblurring(), **{"prior": "pnp", **keys}).given(federation.facts)
    curve: dict[str, float] = {}

    def after(_: Any, r: Any) -> None:
        if (r.number + 1) % 25 == 0:
            curve[str(r.number + 1)] = round(
                psnr(algorithm.result(r.state)[image].clamp(0, 255), federation.test[image]), 2
            )

    with Simulator(algorithm, federation, workers=0) as engine:
        run(algorithm, engine, rounds, after_round=after)
    return curve


def main() -> None:
    torch.set_num_threads(1)
    what = sys.argv[1]
    if what == "large":
        print(json.dumps(large(sys.argv[2], int(sys.argv[3]))))
        return
    began = time.perf_counter()
    found = {
        "privacy": privacy,
        "memory": memory,
        "views": views,
        "kernels": kernels,
        "varying": varying,
        "acceleration": acceleration,
        "denoiser": denoiser,
    }[what]()
    record("hand-held views" if what == "views" else what, found)
    print(json.dumps(found, indent=1), f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
