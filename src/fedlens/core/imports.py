"""A user's own code by name: "module:Class" in a recipe or an argument, and the parts that
installed packages offer as entry points. The only module that imports what a recipe names.

A module is looked for in the folder of the recipe, in the working directory and among the installed
packages. A real site carries out what somebody else wrote: it calls `import_only` first, with what
its operator listed, and from then on its process imports nothing else by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_folders: list[Path] = []  # of recipes that were read, the last one first
_listed: frozenset[str] | None = None  # None: whatever is found may be imported


class OwnCodeError(ValueError):
    """Code of a user that is not there or cannot be loaded; one sentence that says which."""


def search_in(folder: Path) -> None:
    """Look for modules in this folder before all others."""
    place = folder.resolve()
    if place in _folders:
        _folders.remove(place)
    _folders.insert(0, place)


def import_only(modules: Iterable[str]) -> None:
    """Only these modules, and what lies below them, may be imported by name in this process. An
    entry may be "module:Class" too: the module is what counts."""
    global _listed
    _listed = frozenset(m.partition(":")[0].strip() for m in modules if m.strip())


def is_listed(module: str) -> bool:
    """May this module be imported by name here?"""
    if _listed is None:
        return True
    parts = module.split(".")
    return any(".".join(parts[: k + 1]) in _listed for k in range(len(parts)))


def load_reference(reference: str) -> Any:
    """What "module:Class" stands for."""
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise OwnCodeError(f"{reference!r} is no reference: write module:Class")
    _check_listed(module, reference)
    found: Any = _import(module, reference)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            at = getattr(found, "__file__", None) or getattr(found, "__name__", module)
            raise OwnCodeError(f"{reference} cannot be loaded: {at} has no {name}") from None
    return found


def reference_to(thing: Any) -> str | None:
    """ "module:name" by which another process finds this class or function; None for what only
    this one has: an instance, a lambda, what stands in a function or in a script.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not module or module == "__main__" or not name or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for word in name.split("."):
        found = getattr(found, word, None)
    return f"{module}:{name}" if found is thing else None


def _check_listed(module: str, reference: str) -> None:
    if not is_listed(module):
        raise OwnCodeError(
            f"{reference} is not imported here: the operator of this site has not listed the"
            f" module {module}"
        )


def _import(module: str, reference: str) -> ModuleType:
    folders = [*_folders, Path.cwd()]
    for folder in reversed(folders):
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))
    top = module.split(".")[0]
    _forget_namesake(top, folders)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name not in (module, top):
            raise OwnCodeError(f"{reference} cannot be loaded: it needs {e.name}") from e
        places = ", ".join(dict.fromkeys(map(str, folders)))
        raise OwnCodeError(
            f"{reference} cannot be loaded: there is no module {module} in {places}, nor among the"
            " installed packages"
        ) from e
    except Exception as e:  # whatever a user's file does when it is read
        line = f", line {e.lineno}" if isinstance(e, SyntaxError) else ""
        raise OwnCodeError(
            f"{reference} cannot be loaded: {module} raises {type(e).__name__}: {e}{line}"
        ) from e


def _forget_namesake(top: str, folders: Sequence[Path]) -> None:
    """Two recipes in two folders may each have a module of one name: the one whose folder goes
    first counts, also where the other was loaded before."""
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if not loaded:
        return
    have = Path(loaded).resolve()
    home = have.parent.parent if have.name == "__init__.py" else have.parent
    earlier = folders[: folders.index(home)] if home in folders else ()
    if any((f / f"{top}.py").is_file() or (f / top / "__init__.py").is_file() for f in earlier):
        for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
            del sys.modules[name]
        importlib.invalidate_caches()


# -- what installed packages offer -----------------------------------------------------------------


@functools.cache
def plugins(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points of `fedlens.layers`, `fedlens.tasks` and so on, by name."""
    return {e.name: e for e in importlib.metadata.entry_points(group=f"fedlens.{group}")}


def load_plugin(point: importlib.metadata.EntryPoint) -> Any:
    _check_listed(point.module, f"{point.name} ({point.value})")
    try:
        return point.load()
    except Exception as e:  # somebody's package
        raise OwnCodeError(
            f"{point.name} of the package {point.dist.name if point.dist else '?'} cannot be"
            f" loaded: {type(e).__name__}: {e}"
        ) from e


# -- what only Python has --------------------------------------------------------------------------

GIVEN = "<given in Python: "  # begins what a config.toml says instead of an object


def describe_given(value: Any) -> str:
    """An object from Python as a text: "module:name" where that finds it again, else honest words
    that say what it was."""
    if reference := reference_to(value):
        return reference
    return f"{GIVEN}{_words(value)}>"


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        kinds = dict.fromkeys(type(v).__name__ for v in value)
        sizes = [len(v) for v in value if hasattr(v, "__len__")]
        total = f", {sum(sizes)} examples" if len(sizes) == len(value) else ""
        return f"{len(value)} of {' and '.join(kinds)}{total}"
    if isinstance(value, dict):
        return ", ".join(map(str, value))
    name = getattr(value, "__name__", type(value).__name__)
    if callable(getattr(value, "parameters", None)) and not isinstance(value, type):
        return f"{name}, {sum(p.numel() for p in value.parameters())} parameters"
    return f"{name}, {len(value)} examples" if hasattr(value, "__len__") else str(name)


def load_given(what: str, text: str) -> Any:
    """The object behind such a text, if it can be found."""
    if text.startswith(GIVEN):
        raise OwnCodeError(
            f"the {what} of this run was {text.strip('<>')}, which is not in its folder: go on with"
            " fedlens.fit(..., out=FOLDER, resume=True) and the same objects"
        )
    return load_reference(text)
