"""Recipe files: which file a name means, and what it says together with the files it extends."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlens.config.convert import ConfigError, suggestion, toml_value
from fedlens.config.inherit import check_types, extend
from fedlens.core.imports import allow, import_no_others, named_modules, search_in

RUN_CONFIG = "config.toml"  # in a run folder
SHIPPED = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """By name, which is the file's without its folder."""
    return {path.stem: path for path in sorted(SHIPPED.rglob("*.toml"), key=lambda p: p.stem)}


def find_recipe(recipe: str | Path) -> Path:
    """A run folder (its config.toml), a file, or a shipped recipe by name."""
    path = Path(recipe)
    if path.is_dir() and (path / RUN_CONFIG).is_file():
        return path / RUN_CONFIG
    if path.is_file():
        return path
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(f"there is no recipe file {recipe}")
    return _shipped(str(recipe))


def load_tables(path: Path) -> dict[str, Any]:
    """What a recipe file says, with everything that it extends filled in. Modules that it names
    may be imported from now on, and `folders` are those in which they are looked for. Not so where
    a run folder is among the files: that may be somebody else's, and allows nothing.
    """
    found = chain(path)
    folders = _own_folders(found)
    *variants, (base, tables) = found
    if variants:
        with _naming(base):
            check_types(tables)
    for file, own in reversed(variants):
        with _naming(file):
            check_types(own)
            tables = extend(tables, {key: v for key, v in own.items() if key != "extends"})
    if any(file.name == RUN_CONFIG for file, _ in found):
        import_no_others(folders)
    else:
        allow(named_modules(tables))
        for folder in reversed(folders):
            search_in(Path(folder))
    return {**tables, "folders": folders}


def _own_folders(files: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """Beside each of these files, or where a run folder says that its recipe was."""
    folders: list[str] = []
    for file, tables in files:
        said = tables.get("folders", [])
        if not isinstance(said, list) or not all(isinstance(f, str) for f in said):
            raise ConfigError(f"{file}: folders must be a list of paths")
        shipped = file.resolve().is_relative_to(SHIPPED.resolve())
        beside = [] if shipped or file.name == RUN_CONFIG else [str(file.parent.resolve())]
        folders += said or beside
    return list(dict.fromkeys(folders))


def chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file, the one it extends, the one that extends, and so on: each with its own tables."""
    found = [(path, _parse(path))]
    while "extends" in (tables := found[-1][1]):
        base = _base(found[-1][0], tables["extends"])
        files = [file for file, _ in found]
        if base.resolve() in [file.resolve() for file in files]:
            way = " -> ".join(str(file) for file in [*files, base])
            raise ConfigError(f"{path} extends itself in the end: {way}")
        found.append((base, _parse(base)))
    return found


def _base(file: Path, wanted: Any) -> Path:
    if not isinstance(wanted, str):
        raise ConfigError(
            f"{file}: extends must be the name of a recipe or a path, not {toml_value(wanted)}"
        )
    is_path = wanted.endswith(".toml") or "/" in wanted
    try:
        return find_recipe(file.parent / wanted) if is_path else _shipped(wanted)
    except ConfigError as e:
        raise ConfigError(f"{file} extends {wanted!r}, but {e}") from e


def _shipped(name: str) -> Path:
    shipped = shipped_recipes()
    if name not in shipped:
        raise ConfigError(
            f"there is no recipe {name!r}{suggestion(name, shipped)}; `fedlens list recipes` shows"
            " them all"
        )
    return shipped[name]


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Errors say which file they are about."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
