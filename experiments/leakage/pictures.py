"""The pictures of docs/privacy.md: `python experiments/leakage/pictures.py`, a minute.

Columns are situations, rows from above: what the client has, what the server draws, the best that
somebody could show who has no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from run import CIFAR, scenes
from torch import Tensor

from fedlens.audit.attack import Attack, Comparison, Evidence
from fedlens.audit.audit import PLAIN, under
from fedlens.audit.evidence import replay
from fedlens.audit.feddeblur import CuriousDeblurring
from fedlens.audit.linear import LinearInversion
from fedlens.audit.protections import Protection
from fedlens.config import recipe as recipes
from fedlens.core.picture import to_uint8
from fedlens.runs.setup import make_setup

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
GAP = 6  # white pixels between pictures


def found(
    attack: Attack, recipe: str, overrides: dict[str, object], rounds: int, names: Sequence[str]
) -> list[Comparison]:
    """The first comparison of each of these situations, for the third client that was heard."""
    setup = make_setup(recipes.read(recipe, {**overrides, "seed": 0}))
    source = replay(setup, rounds)
    client = sorted(source.exchanges[0].replies)[2]
    evidence = Evidence(setup, source.exchanges, [client])
    known: dict[str, Protection] = {p.name: p for p in (PLAIN, *attack.protections)}
    return [attack.run(under(known[n], evidence, source)).comparisons[0] for n in names]


def save(columns: Sequence[Comparison], times: int, name: str) -> None:
    from PIL import Image

    rows = [[c.truth for c in columns], [c.guess for c in columns], [c.unrelated for c in columns]]
    sheet = torch.cat([_beside([x for x in row if x is not None], times) for row in rows], dim=1)
    Image.fromarray(to_uint8(sheet)).save(IMAGES / name, quality=88)


def _beside(images: Sequence[Tensor], times: int) -> Tensor:
    larger = [x.repeat_interleave(times, 1).repeat_interleave(times, 2) for x in images]
    wide = [x.expand(3, -1, -1) for x in larger]
    padded = [torch.nn.functional.pad(x, [0, GAP, 0, GAP], value=1.0) for x in wide]
    return torch.cat(padded, dim=2)


def main() -> None:
    torch.set_num_threads(1)
    situations = ["worst case", "larger batches", "clipping, noise 10 %", "clipping, noise 100 %"]
    linear = found(LinearInversion(), "cifar10", CIFAR, 1, [*situations, "SecureSum", "plain"])
    save(linear, 4, "audit-images.jpg")
    camera = scenes(["01"], False)[0]
    names = ["plain", "noise 1 %", "noise 10 %", "SecureSum"]
    save(found(CuriousDeblurring(), "deblur", camera.overrides, 12, names), 1, "audit-noise.jpg")


if __name__ == "__main__":
    main()
