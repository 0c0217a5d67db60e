"""The client half: whatever the stack says, over this site's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlens.engines.flower.engine import make_client_app
from fedlens.engines.flower.site import Site, federation_of_one
from fedlens.sites.site import site_number
from fedlens_app.task import algorithm, data_of


def make_site(node: Any, run: Any) -> Site:
    id = site_number(node)
    return Site(
        id,
        algorithm(),
        federation_of_one(id, data_of(id)),
        Path(str(node.get("folder", run["folder"]))),
    )


app = make_client_app(make_site)
