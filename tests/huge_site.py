"""A site that means harm (see `a_site.py`): it has its recipe and its own key, and every reply to a
round of training is 400 MB long."""

from __future__ import annotations

import torch

from fedlens import Client, Message
from fedlens.engines.flower.site import Fields, Site
from fedlens.sites import site as recipe_site

HUGE = 100_000_000  # float32


def make_site(node: Fields, request: Fields) -> Site:
    site = recipe_site.make_site(node, request)
    honest = site.algorithm.client_step

    def step(message: Message, client: Client) -> Message:
        reply = honest(message, client)
        return Message({"delta": {"x": torch.zeros(HUGE)}}, weights=reply.weights)

    site.algorithm.client_step = step  # type: ignore[method-assign]
    return site
