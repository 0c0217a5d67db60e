"""Sites of a recipe whose steps leave a trace when they begin and take a while, so that tests can
hit the time between two trips of SecureSum. Imported by the workers of sites (`a_site.py`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from fedlens import Client, Message
from fedlens.engines.flower.site import Fields, Site
from fedlens.sites import site as recipe_site

torch.set_num_threads(1)
DELAY = 1.0


def make_site(node: Fields, request: Fields) -> Site:
    site = recipe_site.make_site(node, request)
    inner = site.algorithm.client_step

    def step(message: Message, client: Client) -> Message:
        header = message.header
        name = f"working-{client.id}-{message.round}-{header.trip}-{os.getpid()}"
        (Path(str(node["jobs"])) / name).touch()
        time.sleep(DELAY)
        return inner(message, client)

    site.algorithm.client_step = step  # type: ignore[method-assign]
    return site
