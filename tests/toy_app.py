"""The toy stacks as a Flower app: what tests submit to a real SuperLink. Imported by ServerApp
processes and by the workers of sites (`a_site.py`).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from stacks import STACKS
from toy import toy_federation

from fedlens import Algorithm, Client, Message
from fedlens.engines.flower.site import Fields, Site, federation_of_one
from fedlens.sites import site as recipe_site

torch.set_num_threads(1)


def make_site(node: Fields, request: Fields) -> Site:
    """What a job wants of its sites lies in a file at the site, under the job's name; a request
    with a recipe is a recipe's.
    """
    if request.get("text"):
        return recipe_site.make_site({**node, "trust-server": True}, request)
    config = json.loads((Path(str(node["jobs"])) / f"{request['job']}.json").read_text())
    everyone = toy_federation(int(config["clients"]))
    id = int(node["client"])
    algorithm = STACKS[str(config["stack"])].make()
    return Site(
        id,
        Slow(algorithm, config),
        federation_of_one(id, everyone.holdings[id], everyone.held_out_of(id)),
        Path(str(node["folder"])),
        recipe=str(node.get("agreed", config["stack"])),
    )


def Slow(algorithm: Algorithm, config: Any) -> Algorithm:
    """Client steps that leave a trace when they begin and take a while, so that tests can hit the
    middle of a round.
    """
    inner = algorithm.client_step

    def step(message: Message, client: Client) -> Message:
        (Path(str(config["out"])) / f"working-{client.id}-{message.round}-{os.getpid()}").touch()
        time.sleep(float(config["delay"]))
        return inner(message, client)

    algorithm.client_step = step  # type: ignore[method-assign]
    return algorithm
