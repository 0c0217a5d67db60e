"""Own code by name: where it is looked for, what a site imports, what installed packages offer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedlens.config import recipe as recipes
from fedlens.config.parts import exported_names, find_class
from fedlens.config.recipe import ConfigError
from fedlens.core import imports
from fedlens.core.imports import (
    OwnCodeError,
    import_only,
    load_reference,
    plugins,
    reference_to,
    search_in,
)

LAYER = """
from dataclasses import dataclass
from fedlens import Layer

@dataclass
class Mine(Layer):
    strength: float = 1.0
    where = {where!r}
"""
RECIPE = """
[task]
name = "fedlens.testing:SmallTask"
[data]
name = "Synthetic"
[[algorithm]]
name = "FedAvg"
[[algorithm]]
name = "own_layer:Mine"
strength = 2.0
"""


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    plugins.cache_clear()
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, where: str) -> Path:
    folder.mkdir()
    (folder / "own_layer.py").write_text(LAYER.format(where=where))
    (folder / "mine.toml").write_text(RECIPE)
    return folder


def test_the_recipes_folder_goes_first_then_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three folders with a module of the same name: the recipe's own counts each time, also after
    another one was loaded, and without any recipe the working directory's."""
    first, second, here = (write(tmp_path / n, n) for n in ("first", "second", "here"))
    monkeypatch.chdir(here)
    assert load_reference("own_layer:Mine").where == "here"
    for folder in (first, second, first):
        made = recipes.read(folder / "mine.toml").algorithm[1]
        assert (made.cls.where, made.build().strength) == (folder.name, 2.0)


def test_a_run_folder_remembers_where_the_recipe_was(tmp_path: Path) -> None:
    """And says so; but nothing is looked for there before its user has named the file."""
    config = recipes.read(write(tmp_path / "a", "a") / "mine.toml")
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config.to_toml(with_folders=True))
    imports._folders.clear()
    sys.path[:] = [p for p in sys.path if p != str(tmp_path / "a")]
    del sys.modules["own_layer"]
    imports.set_rules(imports.Rules())
    imports.allow(["fedlens.testing"])
    with pytest.raises(ConfigError, match=f"--module {tmp_path}/a/own_layer.py"):
        recipes.read(run)
    imports.allow([f"{tmp_path}/a/own_layer.py"])
    again = recipes.read(run)
    assert again.algorithm[1].cls.where == "a" and again.folders == (str(tmp_path / "a"),)
    assert "folders" not in config.to_toml()  # what travels to a site
    assert not config.difference(again.tables())


def test_who_named_a_module_may_read_run_folders_that_name_it(tmp_path: Path) -> None:
    """In a recipe, in an argument, as an object; what was never named is refused, also after the
    folder was read, and also where it is only reached through another module."""
    config = recipes.read(write(tmp_path / "a", "a") / "mine.toml")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config.to_toml(with_folders=True))
    assert recipes.read(run).algorithm[1].cls.where == "a"
    for reference in ("antigravity:x", "own_layer_too:Mine", "os:system"):
        with pytest.raises(OwnCodeError, match=r"is not imported: .* --module"):
            load_reference(reference)
    with pytest.raises(OwnCodeError, match="is a module of its own"):
        load_reference("fedlens.testing:torch.nn.Linear")
    assert "antigravity" not in sys.modules
    assert recipes.read("demo", ["task.model=torch.nn:Linear"])
    assert load_reference("torch.nn:Linear") is torch.nn.Linear
    assert imports.describe_given(torch.optim.SGD) == "torch.optim.sgd:SGD"
    assert load_reference("torch.optim.sgd:SGD") is torch.optim.SGD


def test_a_site_imports_what_its_operator_listed_and_nothing_else(tmp_path: Path) -> None:
    """What a server could send: a function of the standard library that runs a command."""
    search_in(write(tmp_path / "a", "a"))
    import_only(["fedlens.testing:SmallTask", " "])
    with pytest.raises(OwnCodeError, match="has not listed the module own_layer"):
        load_reference("own_layer:Mine")
    with pytest.raises(ConfigError, match="has not listed the module os"):
        find_class("task", "os:system", "task")
    assert "own_layer" not in sys.modules
    assert load_reference("fedlens.testing:SmallTask")
    import_only(["own_layer"])
    assert load_reference("own_layer:Mine")
    with pytest.raises(OwnCodeError, match="not listed"):
        load_reference("own_layer_too:Mine")
    import_only([])
    with pytest.raises(OwnCodeError, match="not listed"):
        load_reference("own_layer:Mine")


@pytest.mark.parametrize(
    ("text", "reference", "says"),
    [
        ("", "nowhere:Thing", "there is no module nowhere in .*nor among the installed packages"),
        ("x = 1", "broken:Thing", "broken.py has no Thing"),
        ("def f(:", "broken:Thing", r"broken raises SyntaxError: [^,]*\(broken.py, line 1\)$"),
        ("import not_there_at_all", "broken:Thing", "it needs not_there_at_all"),
        ("raise RuntimeError('no')", "broken:Thing", "broken raises RuntimeError: no"),
        ("", "broken:", "is no reference: write module:Class"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(
    tmp_path: Path, text: str, reference: str, says: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    search_in(tmp_path)
    with pytest.raises(OwnCodeError, match=says) as e:
        load_reference(reference)
    assert "\n" not in str(e.value)


def test_installed_packages_offer_parts(tmp_path: Path) -> None:
    """A distribution as pip would leave it: found by its plain name, in any case, and listed."""
    write(tmp_path / "site", "plugin")
    info = tmp_path / "site" / "own_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-things\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedlens.layers]\nMine = own_layer:Mine\nBroken = own_layer:Nothing\n"
    )
    sys.path.insert(0, str(tmp_path / "site"))
    plugins.cache_clear()
    assert exported_names("algorithm")["Mine"] == "entry points layers"
    assert find_class("algorithm", "mine", "algorithm").where == "plugin"
    assert recipes.algorithm_tables("mine") == [{"name": "FedAvg"}, {"name": "Mine"}]
    with pytest.raises(ConfigError, match="Broken of the package own-things cannot be loaded"):
        find_class("algorithm", "Broken", "algorithm")
    import_only(["elsewhere"])
    with pytest.raises(ConfigError, match="not listed the module own_layer"):
        find_class("algorithm", "mine", "algorithm")


def test_what_another_process_finds_again() -> None:
    class Local:
        pass

    assert reference_to(torch.nn.functional.cross_entropy) == ("torch.nn.functional:cross_entropy")
    assert load_reference("torch.nn.functional:cross_entropy") is (
        torch.nn.functional.cross_entropy
    )
    assert reference_to(torch.nn.Linear) == "torch.nn.modules.linear:Linear"
    assert reference_to(lambda x: x) is None and reference_to(Local) is None
    assert reference_to(torch.nn.Linear(1, 1)) is None
