"""Weights from a file: safetensors, or a torch file read with weights_only. Nothing is ever unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A state dict; the usual wrappings ("params", "state_dict", a "module." prefix) are taken off."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}")
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        weights: dict[str, Tensor] = load_file(file)
        return weights
    found: Any = torch.load(file, map_location="cpu", weights_only=True)
    for key in ("params_ema", "params", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    return {n.removeprefix("module."): t for n, t in found.items()}


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Strict: names and shapes must agree, and the error says where they do not."""
    weights, own = read_weights(path), model.state_dict()
    if odd := sorted(weights.keys() ^ own.keys()):
        side = "missing in the file" if odd[0] in own else "unknown to the model"
        raise ValueError(f"{path} does not fit {type(model).__name__}: {odd[0]} is {side} ({len(odd)} names differ)")
    for name, t in weights.items():
        if t.shape != own[name].shape:
            raise ValueError(f"{path} does not fit {type(model).__name__}: {name} is {tuple(t.shape)}, expected {tuple(own[name].shape)}")
    model.load_state_dict(weights)
    return model
