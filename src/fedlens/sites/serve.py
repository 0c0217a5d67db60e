"""The server: a SuperLink on this machine alone, the front before it, and a note for `fedlens run`
that says where it is and which key belongs to which client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.config.convert import ConfigError
from fedlens.core.files import write_atomically
from fedlens.core.log import Log
from fedlens.sites.front import Front, run_front
from fedlens.sites.keys import (
    make_authority,
    make_server_certificate,
    public_pem,
    site_public_key,
)
from fedlens.sites.logs import TOO_FEW
from fedlens.sites.network import front_tls, tls_context, wait_for_port
from fedlens.sites.programs import Programs, flower_home, private_file, write_connection

ANY_ADDRESS = ("0.0.0.0", "::")
NOTE = "server.json"
REVOKED = "revoked.json"


@dataclass(frozen=True)
class Served:
    """Where a SuperLink is, and who may join it.

    Args:
        address: of its control API, host:port.
        ca: by which it is known.
        bindings: client -> public key as PEM.
    """

    address: str
    ca: Path
    bindings: Mapping[int, str]

    def save(self, folder: Path) -> None:
        facts = {"address": self.address, "ca": str(self.ca), "sites": dict(self.bindings)}
        write_atomically(folder / NOTE, json.dumps(facts, indent=1))


def read_served(folder: Path, seconds: float = 0.0) -> Served:
    """The note that `fedlens serve` left in its folder. seconds: to wait for one, where it is just
    being started.
    """
    until = time.monotonic() + seconds
    while not (folder / NOTE).exists() and time.monotonic() < until:
        time.sleep(0.2)
    revoked = revoked_keys(folder)
    try:
        facts: dict[str, Any] = json.loads((folder / NOTE).read_text())
        every = {int(k): str(v) for k, v in facts["sites"].items()}
        sites = {i: key for i, key in every.items() if key.encode() not in revoked}
        return Served(str(facts["address"]), Path(facts["ca"]), sites)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"{folder / NOTE} does not say where the server is: `fedlens serve --state {folder}`"
            " writes it"
        ) from e


class KnownSites(Mapping[bytes, int]):
    """Public key as PEM -> client, without the keys that were revoked meanwhile. While their list
    cannot be read there is nobody: it may name anybody.
    """

    def __init__(self, sites: Mapping[bytes, int], folder: Path, log: Log) -> None:
        self.sites, self.folder, self.log = sites, folder, log
        self.trouble = ""

    def __getitem__(self, key: bytes) -> int:
        client = self.sites[key]
        try:
            revoked, trouble = revoked_keys(self.folder), ""
        except ConfigError as e:
            revoked, trouble = frozenset(self.sites), str(e)
        if trouble != self.trouble:  # said once, not for every connection
            self.log(trouble or f"{self.folder / REVOKED} can be read again")
        self.trouble = trouble
        if key in revoked:
            raise KeyError(key)
        return client

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self.sites if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def revoked_keys(folder: Path) -> frozenset[bytes]:
    """As PEM. A ConfigError if there is a list and it cannot be read."""
    path = folder / REVOKED
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
            raise ValueError("it is no list of keys")
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"{path} cannot be read, so no site is let in: {e}; bring it back, or write [] into it"
            " and revoke those keys again"
        ) from e
    return frozenset(key.encode() for key in found)


def revoke_key(folder: Path, public: Path) -> None:
    """From the next connection on this key opens nothing."""
    keys = revoked_keys(folder) | {public_pem(site_public_key(public))}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(folder / REVOKED, json.dumps(sorted(key.decode() for key in keys), indent=1))


def open_door(
    host: str,
    port: int,
    inner: int,
    keys: Path,
    state: Path,
    bindings: Mapping[int, Path],
    log: Log,
) -> None:
    """Start everything and stay until the SuperLink ends or somebody ends us.

    Args:
        host: address for the sites.
        port: of the front.
        inner: port of the SuperLink, on this machine.
        keys: folder of the authority and the server's certificate.
        state: folder of the SuperLink's database.
        bindings: client -> file of its public key.
    """
    revoked_keys(state)  # a list that cannot be read is found out now
    if not (keys / "server.pem").exists():
        make_authority(keys)
        make_server_certificate(keys, [] if host in ANY_ADDRESS else [host])
        log(f"made certificates in {keys}; sites need {keys / 'ca.crt'}")
    database = private_file(state / "superlink.db")
    public = {client: public_pem(site_public_key(path)) for client, path in bindings.items()}
    if len(set(public.values())) < len(public):
        raise ConfigError("one key cannot belong to two clients")
    from fedlens.engines.flower.pushed import objection

    home, ca = flower_home(), (keys / "ca.crt").absolute()
    Served(f"127.0.0.1:{inner}", ca, {i: key.decode() for i, key in public.items()}).save(state)
    with Programs(log, home) as running:
        link = running.start(
            "flower-superlink", "--host", "127.0.0.1", "--port", str(inner),
            "--database", str(database), "--ssl-ca-certfile", str(ca),
            "--ssl-certfile", str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key"),
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for_port("127.0.0.1", inner, ca, running.all_alive)
        connection = write_connection(home, f"127.0.0.1:{inner}", ca)
        for client, path in bindings.items():
            register_site(running, client, path, connection)
        if running.all_alive():
            if 0 < len(bindings) < 3:
                log(TOO_FEW)
            log(f"sites can join at {host}:{port}; runs start on this machine; end with Ctrl-C")
            known = KnownSites({key: i for i, key in public.items()}, state, log)
            front = Front(known, inner, tls_context(ca), log)
            front.objection = objection
            asyncio.run(run_front(front, host, port, front_tls(keys), running.all_alive))
        code = link.wait()
        raise ConfigError(
            f"the SuperLink ended by itself (exit code {code}): its own words are above"
        )


def register_site(running: Programs, client: int, public: Path, connection: str) -> None:
    # a client's new key is another node: Flower knows a name once
    digest = hashlib.sha256(public_pem(site_public_key(public))).hexdigest()
    name = f"client-{client}-{digest[:12]}"
    command = ("flwr", "supernode", "register", str(public), connection, "--name", name)
    output = running.run(*command, check=False)
    if not running.all_alive():
        return
    known = "already in use" in output  # a restart finds its sites registered
    if "rror" in output and not known:
        raise ConfigError(f"{public} could not be registered: {' '.join(output.split())[:300]}")
    log = running.log
    log(f"{public.name} may join as client {client}" + (" (known from before)" if known else ""))
