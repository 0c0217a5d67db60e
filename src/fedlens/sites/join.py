"""A site takes part: its worker is started and its data read, then the server is asked for work
until somebody ends it.
"""

from __future__ import annotations

import signal
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.config.convert import ConfigError
from fedlens.core.files import lock_folder
from fedlens.core.log import Log
from fedlens.sites.worker import COMMAND, SiteWorker
from fedlens.trust.signing import read_signing_key


def take_part(
    address: str,
    tls: ssl.SSLContext,
    key: Path,
    node: Mapping[str, Any],
    wait: float,
    log: Log,
    command: Sequence[str] = COMMAND,
    agree: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Returns only by an exception.

    Args:
        address: host:port of the server.
        tls: trusts the federation's CA, and holds this site's certificate.
        key: file of this site's private key.
        node: this site's settings, see `sites.site.make_site`.
        wait: seconds to keep trying at the beginning.
        command: of the worker's process.
        agree: hears what the site has and what is asked of it before the server is, and raises
            if its operator does not agree.
    """
    from fedlens.engines.flower.fleet import Away, Fleet, Refused

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a polite kill goes offline too
    folder = Path(str(node["folder"]))
    secret = read_signing_key(key)
    taken = "another `fedlens join` is running with {folder}"
    with lock_folder(folder, taken), SiteWorker(node, log, command) as worker:
        folder.chmod(0o700)
        told = worker.start()
        if told["examples"] is not None:
            log(f"client {node['client']} has {told['examples']} examples")
        for remark in told["remarks"]:
            log(remark)
        if agree:
            agree(told)
        try:
            Fleet(address, tls, secret, folder, log).serve(worker.handle, wait)
        except Refused as e:
            raise ConfigError(
                f"{e}: the server's operator has to add --site {key.name}.pub, and --ca must be"
                " that server's ca.crt"
            ) from e
        except Away as e:
            raise ConfigError(f"the server at {address} cannot be reached ({e})") from e
