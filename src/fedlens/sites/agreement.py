"""What a server and its sites agree on: the recipe, in everything but [data].

A run's Flower app carries the recipe. A site that has its own copy answers only a server whose
recipe is the same in everything but [data]; where the data lies (`--data`) is each site's own
business.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.recipe import Config


def recipe_hash(config: Config) -> str:
    """Of everything but [data], and what the recipe says about itself."""
    return config.digest()


def recipe_of_run(run: Mapping[str, Any]) -> Config:
    """The recipe in the run config of a Flower app."""
    return recipes.from_tables(tomllib.loads(str(run["recipe"])), str(run["name"]))
