"""What a server and its sites agree on: the recipe, in everything but [data].

Every request names the server's recipe by its hash and carries its text. A site answers only a
server whose recipe is the same as its own copy in everything but [data]; where the data lies
(`--data`) is each site's own business. The text is there to name the keys that differ; only a site
that trusts its server works by it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.recipe import Config, securing_layer
from fedlens.core.algorithm import Algorithm, Layer, StackError
from fedlens.core.imports import allow, named_modules
from fedlens.sites.logs import TOO_FEW


def recipe_hash(config: Config) -> str:
    """Of everything but [data], and what the recipe says about itself."""
    return config.digest()


def recipe_of_request(request: Mapping[str, Any]) -> Config:
    """The server's recipe, as it comes with a request or in the run config of a Flower app. Folders
    that it names are the server's: no module is looked for there.
    """
    name = re.sub(r"[^\w.-]", "-", str(request.get("name", "recipe")), flags=re.ASCII)
    tables = tomllib.loads(str(request["text"]))
    tables.pop("folders", None)
    allow(named_modules(tables))  # which changes nothing where a site's operator has a list
    return recipes.from_tables(tables, name)


def secured(config: Config) -> tuple[Config, str]:
    """The recipe as real sites run it, and a sentence about who sees what. Server and sites both
    resolve it, from the same recipe, before they compare hashes.
    """
    algorithm = config.build_algorithm(config.build_task())
    if algorithm.hides_singles:
        return config, (
            f"{algorithm.hiding_layer} is on: the server sees sums over all sites, and no single"
            " reply"
        )
    layer = securing_layer()
    name = type(layer).__name__
    exposed = "the server sees what each site sends"
    if config.settings.secure is False:
        return config, f"{name} is off, as the recipe says: {exposed}"
    try:
        layer.check_cohort(config.settings.cohort or config.settings.clients)
    except ValueError:
        return with_secure(config, False), TOO_FEW
    why = _objection(config, layer, algorithm)
    if why:
        return with_secure(config, False), f"{name} is off, {exposed}: {why}"
    return secured(with_secure(config, True))


def _objection(config: Config, layer: Layer, algorithm: Algorithm) -> str:
    if config.settings.late:
        return "late replies (federation.late) have no place in a sum that is opened in its round"
    try:
        layer.around(algorithm)
    except StackError as e:
        return str(e)
    return ""


def with_secure(config: Config, on: bool) -> Config:
    tables = config.tables()
    tables["federation"] = {**tables["federation"], "secure": on}
    return recipes.from_tables(tables, config.name)
