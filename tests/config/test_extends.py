"""`extends`: what a recipe says of its own goes over what its base says, and the sentence for what
cannot be meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_job import RECIPE, write_recipe

from fedlens.config.files import load_tables
from fedlens.config.inherit import extend
from fedlens.config.recipe import ConfigError, from_tables, read


def tables_of(folder: Path, text: str) -> dict[str, Any]:
    """A recipe that extends the toy one, which stands beside it."""
    write_recipe(folder)
    path = folder / "own.toml"
    path.write_text('extends = "toy.toml"\n' + text)
    return load_tables(path)


def test_tables_merge_key_by_key(tmp_path: Path) -> None:
    """The toy has 6 clients and 4 rounds, FedAvg with lr 0.1 and batch 8, then Scaffold."""
    made = tables_of(tmp_path, "[federation]\nrounds = 9\n[task]\npause = 1.0\n")
    assert made["federation"] == {"clients": 6, "rounds": 9, "workers": 0}
    assert made["task"] == {"name": "toy_job:Slow", "pause": 1.0}
    assert made["algorithm"] == [
        {"name": "FedAvg", "lr": 0.1, "batch": 8},
        {"name": "Scaffold"},
    ]
    assert "extends" not in made


def test_a_part_of_the_bases_name_changes_in_place_and_a_new_one_comes_last(tmp_path: Path) -> None:
    text = '[[algorithm]]\nname = "Median"\n[[algorithm]]\nname = "fedavg"\nlr = 0.5\n'
    assert tables_of(tmp_path, text)["algorithm"] == [
        {"name": "fedavg", "lr": 0.5, "batch": 8},
        {"name": "Scaffold"},
        {"name": "Median"},
    ]


def test_a_stack_names_the_parts_and_their_order(tmp_path: Path) -> None:
    """Kept parts keep their keys, others begin without any."""
    text = 'stack = ["FedAvg", "FedProx", "Median"]\n[[algorithm]]\nname = "FedProx"\nmu = 0.3\n'
    assert tables_of(tmp_path, text)["algorithm"] == [
        {"name": "FedAvg", "lr": 0.1, "batch": 8},
        {"name": "FedProx", "mu": 0.3},
        {"name": "Median"},
    ]


def test_parts_of_one_name_are_taken_in_order() -> None:
    base = {
        "algorithm": [
            {"name": "FedAvg"},
            {"name": "FedProx", "mu": 1.0},
            {"name": "FedProx", "mu": 2.0},
        ]
    }
    own = [{"name": "FedProx"}, {"name": "FedProx", "mu": 3.0}]
    assert extend(base, {"algorithm": own})["algorithm"] == [
        {"name": "FedAvg"},
        {"name": "FedProx", "mu": 1.0},
        {"name": "FedProx", "mu": 3.0},
    ]
    names = ["FedAvg", "FedProx", "FedProx"]
    assert extend(base, {"stack": names})["algorithm"] == base["algorithm"]


def test_another_class_takes_over_the_keys_it_knows() -> None:
    base = {"data": {"name": "Synthetic", "images": 100, "alpha": 0.1}}
    assert extend(base, {"data": {"name": "Cifar10", "root": "x"}})["data"] == {
        "name": "Cifar10",
        "alpha": 0.1,
        "root": "x",
    }


def test_a_table_within_merges_unless_it_names_another_class() -> None:
    generator = {"name": "Gaussians", "root": "x", "components": 8}
    base = {"algorithm": [{"name": "Balance", "period": 5, "generator": generator}]}

    def merged(**own: Any) -> Any:
        return extend(base, {"algorithm": [{"name": "Balance", "generator": own}]})["algorithm"][0]

    assert merged(root="y") == {
        "name": "Balance",
        "period": 5,
        "generator": {"name": "Gaussians", "root": "y", "components": 8},
    }
    assert merged(name="ReadyImages", root="y")["generator"] == {"name": "ReadyImages", "root": "y"}


def test_about_is_of_one_file_only(tmp_path: Path) -> None:
    base = {"about": "the base"}
    assert "about" not in extend(base, {}) and extend(base, {"about": "own"})["about"] == "own"


def test_a_chain_a_shipped_base_and_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "first.toml").write_text('extends = "demo"\n[federation]\nrounds = 3\n')
    second = tmp_path / "deep" / "second.toml"
    second.write_text('extends = "../first.toml"\n[federation]\ncohort = 2\n')
    made = read(second)
    assert (made.name, made.settings.rounds, made.settings.cohort) == ("second", 3, 2)
    assert made.settings.clients == read("demo").settings.clients
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(made.to_toml())
    assert "extends" not in made.to_toml()
    third = tmp_path / "third.toml"
    third.write_text('extends = "./run"\n[federation]\nseed = 1\n')
    assert (read(third).settings.cohort, read(third).settings.seed) == (2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "fedvs"', "extends 'fedvs', but there is no recipe 'fedvs': did you mean"),
        ('extends = "no.toml"', "extends 'no.toml', but there is no recipe file"),
        ("extends = 3", "extends must be the name of a recipe or a path, not 3"),
        ('extends = "own.toml"', "extends itself in the end: "),
        ('extends = "toy.toml"\ntask = 3', "[task] must be a table"),
        ('extends = "toy.toml"\n[data]\nname = 3', "the name of [data] must be a text"),
        ('extends = "toy.toml"\n[task]\nname = "Clasification"', "there is no task"),
        ('extends = "toy.toml"\n[algorithm]\nname = "FedAvg"', "must be [[algorithm]] tables"),
        ('extends = "toy.toml"\n[[algorithm]]\nlr = 1.0', "table needs a name"),
        ('extends = "toy.toml"\nstack = "FedAvg"', "stack must be a list of names"),
        ('extends = "toy.toml"\nstack = []', "stack must be a list of names"),
        ('extends = "toy.toml"\nstack = ["FedAgv"]', "did you mean FedAvg?"),
        (
            'extends = "toy.toml"\nstack = ["FedAvg"]\n[[algorithm]]\nname = "Scaffold"',
            "Scaffold is not in its stack",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_file(
    tmp_path: Path, text: str, words: str
) -> None:
    write_recipe(tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        read(path)
    assert words in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_base_that_cannot_be_meant_is_named(tmp_path: Path) -> None:
    base = write_recipe(tmp_path, "task = 3\n" + RECIPE.replace("[task]", "[other]"))
    own = tmp_path / "own.toml"
    own.write_text('extends = "toy.toml"\n[task]\nlevel = 1\n')
    with pytest.raises(ConfigError, match=rf"^{base}: \[task\] must be a table$"):
        read(own)


def test_a_circle_is_told_with_the_way_round(tmp_path: Path) -> None:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('extends = "b.toml"')
    b.write_text('extends = "a.toml"')
    with pytest.raises(ConfigError, match=rf"{a} extends itself in the end: {a} -> {b} -> {a}"):
        read(a)


def test_only_a_file_extends(tmp_path: Path) -> None:
    """Tables from elsewhere, such as a study's, are whole; `stack` orders the parts of a base."""
    with pytest.raises(ConfigError, match="unknown table 'extends'"):
        from_tables({"extends": "demo"})
    with pytest.raises(ConfigError, match="unknown table 'stack'"):
        read(write_recipe(tmp_path, 'stack = ["FedAvg"]\n' + RECIPE))
