"""A user's own code by name: "module:Class" in a recipe or an argument, and the parts that
installed packages offer as entry points. The only module that imports what a recipe names.

A module is looked for in the folder of the recipe, in the working directory and among the installed
packages. It is imported if the user of this process named it: in a recipe of theirs, in an
argument, with `--module` (`allow`). A run folder may be somebody else's, so it names nothing:
before what it says is built, `import_no_others` closes the list, for good. A real site carries out
what somebody else wrote: it calls `import_only` first, with what its operator listed, and nothing
is ever added.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

_folders: list[Path] = []  # of recipes that were read, the last one first
_mentioned: list[Path] = []  # where run folders say that modules were; nothing is searched there


@dataclass(frozen=True)
class Rules:
    """What may be imported by name. Other processes of the same job take them over.

    Args:
        named: modules that the user of this process named.
        closed: nothing else may be.
        listed: by a site's operator: these alone, whatever is named.
    """

    named: frozenset[str] = frozenset()
    closed: bool = False
    listed: frozenset[str] | None = None

    def permit(self, module: str) -> bool:
        among = self.named if self.listed is None else self.listed
        parts = module.split(".")
        below = any(".".join(parts[: k + 1]) in among for k in range(len(parts)))
        return below or (self.listed is None and not self.closed)


_rules = Rules()


class OwnCodeError(ValueError):
    """Code of a user that is not there or cannot be loaded; the message says which."""


def search_in(folder: Path) -> None:
    """Look for modules in this folder before all others."""
    place = folder.resolve()
    if place in _folders:
        _folders.remove(place)
    _folders.insert(0, place)


def rules() -> Rules:
    return _rules


def set_rules(wanted: Rules) -> None:
    """Those of the process that started this one."""
    global _rules
    _rules = wanted


def import_only(modules: Iterable[str]) -> None:
    """Only these modules, and what lies below them, may be imported by name in this process. An
    entry may be "module:Class" too: the module is what counts."""
    set_rules(replace(_rules, listed=frozenset(_module(m) for m in modules if m.strip())))


def allow(modules: Iterable[str]) -> None:
    """The user of this process names modules, as "module", "module:Class" or by their files."""
    found = set()
    for text in modules:
        if text.endswith(".py"):
            search_in(Path(text).parent)
        found.add(Path(text).stem if text.endswith(".py") else _module(text))
    set_rules(replace(_rules, named=_rules.named | found))


def import_no_others(mentioned: Iterable[str] = ()) -> None:
    """Before something is built that others may have written, such as what a run folder says: from
    now on only modules that the user named, or will name. mentioned: where it says that they were.
    """
    _mentioned[:0] = [Path(folder) for folder in mentioned]
    set_rules(replace(_rules, closed=True))


@contextlib.contextmanager
def importing_no_others() -> Iterator[None]:
    """The same for a while."""
    before = _rules.closed
    import_no_others()
    try:
        yield
    finally:
        set_rules(replace(_rules, closed=before))


def named_modules(values: Any) -> tuple[str, ...]:
    """Modules that tables or texts name as "module:Class"; nothing is imported."""
    return tuple(sorted({_module(text) for text in _texts(values) if _is_reference(text)}))


def _module(text: str) -> str:
    return text.partition(":")[0].strip()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "about":
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _is_reference(text: str) -> bool:
    module, colon, name = text.partition(":")
    words = [*module.split("."), *name.split(".")]
    return bool(colon) and all(word.isidentifier() for word in words)


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
            if isinstance(found, ModuleType):  # what it imported itself is not what was named
                raise OwnCodeError(f"{reference} cannot be loaded: {name} is a module of its own")
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
    if _rules.permit(module):
        allow([module])
    elif _rules.listed is not None:
        raise OwnCodeError(
            f"{reference} is not imported here: the operator of this site has not listed the"
            f" module {module}"
        )
    else:
        raise OwnCodeError(
            f"{reference} is not imported: a run folder may be somebody else's, and nobody here"
            f" named the module {module}. If you trust it: --module {module_option(module)} (in"
            " Python: fedlens.core.imports.allow)"
        )


def module_option(module: str) -> str:
    """What `--module` has to say for this module to be found: its file, where one is known."""
    file = Path(*module.split(".")[:1]).with_suffix(".py")
    places = [folder / file for folder in (*_folders, *_mentioned) if (folder / file).is_file()]
    return str(places[0]) if places else module


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
        raise OwnCodeError(
            f"{reference} cannot be loaded: {module} raises {type(e).__name__}: {e}"
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
    if _rules.listed is not None:  # elsewhere, who installed it wants it to be found
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
        allow([reference])
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
