"""Weights from files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedlens.core.weights import Misfit, load_weights, read_weights


@pytest.mark.parametrize("name", ["passwd", "notes.md", "w.pth", "w.safetensors"])
@pytest.mark.parametrize(
    "content",
    [b"", b"root:x:0:0:root:/root:/bin/bash\n", b"[task]\nname = 1\n", b"\x80\x02}q", bytes(64)],
    ids=["empty", "passwd", "toml", "half a pickle", "zeros"],
)
def test_a_file_that_is_something_else_is_one_sentence(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} cannot be read as weights") as e:
        read_weights(tmp_path / name)
    assert "\n" not in str(e.value)


def test_a_file_of_torch_without_names_holds_no_weights(tmp_path: Path) -> None:
    for found in (torch.zeros(3), [torch.zeros(3)], {"epoch": 3}):
        torch.save(found, tmp_path / "w.pth")
        with pytest.raises(ValueError, match=r"w.pth holds no weights"):
            read_weights(tmp_path / "w.pth")


def test_old_files_have_no_counters(tmp_path: Path) -> None:
    """BatchNorm's steps were not written down before torch 0.4; its statistics must be there."""
    made = torch.nn.BatchNorm2d(2)
    old = {n: t + 1.0 for n, t in made.state_dict().items() if n != "num_batches_tracked"}
    torch.save(old, tmp_path / "old.pth")
    loaded = load_weights(torch.nn.BatchNorm2d(2), tmp_path / "old.pth")
    assert loaded.running_mean.tolist() == [1.0, 1.0] and int(loaded.num_batches_tracked) == 0
    torch.save({n: t for n, t in old.items() if n != "running_var"}, tmp_path / "less.pth")
    with pytest.raises(Misfit, match=r"running_var is missing in the file \(1 names"):
        load_weights(torch.nn.BatchNorm2d(2), tmp_path / "less.pth")
