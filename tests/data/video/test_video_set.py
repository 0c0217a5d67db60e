from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.data.source import DataError
from fedlens.data.video.videos import Videos


def test_partitions(shelf: Path) -> None:
    found = Videos(
        root=str(shelf / "videos"), partition="classes", classes_per_client=1, test_share=0.0
    ).federation(3, 0)
    assert sorted(sum(n > 0 for n in row) for row in list(found.facts.labels)) == [1, 1, 1]
    even = Videos(root=str(shelf / "videos"), test_share=0.0, holdout=0.25).federation(3, 0)
    assert [len(h) for h in even.holdings] == [3, 3, 3] and [len(h) for h in even.held_out] == [
        1,
        1,
        1,
    ]
    with pytest.raises(DataError, match="6 groups cannot serve 7 clients"):
        Videos(root=str(shelf / "videos"), partition="sources", test_share=0.0).federation(7, 0)
