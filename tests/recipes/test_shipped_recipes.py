"""Every shipped recipe can be run, has a name of its own, and says only what its base does not."""

from __future__ import annotations

from typing import Any

import pytest

from fedlens.cli.list import recipe_page
from fedlens.config import recipe as config
from fedlens.config.files import SHIPPED, chain, load_tables, shipped_recipes

NAMES = sorted(shipped_recipes())
VARIANTS = [name for name, path in shipped_recipes().items() if len(chain(path)) > 1]


def base_of(name: str) -> str:
    return chain(shipped_recipes()[name])[1][0].stem


def test_a_name_is_one_files() -> None:
    assert len(NAMES) == len(list(SHIPPED.rglob("*.toml")))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_becomes_a_stack(name: str) -> None:
    made = config.read(name)
    built = made.build_algorithm(made.build_task())
    assert [type(part).__name__ for part in built.parts()] == [p.name for p in made.algorithm]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_from_its_base(name: str) -> None:
    assert config.read(name).tables() != config.read(base_of(name)).tables()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_repeats_nothing(name: str) -> None:
    base = load_tables(shipped_recipes()[base_of(name)])
    own = chain(shipped_recipes()[name])[0][1]
    for table in ("task", "data", "federation"):
        assert not repeated(own.get(table, {}), base.get(table, {}))
    parts = {part["name"]: part for part in base["algorithm"]}
    assert len(parts) == len(base["algorithm"])  # one part a name, or this test sees too little
    for part in own.get("algorithm", []):
        changes = {key: value for key, value in part.items() if key != "name"}
        assert changes and not repeated(changes, parts.get(part["name"], {}))
    assert own.get("stack") != list(parts)


def repeated(own: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Keys that say what the base says, also in a table within that is of the same class."""
    found = []
    for key, value in own.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if value.get("name", before.get("name")) == before.get("name"):
                found += repeated(value, before)
        elif key in base and value == before:
            found.append(key)
    return found


def test_the_page_of_a_variant_shows_what_it_extends() -> None:
    page = recipe_page("fedvsr-sparse")
    assert page.startswith(shipped_recipes()["fedvsr-sparse"].read_text().rstrip())
    titles = [line for line in page.splitlines() if line.startswith("# ----")]
    assert titles == [f"# ---- {n} ----" for n in ("fedvsr-population", "fedvsr-less", "fedvsr")]
