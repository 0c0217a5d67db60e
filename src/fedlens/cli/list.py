"""`fedlens list`: what there is of recipes, algorithms, layers and other parts, each with a line
about it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedlens.cli.options import UsageError, examples, one_of
from fedlens.runs.text import ACCENT, console, duration, few

app = typer.Typer()

KINDS = {
    "recipes": "to run as they are",
    "algorithms": "paper names, for --algorithm",
    "layers": "the parts of a stack, with their keys",
    "tasks": "what is learned or restored",
    "models": "networks",
    "datasets": "where data comes from",
    "metrics": "how well it was done",
    "generators": "what makes images of a class",
    "engines": "what carries the messages",
    "attacks": "what `fedlens audit` tries",
}
# what a recipe calls them; they are found in several rooms
RECIPE_TABLES = {
    "tasks": "task",
    "datasets": "data",
}


@app.command(
    "list", epilog=examples("fedlens list", "fedlens list layers", "fedlens list layers LossAware")
)
def list_parts(
    kind: Annotated[
        str,
        typer.Argument(
            help=(
                "recipes, algorithms, layers, tasks, models, datasets, metrics, generators, engines"
                " or attacks."
            ),
            show_default=False,
            autocompletion=one_of(KINDS),
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(
            help="One of them: all that is said about it, and its keys.", show_default=False
        ),
    ] = "",
) -> None:
    """What there is: recipes, algorithms, layers, tasks, models, datasets, metrics."""
    if not kind:
        print_kinds()
        return
    from fedlens.config.convert import suggestion

    known = next((k for k in KINDS if k.rstrip("s") == kind.lower().rstrip("s")), None)
    if known is None:
        raise UsageError(f"there is no list of {kind!r}{suggestion(kind, KINDS)}")
    rows = rows_of(known)
    if name:
        print_page(known, name, rows)
    else:
        print_rows(rows)


def print_kinds() -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for kind, about in KINDS.items():
        some = few(sorted(rows_of(kind)), 6)
        table.add_row(f"[{ACCENT}]fedlens list {kind}[/]", about, f"[dim]{escape(some)}[/]")
    console().print(table)


def print_page(kind: str, name: str, rows: Mapping[str, str]) -> None:
    from fedlens.config.convert import suggestion

    found = next((n for n in rows if n.lower() == name.lower()), None)
    if found is None:
        raise UsageError(
            f"there is nothing called {name!r} among the {kind}{suggestion(name, rows)}"
        )
    console().print(escape(page_of(kind, found, rows[found])), highlight=False)


def print_rows(rows: Mapping[str, str]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=f"bold {ACCENT}", no_wrap=True)
    table.add_column(overflow="fold")
    for row, about in rows.items():
        table.add_row(escape(row), escape(about))
    console().print(table)


def page_of(kind: str, name: str, line: str) -> str:
    """Everything there is to read about one thing: a recipe's file and those it extends, or what
    the module and the class say and the class's keys.
    """
    if kind == "recipes":
        return recipe_page(name)
    if kind in ("algorithms", "engines", "attacks"):
        return line
    from fedlens.config.parts import load_part

    thing = load_part(exported(kind)[name], name)
    about = dict.fromkeys([inspect.getdoc(inspect.getmodule(thing)) or "", *own_texts(thing)])
    about.pop("", None)
    return "\n\n".join([*about, *keys_of(kind, thing), *site_options_of(thing)])


def own_texts(thing: Any) -> list[str]:
    """What it says of itself, and what the classes that it inherits keys from say of those."""
    texts = [inspect.getdoc(thing) or ""] if thing.__doc__ else []
    for parent in getattr(thing, "__mro__", ())[1:]:
        if "Args:\n" in (parent.__doc__ or "") and not parent.__name__.startswith("_"):
            texts.append(f"{parent.__name__}: {inspect.getdoc(parent)}")
    return texts


def recipe_page(name: str) -> str:
    """The recipe's file, then those it extends."""
    from fedlens.config.files import chain, shipped_recipes

    pages: list[str] = []
    for file, _ in chain(shipped_recipes()[name]):
        text = file.read_text(encoding="utf-8").rstrip()
        pages.append(f"# ---- {file.stem} ----\n{text}" if pages else text)
    return "\n\n".join(pages)


def rows_of(kind: str) -> dict[str, str]:
    """Names and a line about each."""
    from fedlens.config.files import shipped_recipes
    from fedlens.config.parts import exported_names

    if kind == "recipes":
        return {name: about_recipe(path) for name, path in shipped_recipes().items()}
    if kind == "algorithms":
        from fedlens.algorithms.named import NAMED

        known = {n.lower() for n in exported_names("algorithm")}
        rows = {}
        for name, algorithm in NAMED.items():
            parts = [table["name"] for table in algorithm.tables()]
            if all(part.lower() in known for part in parts):
                rows[name] = f"{algorithm.about}  ({' + '.join(parts)})"
        return rows
    if kind == "engines":
        return {
            "simulator": "processes on this machine (the default)",
            "ray": "a Ray cluster",
            "flower": "real clients through Flower",
        }
    if kind == "attacks":
        from fedlens.audit.audit import ATTACKS

        return {attack.name: f"{attack.title}  ({attack.paper})" for attack in ATTACKS}
    about = {n: about_export(kind, room, n) for n, room in exported(kind).items()}
    if kind != "models":
        return about
    return {name: "\n".join([text, *measured(name)]) for name, text in about.items()}


def exported(kind: str) -> dict[str, str]:
    """Names of a kind, and the room each is in."""
    from fedlens.config.parts import exported_names, load_part
    from fedlens.core.imports import plugins

    if kind in RECIPE_TABLES:
        found = exported_names(RECIPE_TABLES[kind])
    else:
        found = dict.fromkeys(plugins(kind), f"entry points {kind}")
        found |= dict.fromkeys(importlib.import_module(f"fedlens.{kind}").__all__, kind)
    found.pop("ImageGenerator", None)  # the interface of the others
    if kind != "datasets":
        return found
    from fedlens.data.source import Source

    classes = {n: load_part(room, n) for n, room in found.items()}
    return {
        n: found[n] for n, c in classes.items() if isinstance(c, type) and issubclass(c, Source)
    }


def about_export(kind: str, room: str, name: str) -> str:
    """The first sentence about it, and its keys."""
    from fedlens.config.parts import load_part
    from fedlens.core.imports import OwnCodeError

    try:
        thing = load_part(room, name)
    except ImportError as e:
        return f"needs a package that is not installed: {e}"
    except OwnCodeError as e:
        return str(e)
    # a class without a docstring would show its parent's
    own = inspect.getdoc(thing) if thing.__doc__ else ""
    module = inspect.getdoc(inspect.getmodule(thing)) or ""
    text = first_sentence(module if not own or is_help(own, thing) else own)
    return "\n".join([text, *keys_of(kind, thing)])


def keys_of(kind: str, thing: Any) -> list[str]:
    """What a recipe may set, where a recipe builds it."""
    from fedlens.config.parts import parameters

    if not isinstance(thing, type) or kind in ("models", "metrics"):
        return []
    keys = [
        f"{p.name}={p.default}" if p.default is not inspect.Parameter.empty else p.name
        for p in parameters(thing).values()
    ]
    return [f"[{', '.join(keys)}]"] if keys else []


def site_options_of(thing: Any) -> list[str]:
    """What a real site may choose for itself, where the part has such options."""
    options = getattr(thing, "site_options", {})
    return [f"[fedlens join ... {name}=VALUE: {text}]" for name, text in options.items()]


def is_help(text: str, thing: Any) -> bool:
    """Does it begin with the meaning of keys ("mu: strength", or a list of them below "Args:")
    rather than with what the thing is?"""
    words, colon, _ = text.partition(":")
    if words == "Args":
        return True
    return bool(colon) and set(words.split(", ")) <= inspect.signature(thing).parameters.keys()


@cache
def measurements() -> dict[str, Any]:
    """What `benchmarks/vsr_networks.py --keep` found, by lower-case name."""
    found: dict[str, Any] = json.loads(
        (Path(__file__).parents[1] / "models" / "measured.json").read_text()
    )
    return found


def measured(name: str) -> list[str]:
    """Size of a network, and what a clip takes on a CPU, as far as that was measured."""
    known = measurements().get(name.lower())
    if not known:
        return []
    parts = [f"{known['parameters']:,} parameters"]
    for key, word in (
        ("train", "a training step"),
        ("forward", "a forward pass"),
        ("enlarge", "enlarging"),
    ):
        if key not in known:
            continue
        row = known[key]
        _, frames, _, height, width = row["clip"]
        seconds = row.get("seconds") or sum(v for k, v in row.items() if k.endswith("_seconds"))
        where = f"{row['threads']} threads, at {row['commit']}"
        parts.append(
            f"{word} on {frames} frames of {width}x{height}: {row['peak_gb']:.1f} GB,"
            f" {duration(seconds)} ({where})"
        )
    return [f"[{'; '.join(parts)}]"]


def first_sentence(text: str) -> str:
    head = " ".join(text.strip().split("\n\n")[0].split())
    stop = re.search(
        r"(?<!\bEq)(?<!\bEqs)(?<!\bal)(?<!\bFig)(?<!\bSec)\. (?=[A-Z]|\w+(?:, \w+)*: )", head
    )
    return head[: stop.start() + 1] if stop else head


def about_recipe(path: Path) -> str:
    """`about`, or the comment the file begins with."""
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("about"):
            return line.partition("=")[2].strip().strip('"')
    first = text.splitlines()[0] if text else ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""
