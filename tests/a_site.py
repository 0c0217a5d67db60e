"""A site with code of its own behind the fleet client of `fedlens join`.

python a_site.py MODULE ADDRESS CA KEY NODE     the site; NODE is its settings as JSON
python a_site.py MODULE SOCKET                  its worker, with MODULE.make_site
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from fedlens.sites.join import take_part
from fedlens.sites.network import site_tls
from fedlens.sites.worker import run_worker

if __name__ == "__main__":
    module, *rest = sys.argv[1:]
    if len(rest) == 1:
        run_worker(importlib.import_module(module).make_site)
    else:
        address, ca, key, node = rest
        take_part(
            address,
            site_tls(Path(ca), Path(f"{key}.crt"), Path(key)),
            Path(key),
            json.loads(node),
            60.0,
            lambda text: print(text, flush=True),
            (sys.executable, __file__, module),
        )
