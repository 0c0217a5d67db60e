"""How large an installation is: the table of install.md, measured where all extras are installed.

    python docs/sizes.py

The installed files of a package and of everything it needs are counted; of an extra, only what
comes on top of the installation without extras.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
PAGE = HERE / "install.md"
MARKS = ("<!-- sizes -->", "<!-- /sizes -->")
WHAT_FOR = {
    "deblur": "wavelet and denoiser priors, MATLAB kernels, aligning photos",
    "video": "reading and writing films",
    "pose": "COCO's average precision, LSP's files",
    "models": "timm's networks, weights from the Hugging Face hub",
    "generate": "Stable Diffusion as a generator of FBL",
    "flower": "real sites",
    "ray": "a Ray cluster as the engine",
    "board": "the live page over all runs",
    "hub": "datasets in Hugging Face's format",
    "export": "ONNX",
    "sweep": "Optuna in `fedlens sweep`",
    "privacy": "the epsilon of differential privacy",
    "figures": "figures for papers",
    "tensorboard": "its events in every run folder",
}


def needed(requirements: list[str]) -> set[str]:
    """These packages, and those that they need here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = wanted.name.lower().replace("_", "-")
        if name in found:
            continue
        try:
            its = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another system
        found.add(name)
        waiting += [r for r in map(Requirement, its) if applies(r, wanted.extras)]
    return found


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, ""))


def megabytes(names: set[str]) -> float:
    files = [f for name in names for f in distribution(name).files or []]
    return sum(f.size or 0 for f in files) / 1e6


def table() -> str:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    base = needed(project["dependencies"])
    cuda = {name for name in base if name.startswith(("nvidia-", "cuda-", "triton"))}
    rows = [
        f"| none | simulator, FedDeblur, classification, reports | {megabytes(base):.0f} |",
        f"| | of that, CUDA, which PyTorch brings on Linux | {megabytes(cuda):.0f} |",
    ]
    for extra, says in WHAT_FOR.items():
        more = needed(project["optional-dependencies"][extra]) - base
        rows.append(f"| `{extra}` | {says} | {megabytes(more):.0f} |")
    return "\n".join(["| extra | brings | MB |", "|---|---|---|", *rows])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}")
