"""Run folders made by hand, as real ones are: for tests, the benchmark of the report, and to look
at.
"""

from __future__ import annotations

import io
import json
import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CONFIG = """[task]
name = "Classification"
model = "ResNet8"

[data]
name = "Cifar10"
partition = "dirichlet"
alpha = {alpha}

[federation]
clients = {clients}
cohort = {cohort}
rounds = {planned}
seed = {seed}

[[algorithm]]
name = "FedAvg"
lr = 0.1

[[algorithm]]
name = "{layer}"
"""


def write_run(
    folder: Path,
    rounds: int = 40,
    clients: int = 20,
    cohort: int = 12,
    seed: int = 0,
    planned: int | None = None,
    layer: str = "LossAware",
    gain: float = 0.0,
    pictures: bool = True,
    finished: bool = True,
) -> Path:
    """A finished run of `rounds` rounds, or one that has got so far of `planned`."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(
        alpha=0.3, clients=clients, cohort=cohort, planned=planned or rounds, seed=seed, layer=layer
    )
    (folder / "config.toml").write_text(text)
    labels = np.random.default_rng(seed).dirichlet([0.3] * 10, clients)
    counts = np.round(
        labels * np.random.default_rng(seed + 1).integers(80, 400, (clients, 1))
    ).astype(int)
    facts = {"labels": counts.tolist(), "classes": CLASSES, "sizes": counts.sum(1).tolist()}
    (folder / "federation.json").write_text(json.dumps(facts))
    lines = [round_line(k, rng, counts, cohort, gain) for k in range(rounds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if pictures:
        write_pictures(
            folder / "pictures", quality=min(1.0, 0.4 + 0.6 * rounds / (planned or rounds)) + gain
        )
    if finished:
        last = next((line["metrics"] for line in reversed(lines) if line["metrics"]), {})
        (folder / "summary.json").write_text(
            json.dumps(
                {
                    "metrics": last,
                    "seconds": sum(line["seconds"] for line in lines),
                    "peak_memory": 1_234_567_890,
                    "rounds": rounds,
                    "bytes_down": sum(line["bytes_down"] for line in lines),
                    "bytes_up": sum(line["bytes_up"] for line in lines),
                    "device": "cpu",
                    "seed": seed,
                    "versions": {"fedlens": "0.1.0", "torch": "2.9.0", "python": "3.11"},
                    "command": f"fedlens run classify --algorithm {layer} seed={seed}",
                }
            )
        )
    return folder


def round_line(
    number: int, rng: random.Random, counts: Any, cohort: int, gain: float = 0.0
) -> dict[str, Any]:
    clients = len(counts)
    asked = sorted(rng.sample(range(clients), min(cohort, clients)))
    lost = [i for i in asked if rng.random() < (0.5 if i % 7 == 3 else 0.04)]
    progress = 1 - math.exp(-(number + 1) / 18)
    heard = {}
    for i in asked:
        if i not in lost:
            loss = 2.3 - (1.75 + gain) * progress + 0.12 * rng.gauss(0, 1) + 0.02 * (i % 5)
            heard[str(i)] = {
                "loss": max(0.02, loss),
                "examples": int(counts[i].sum()),
                "weight": float(counts[i].sum()) / max(0.3, loss),
            }
    metrics = {}
    if number % 2 == 1 or number == 0:
        accuracy = 0.1 + (0.68 + gain) * progress + 0.008 * rng.gauss(0, 1)
        metrics = {
            "accuracy": accuracy,
            "loss": 2.3 - 1.6 * progress,
            "client_accuracy": accuracy - 0.03,
            "client_accuracy_spread": 0.06,
            "client_accuracy_worst": accuracy - 0.17 + 0.02 * rng.random(),
        }
    losses = [f["loss"] for f in heard.values()]
    return {
        "round": number,
        "seconds": 1.9 + 0.3 * rng.random() + (1.5 if number == 0 else 0),
        "loss": sum(losses) / len(losses) if losses else None,
        "metrics": metrics,
        "bytes_down": 313_000 * len(asked),
        "bytes_up": 313_400 * len(heard),
        "asked": len(asked),
        "heard": len(heard),
        "refused": 0,
        "lost": [
            {
                "client": i,
                "reason": "no reply within 30 s" if i % 7 == 3 else "worker killed (signal 9)",
            }
            for i in lost
        ],
        "clients": heard,
    }


def scene(size: int = 256, shift: float = 0.0) -> np.ndarray[Any, Any]:
    """Something with edges, texture and smooth parts, in [0, 1]."""
    y, x = np.mgrid[0:size, 0:size] / size
    x = x - shift
    image = np.stack(
        [0.55 + 0.35 * np.sin(3 * x + y), 0.5 + 0.3 * np.cos(4 * y - x), 0.62 - 0.25 * y], -1
    )
    for cx, cy, r, tone in [
        (0.3, 0.36, 0.17, (0.93, 0.55, 0.2)),
        (0.68, 0.62, 0.22, (0.12, 0.3, 0.5)),
        (0.74, 0.2, 0.08, (0.95, 0.92, 0.8)),
    ]:
        image[((x - cx) ** 2 + (y - cy) ** 2) < r * r] = tone
    bars = ((np.floor(x * 46) % 2) == 0) & (y > 0.78) & (y < 0.92)
    image[bars] = 0.08
    image += 0.05 * np.sin(90 * x * (1 + y))[..., None] * (y < 0.25)[..., None]
    return np.clip(image, 0, 1)


def blur(image: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    for axis in (0, 1):
        image = sum(np.roll(image, k, axis) for k in range(-width, width + 1)) / (2 * width + 1)
    return image


def write_pictures(folder: Path, quality: float = 1.0) -> None:
    """One of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in encoded(quality).items():
        (folder / name).write_bytes(raw)


@lru_cache
def encoded(quality: float) -> dict[str, bytes]:
    """The files of a pictures folder, the index last. Drawing takes longer than all the rest of a
    run folder.
    """
    noise = np.random.default_rng(3)
    sharp, psnr = scene(), lambda a, b: float(-10 * np.log10(np.mean((a - b) ** 2)))
    blurred = np.clip(blur(sharp, 4) + 0.02 * noise.standard_normal(sharp.shape), 0, 1)
    restored = np.clip(
        sharp * quality
        + blur(sharp, 2) * (1 - quality)
        + 0.008 * noise.standard_normal(sharp.shape),
        0,
        1,
    )
    frames = [scene(160, 0.006 * k + 0.003 * (k % 2)) for k in range(12)]
    tiles = [scene(32, 0.1 * k) for k in range(12)]
    y, x = np.mgrid[0:64, 0:64] / 63
    signed = np.sin(6 * x) * (y - 0.3)
    entries = [
        (
            "Restored scene",
            "compare",
            [blurred, restored, sharp],
            ["client 0, blurred", "restored", "sharp"],
            {"psnr": psnr(restored, sharp), "psnr_blurred": psnr(blurred, sharp)},
            None,
        ),
        (
            "Video, four times finer",
            "strip",
            frames,
            [f"frame {k}" for k in range(12)],
            {"psnr": 29.4},
            None,
        ),
        (
            "Nearest neighbours",
            "sheet",
            tiles,
            ["query: climb"] + [f"{k}. {'climb' if k % 3 else 'run'}" for k in range(1, 12)],
            {"recall_at_5": 0.61},
            None,
        ),
        (
            "Field of view of client 2",
            "map",
            [(signed - signed.min()) / (signed.max() - signed.min())],
            ["weight"],
            {},
            [[float(signed.min()), float(signed.max())]],
        ),
        ("Attention", "map", [x * y], [], {}, None),
        ("What the generator draws", "image", [scene(128, 0.3)], ["generated"], {}, None),
    ]
    index, out = [], {}
    for k, (caption, kind, images, labels, facts, ranges) in enumerate(entries):
        files = [f"{k:02d}-{j:02d}.png" for j in range(len(images))]
        for name, pixels in zip(files, images):
            raw = io.BytesIO()
            Image.fromarray((np.clip(pixels, 0, 1) * 255).round().astype(np.uint8)).save(raw, "PNG")
            out[name] = raw.getvalue()
        entry = {"caption": caption, "kind": kind, "files": files, "labels": labels, "facts": facts}
        index.append(entry | ({"ranges": ranges} if ranges else {}))
    return out | {"index.json": json.dumps(index).encode()}
