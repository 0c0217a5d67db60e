"""Figure 12 in small: are features of a classifier blind to resolution, and those of a segmenter
not?

python experiments/raf/figure12.py OUTPUT.png

The paper takes torchvision's trained ResNet-50 and FCN. Here both networks share one body (stick
figures at 64x48, the same number of steps): the classifier says whether the right wrist is above
the neck, the segmenter marks the figure. Features of 60 test figures at four resolutions are
averaged over the grid and embedded by t-SNE. The number beside the picture: how often the nearest
other point in feature space has the same resolution (a quarter by chance). Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from fedlens.core.picture import to_uint8
from fedlens.core.training import shuffled, train
from fedlens.data.images.masks import FigureMasks
from fedlens.data.images.tensors import Tensors
from fedlens.data.pose.stick_figures import StickFigures
from fedlens.metrics.embedding import scatter, tsne
from fedlens.models.segmentation import Dilated

RESOLUTIONS = ((32, 24), (48, 36), (64, 48), (128, 96))


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.out = body, nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]


def raised(count: int, first: int) -> torch.Tensor:
    source = StickFigures()
    joints = [source.draw(k).joints for k in range(first, first + count)]
    return torch.tensor([int(j[6, 1] < j[12, 1]) for j in joints])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = FigureMasks(flip=0)
    figures = source.drawn(0, 240).at((64, 48)).batch(torch.arange(240))
    tests = source.drawn(10**6, 60)
    whole = Tensors({**figures, "label": raised(240, 0)})
    out, pictures = {}, []
    for name in ("classification", "segmentation"):
        segmenter = Dilated()
        body = segmenter.body
        model = segmenter if name == "segmentation" else Classifier(body, 8)
        target = "y" if name == "segmentation" else "label"
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        batches = shuffled(whole, 12, torch.Generator().manual_seed(0), epochs=12)
        done = train(
            list(model.parameters()),
            batches,
            lambda b, m=model, t=target: (F.cross_entropy(m(b["x"]), b[t]), None),
            optimizer,
        )
        model.eval()
        with torch.no_grad():
            rows = [
                body(tests.at(size).batch(torch.arange(60))["x"]).mean((2, 3))
                for size in RESOLUTIONS
            ]
        features, groups = torch.cat(rows), torch.arange(len(RESOLUTIONS)).repeat_interleave(60)
        gaps = torch.cdist(features, features) + torch.diag(torch.full((len(features),), torch.inf))
        out[name] = {
            "same_resolution": round(
                100 * float((groups[gaps.argmin(1)] == groups).float().mean()), 1
            ),
            "loss": done.loss,
        }
        pictures.append(scatter(tsne(features), groups, [f"{h}x{w}" for h, w in RESOLUTIONS]))
    if len(sys.argv) > 1:
        Image.fromarray(to_uint8(torch.cat(pictures, 2))).save(sys.argv[1])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
