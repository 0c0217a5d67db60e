"""Every table and figure of the RAF paper is a recipe that builds: task, data source and stack,
without touching any data.
"""

from __future__ import annotations

import pytest

from fedlens.config import recipe as config
from fedlens.data.pose.datasets import PoseSource
from fedlens.layers import MultiResolution
from fedlens.tasks.pose import Pose

PAPER = [f"raf-table{k}" for k in (1, 2, 3)] + [f"raf-figure{k}" for k in (3, 6, 7, 8, 9, 10, 11)]


@pytest.mark.parametrize("name", ["raf", "raf-lspet", *PAPER])
def test_recipe_builds(name: str) -> None:
    recipe = config.read(name)
    task, source = recipe.build_task(), recipe.build_source()
    assert isinstance(task, Pose) and isinstance(source, PoseSource)
    assert source.skeleton_name == task.joints
    recipe.build_algorithm(task)
    for size in (*source.sizes, *task.sizes):
        task.check_size(size)


def test_rows_of_table_two() -> None:
    """fedlens compare raf-table2 --algorithms fedavg,fedprox,raf,raf-fedprox: the levels of the
    recipe's own layer carry over.
    """
    names = {}
    for algorithm in ("fedavg", "fedprox", "raf", "raf-fedprox"):
        recipe = config.read("raf-table2", algorithm=algorithm)
        built = recipe.build_algorithm(recipe.build_task())
        names[algorithm] = [type(p).__name__ for p in built.parts()]
        if algorithm.startswith("raf"):
            assert isinstance(built, MultiResolution) and built.sizes == (
                (256, 192),
                (192, 144),
                (128, 96),
            )
    assert names["raf-fedprox"] == ["FedAvg", "FedProx", "MultiResolution"] and names["fedavg"] == [
        "FedAvg"
    ]


def test_bad_sizes_are_refused_before_any_work() -> None:
    recipe = config.read("raf-table2", ["MultiResolution.sizes=[[256,192],[100,75]]"])
    with pytest.raises(
        ValueError, match="100x75 does not fit the model, whose inputs are multiples of 16"
    ):
        recipe.build_algorithm(recipe.build_task())
    with pytest.raises(ValueError, match="130x96 does not fit vitpose-s"):
        config.read("raf-table2", ["task.sizes=[[130,96]]"]).build_task()
