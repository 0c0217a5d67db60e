"""The client half: whatever the stack says, over this site's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlens.engines.flower.engine import client_app
from fedlens.engines.flower.site import Site, alone
from fedlens.sites.site import site_number
from fedlens_app.task import algorithm, data_of


def make_site(node: Any, run: Any) -> Site:
    id = site_number(node)
    return Site(
        id, algorithm(), alone(id, data_of(id)), Path(str(node.get("folder", run["folder"])))
    )


app = client_app(make_site)
