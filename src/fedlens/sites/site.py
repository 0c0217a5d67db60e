"""A site's end of a recipe over real sites: its recipe over its own data, with what it decides for
itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.config import recipe as recipes
from fedlens.config.convert import suggestion
from fedlens.config.parts import parameters
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.algorithm import Algorithm, SiteSettings
from fedlens.core.imports import import_only
from fedlens.core.message import Header
from fedlens.engines.flower.site import Site, federation_of_one
from fedlens.sites.agreement import recipe_hash, recipe_of_request, secured
from fedlens.trust.policy import check_generators, check_modules, site_policy, terms_of

PLACES = ("root", "folder", "file", "image")  # what data sources call the place their data lies in
OPTION = "option-"  # begins a site option's key in the node config: option-NAME = "value"


def make_site(node: Mapping[str, Any], request: Mapping[str, Any]) -> Site:
    """The site that its operator's settings describe: its own recipe over its own data. The
    server's recipe is taken only if the operator trusts the server.
    """
    id = site_number(node)
    config, who_sees = secured(agreed_recipe(node, request))
    own = str(node.get("data", ""))
    agreed = config
    if own:
        config = with_data_at(config, own)
    settings = config.settings
    task = config.build_task()
    built = config.build_algorithm(task)
    own_settings = site_settings(built, node, id, settings.clients)._replace(
        recipe=recipe_hash(agreed),
        asked=Header(
            rounds=settings.rounds,
            seed=settings.seed,
            population=settings.clients,
            cohort=settings.cohort or settings.clients,
            max_weight=settings.max_weight,
        ),
    )
    algorithm = built.at_site(own_settings).deployed()
    check_generators(site_policy(node.get("policy"), ()), algorithm)
    clients = 1 if own else settings.clients
    federation = task.admit(config.build_source().federation(clients, settings.seed))
    parts = settings.clients if own else len(federation)
    if not 0 <= id < parts:
        raise ConfigError(
            f"this site is client {id}, but the recipe has {parts} (0 to {parts - 1})"
        )
    part = 0 if own else id
    algorithm = algorithm.given(federation.facts)
    terms = None
    if node.get("policy") or not node.get("stock"):
        terms = terms_of(agreed, algorithm, own_name=bool(node.get("recipe")))
    return Site(
        id,
        algorithm,
        federation_of_one(id, federation.holdings[part], federation.held_out_of(part)),
        Path(str(node["folder"])),
        recipe_hash(agreed),
        settings.threads,
        federation.facts.classes,
        (who_sees, *federation.facts.remarks()),
        agreed.tables(),
        terms,
    )


def agreed_recipe(node: Mapping[str, Any], request: Mapping[str, Any]) -> Config:
    """What this site does. Reading it imports no module that the operator did not list."""
    policy = site_policy(node.get("policy"), node.get("modules", ()))
    if not node.get("stock"):  # a stock SuperNode executes the server's code anyway
        import_only(policy.modules)
    if node.get("recipe"):
        return recipes.read(str(node["recipe"]))
    if not (node.get("trust-server") or node.get("stock")):
        raise ConfigError(
            "this site has no recipe of its own (--recipe) and takes none from a server"
            " (--trust-server)"
        )
    if node.get("policy"):  # its entry is the reason that the server hears
        check_modules(policy, tomllib.loads(str(request["text"])))
    return recipe_of_request(request)


def site_number(node: Mapping[str, Any]) -> int:
    for key in ("client", "partition-id"):
        if key in node:
            return int(node[key])
    raise ConfigError("this site does not say which client it is: add client=N to its node config")


def with_data_at(config: Config, place: str) -> Config:
    """The same recipe over the data in a file or folder."""
    known = parameters(config.data.cls)
    key = next((k for k in PLACES if k in known), None)
    if key is None:
        raise ConfigError(
            f"{config.data.name} reads no files, so it cannot take data from {place}: leave"
            " --data out"
        )
    if not Path(place).exists():
        raise ConfigError(f"there is no data at {place}")
    return replace(config, data=config.data.with_value(key, place).checked())


def site_settings(
    algorithm: Algorithm, node: Mapping[str, Any], id: int, clients: int
) -> SiteSettings:
    """What is this site's own; every option has to be declared by a part of the algorithm."""
    chosen = {k.removeprefix(OPTION): str(v) for k, v in node.items() if k.startswith(OPTION)}
    parts = list(algorithm.parts())
    known = [name for part in parts for name in part.site_options]
    for name in chosen:
        if name not in known:
            stack = " + ".join(type(part).__name__ for part in parts)
            raise ConfigError(f"{stack} takes no site option {name!r}{suggestion(name, known)}")
    key, peers = (Path(str(node[k])) if node.get(k) else None for k in ("key", "peers"))
    least = site_policy(node.get("policy"), ()).min_cohort
    return SiteSettings(chosen, id, clients, Path(str(node["folder"])), key, peers, least)
