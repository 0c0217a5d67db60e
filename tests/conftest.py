"""Shared by all tests: one thread per test process, and where the data pack lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_pack() -> Path:
    """The folder of real images and videos beside the project; tests that need it skip where it is
    absent.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FEDLENS_DATA", beside))
    if not (folder / "README.md").is_file():
        pytest.skip("the data pack is not here (set FEDLENS_DATA)")
    return folder
