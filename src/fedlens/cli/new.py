"""`fedlens new`: a file to begin with, for each kind of part, with its test."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import UsageError, examples, one_of
from fedlens.runs.text import console

TEMPLATES = Path(__file__).parents[1] / "templates"
_PARTS = ("layer", "task", "dataset", "model")
_KINDS = (*_PARTS, "recipe", "project")

app = typer.Typer()


@app.command(
    "new",
    epilog=examples(
        "fedlens new layer my_layer",
        "fedlens new model my_net",
        "fedlens new recipe mine",
        "fedlens new project hospitals",
    ),
)
def write_new(
    kind: Annotated[
        str,
        typer.Argument(
            help="layer, task, dataset, model, recipe or project.",
            show_default=False,
            autocompletion=one_of(_KINDS),
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(
            help="Of the file, such as my_layer; of a project's folder.", show_default=False
        ),
    ],
) -> None:
    """Write a working file with its test: a layer, task, dataset, model, recipe or project."""
    if kind not in _KINDS:
        from fedlens.config.convert import suggestion

        raise UsageError(f"there is no template for a {kind!r}{suggestion(kind, _KINDS)}")
    files = files_of(kind, name)
    if there := [path for path in files if path.exists()]:
        raise UsageError(f"{there[0]} is already there: choose another name")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    out = console()
    for path in files:
        out.print(f"wrote {path}", markup=False)
    out.print(f"[dim]next: {next_command(kind, name)}[/]")


def files_of(kind: str, name: str) -> dict[Path, str]:
    """What is written where."""
    place = Path(name)
    module = place.name.removesuffix(".py").removesuffix(".toml").replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise UsageError(
            f"{name!r} cannot be the name of a Python module: use letters, digits and _"
        )
    folder = place.parent
    if kind == "recipe":
        return {folder / f"{module}.toml": filled("recipe.toml", module)}
    if kind != "project":
        return part_files(kind, folder, module, class_name(module))
    return {
        place / f"{module}.toml": filled("project.toml", module),
        **part_files("model", place, f"{module}_model", "Net"),
        **part_files("layer", place, f"{module}_layer", "Soften"),
        place / "README.md": filled("project.md", module),
    }


def part_files(kind: str, folder: Path, module: str, cls: str) -> dict[Path, str]:
    return {
        folder / f"{module}.py": filled(f"{kind}.py", module, cls),
        folder / f"test_{module}.py": filled(f"test_{kind}.py", module, cls),
    }


def filled(template: str, module: str, cls: str = "") -> str:
    text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    return text.replace("MODULE", module).replace("CLASS", cls).replace("FILE", f"{module}.toml")


def class_name(module: str) -> str:
    """MyLayer for my_layer."""
    return "".join(word[:1].upper() + word[1:] for word in re.split(r"_+", module) if word)


def next_command(kind: str, name: str) -> str:
    stem = Path(name).name.removesuffix(".py").removesuffix(".toml").replace("-", "_")
    if kind == "recipe":
        return f"fedlens run {Path(name).parent / stem}.toml --dry-run"
    if kind == "project":
        return f"cd {name} && fedlens run {stem}.toml"
    place = Path(name).parent / f"test_{stem}.py"
    return f'pytest {place}, then name it "{stem}:{class_name(stem)}" in a recipe'
