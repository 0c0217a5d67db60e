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
from fedlens.config.recipe import Config


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
    return recipes.from_tables(tables, name)
