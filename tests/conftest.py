"""Shared by all tests: one thread per test process, and where real data lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedlens.core import imports

torch.set_num_threads(1)

# The library looks for data only where it is told to; the tests are told here.
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
if BESIDE.is_dir():
    os.environ.setdefault("FEDLENS_DATA", str(BESIDE))


@pytest.fixture(scope="session")
def data_pack() -> Path:
    """The folder of real images and videos; tests that need it skip where it is absent."""
    folder = os.environ.get("FEDLENS_DATA")
    if not folder or not (Path(folder) / "README.md").is_file():
        pytest.skip("the data pack is not here (set FEDLENS_DATA)")
    return Path(folder)


@pytest.fixture(autouse=True)
def import_rules() -> Iterator[None]:
    """Which modules may be imported by name is a matter of a whole process; here, of one test."""
    before, folders, mentioned = imports.rules(), [*imports._folders], [*imports._mentioned]
    yield
    imports.set_rules(before)
    imports._folders[:], imports._mentioned[:] = folders, mentioned
