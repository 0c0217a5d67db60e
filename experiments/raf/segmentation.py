"""The same layer on another dense task: segmenting stick figures, all clients of high resolution,
judged at low ones (Figure 6's question).

python experiments/raf/segmentation.py

A small fully convolutional network; the layer is the one that pose uses, the task says only how
class maps are compared. Prints one JSON object: the intersection over union of the figure at each
resolution, plain and with distillation, for each seed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens import Batch, Data, Federation, Output, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.task import LearningTask
from fedlens.data.images.tensors import Tensors
from fedlens.data.pose.skeletons import SKELETONS
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.engines.simulator import Simulator
from fedlens.layers import MultiResolution

SIZES = ((64, 48), (48, 36), (32, 24))


@dataclass
class Segmentation(LearningTask):
    width: int = 8

    def model(self) -> nn.Module:
        w = self.width

        def block(a: int, b: int, dilation: int) -> list[nn.Module]:
            return [
                nn.Conv2d(a, b, 3, padding=dilation, dilation=dilation),
                nn.BatchNorm2d(b),
                nn.ReLU(),
            ]

        return nn.Sequential(*block(3, w, 1), *block(w, w, 2), *block(w, w, 4), nn.Conv2d(w, 2, 1))

    def loss(self, output: Output, batch: Batch) -> Tensor:
        return F.cross_entropy(output.prediction, batch["y"])

    def distance(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Kullback-Leibler divergence per pixel: the reduction of cross-entropy."""
        return (
            F.kl_div(prediction.log_softmax(1), target.softmax(1), reduction="none").sum(1).mean()
        )

    def evaluate(self, result: Any, data: Data) -> dict[str, float]:
        batch = data.batch(torch.arange(len(data)))
        found = result(batch["x"]).argmax(1) == 1
        return {
            "iou": (
                100 * float((found & (batch["y"] == 1)).sum() / (found | (batch["y"] == 1)).sum())
            )
        }


def figures(count: int, first: int, size: tuple[int, int]) -> Tensors:
    """Pictures and masks of the same figures, both reduced to `size`; a pixel is figure if half of
    it is.
    """
    source, pixels, masks = StickFigures(), [], []
    for k in range(first, first + count):
        person = source.draw(k)
        picture = Image.fromarray(person.image)  # type: ignore[arg-type]
        mask = Image.new("L", picture.size)
        pen = ImageDraw.Draw(mask)
        for a, b in SKELETONS["lsp"].bones:
            pen.line([*person.joints[a, :2], *person.joints[b, :2]], fill=255, width=6)
        pixels.append(np.asarray(picture.resize((size[1], size[0]), 2)))
        masks.append(np.asarray(mask.resize((size[1], size[0]), 2)) > 127)
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    return Tensors({"x": x, "y": torch.from_numpy(np.stack(masks)).long()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    tests = {f"{h}x{w}": figures(60, 10**6, (h, w)) for h, w in ((24, 20), *SIZES[::-1], (96, 72))}
    out: dict[str, list[dict[str, float]]] = {"plain": [], "raf": []}
    for seed in (int(s) for s in options.seeds.split(",")):
        federation = Federation([figures(40, 1000 * seed + 40 * k, SIZES[0]) for k in range(3)])
        for name, layers in (("plain", ()), ("raf", (MultiResolution(sizes=SIZES),))):
            task = Segmentation()
            algorithm = stack(
                FedAvg(task, lr=5e-3, optimizer="adamw", batch=10, seed=seed, schedule="cosine"),
                *layers,
            )
            with Simulator(algorithm, federation, workers=0) as engine:
                model = algorithm.result(run(algorithm, engine, options.rounds, seed=seed))
            with torch.no_grad():
                out[name].append(
                    {
                        size: round(task.evaluate(model, data)["iou"], 2)
                        for size, data in tests.items()
                    }
                )
    means = {
        name: {s: round(float(np.mean([c[s] for c in cells])), 2) for s in tests}
        for name, cells in out.items()
    }
    print(
        json.dumps(
            {
                "task": "segmentation",
                "metric": "IoU of the figure, %",
                "mean": means,
                "seeds": out,
                "seconds": time.perf_counter() - began,
            }
        )
    )


if __name__ == "__main__":
    main()
