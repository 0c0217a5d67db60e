"""Weights from a file: safetensors, or a torch file read with weights_only. Nothing is ever
unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core.files import find_named


class Misfit(ValueError):
    """Weights of another network than the one they were to go into."""


def result_file(place: Path) -> Path:
    """Where the weights are: in a run's folder under their name, or in the file that was named."""
    return place if place.is_file() else place / "model.safetensors"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A state dict; the usual wrappings ("params", "state_dict", a "module." prefix) are taken
    off.
    """
    file = find_named(str(path))
    if file is None or not file.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    found = _load(file)
    for key in ("params_ema", "params", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{file} holds no weights: named arrays are needed")
    return {n.removeprefix("module."): t for n, t in found.items()}


def _load(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as e:  # of another file, torch's reader stumbles over whatever comes first
        raise ValueError(
            f"{file} cannot be read as weights: it is damaged, or no file of arrays by safetensors"
            " or torch"
        ) from e


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Strict: names and shapes must agree, and the error says where they do not."""
    model.load_state_dict(check_fit(read_weights(path), model, path))
    return model


def check_fit(
    weights: dict[str, Tensor], model: nn.Module, source: str | Path
) -> dict[str, Tensor]:
    """The weights, or an error that says what they are (where we know) and in which names and
    shapes they differ.
    """
    own = model.state_dict()
    odd = sorted(weights.keys() ^ own.keys())
    shapes = [n for n, t in weights.items() if n in own and t.shape != own[n].shape]
    if not odd and not shapes:
        return weights
    reasons = [
        f"{n} is {tuple(weights[n].shape)}, expected {tuple(own[n].shape)}" for n in shapes[:3]
    ]
    reasons += [f"{len(shapes) - 3} more shapes differ"] if len(shapes) > 3 else []
    if odd:
        side = "missing in the file" if odd[0] in own else "unknown to the model"
        reasons.append(f"{odd[0]} is {side} ({len(odd)} names differ)")
    # A network of a known family can say what these weights are.
    recognise = getattr(model, "recognise", lambda weights: None)
    theirs, ours = recognise(weights), recognise(own)
    if theirs and ours and theirs != ours:
        reasons.insert(0, f"the file holds {theirs}; the model is {ours}")
    raise Misfit(f"{source} does not fit {type(model).__name__}: " + "; ".join(reasons))
