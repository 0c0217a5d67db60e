"""Where a client keeps what nobody else may know, and what it has already answered.

In a simulation everything follows from the run's seed, which every client and the server know: the
protocol is the real one, and nothing is secret. A real site draws its secrets from the operating
system and keeps them in files of its own until they have been used; beside them it notes for every
key what it was used for, before the answer leaves.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedlens.config.convert import ConfigError
from fedlens.core.algorithm import SiteSettings
from fedlens.core.files import atomic_path, write_atomically
from fedlens.core.message import Header
from fedlens.trust.masking import expand
from fedlens.trust.retention import VAULT
from fedlens.trust.signing import (
    PublicKey,
    SigningKey,
    parse_public_key,
    public_text,
    read_signing_key,
    sign,
    signature_fits,
)

MOST_TRIES = 5  # at one round: a server that was killed asks again, with other keys
ENDED_SECONDS = 14 * 86_400  # of which a job's keys were not used: it has ended
SAME_KEY = (
    "this site has answered another request with the same key: a second answer under the same mask"
    " would show the difference"
)


class Declined(ValueError):
    """What a site does not do, whoever asks, and why."""


class RanBefore(Declined):
    """A round of a recipe comes to one sum: it is asked for otherwise, or once too often."""


class Vault(ABC):
    """Of one client."""

    @abstractmethod
    def box(self, job: str) -> bytes:
        """The key that boxes for it are sealed with in this job."""

    @abstractmethod
    def new(self, about: str) -> tuple[str, bytes]:
        """A name and 32 secret bytes for one sum. about: the job, the round and its purpose."""

    @abstractmethod
    def seed(self, about: str, name: str) -> bytes:
        """Those bytes again; Declined where there are none."""

    @abstractmethod
    def sign(self, statement: bytes) -> str: ...

    @abstractmethod
    def is_signed(self, client: int, statement: bytes, signature: str) -> bool:
        """Did this client sign it? Declined where nobody knows its key."""

    @abstractmethod
    def lock(self, about: str, use: str, request: str, why: Declined | None = None) -> None:
        """From now on `use` belongs to this request; Declined, saying why, if it belongs to
        another.
        """

    @abstractmethod
    def locked(self, about: str, use: str) -> str | None:
        """The request that `use` belongs to, if it belongs to any."""

    @abstractmethod
    def check_agreed(self, header: Header) -> None:
        """Declined where a message is of another job than this site has agreed to."""

    @abstractmethod
    def begin(self, number: int, purpose: str, key: str) -> str:
        """This site answers a request of that round under a key of its own; Declined if it has
        under too many. What it is about then, whatever a server calls the job.
        """

    @abstractmethod
    def meet(self, about: str, roster: str, keys: Iterable[str]) -> None:
        """Others' keys, seen in this roster; Declined if one was seen in another."""

    @abstractmethod
    def forget(self, about: str) -> None:
        """The secrets of sums that came well before this one are no longer needed, nor are those of
        jobs that have ended.
        """


class SimulatedVault(Vault):
    """Everything from the run's seed. Nothing is kept: a simulated client answers whatever it is
    asked, as often as it is asked, so that a worker that died can be replaced."""

    def __init__(self, run: int, client: int) -> None:
        self.run, self.client = run, client

    def _key(self, *words: object) -> bytes:
        return expand(self.run.to_bytes(16, "big", signed=True), "simulation", *words)

    def box(self, job: str) -> bytes:
        return self._key(self.client, "box")

    def new(self, about: str) -> tuple[str, bytes]:
        return "seeded", self.seed(about, "seeded")

    def seed(self, about: str, name: str) -> bytes:
        return self._key(self.client, "sum", about, name)

    def sign(self, statement: bytes) -> str:
        return self._signature(self.client, statement)

    def _signature(self, client: int, statement: bytes) -> str:
        return hmac.digest(self._key(client, "signature"), statement, "sha256").hex()

    def is_signed(self, client: int, statement: bytes, signature: str) -> bool:
        return hmac.compare_digest(self._signature(client, statement), signature)

    def lock(self, about: str, use: str, request: str, why: Declined | None = None) -> None:
        pass

    def locked(self, about: str, use: str) -> str | None:
        return ""

    def check_agreed(self, header: Header) -> None:
        pass

    def begin(self, number: int, purpose: str, key: str) -> str:
        return ""

    def meet(self, about: str, roster: str, keys: Iterable[str]) -> None:
        pass

    def forget(self, about: str) -> None:
        pass


class SiteVault(Vault):
    """In a folder for its owner only. key: the site's own signing key. peers: the public keys of
    all sites, by client, which this site's operator has put there. agreed: to what, where that is
    known."""

    def __init__(
        self,
        folder: Path,
        key: SigningKey,
        peers: Mapping[int, PublicKey],
        agreed: SiteSettings | None = None,
    ) -> None:
        self.folder, self.key, self.peers, self.agreed = folder, key, peers, agreed
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def box(self, job: str) -> bytes:
        path = self.folder / f"{job}.secret"
        data = self._secret(path, make=True)
        path.touch()  # its job is still under way
        return data

    def new(self, about: str) -> tuple[str, bytes]:
        name = os.urandom(16).hex()
        return name, self._secret(self._place(about) / f"{name}.secret", make=True)

    def seed(self, about: str, name: str) -> bytes:
        path = self._place(about) / f"{name}.secret"
        if not re.fullmatch("[0-9a-f]{32}", name) or not path.exists():
            raise Declined("the key that is to be this site's own was not made here for this")
        return self._secret(path)

    def sign(self, statement: bytes) -> str:
        return sign(self.key, statement)

    def is_signed(self, client: int, statement: bytes, signature: str) -> bool:
        if client not in self.peers:
            raise Declined(
                f"client {client} is to take part, but this site does not know its public key: put"
                " the .pub files of all sites into the folder of --peers"
            )
        return signature_fits(self.peers[client], statement, signature)

    def lock(self, about: str, use: str, request: str, why: Declined | None = None) -> None:
        uses = self._note(about, "uses")
        if uses.setdefault(use, request) != request:
            raise why or Declined(SAME_KEY)
        self._keep(about, "uses", uses)

    def locked(self, about: str, use: str) -> str | None:
        return self._note(about, "uses").get(use)

    def check_agreed(self, header: Header) -> None:
        agreed = self.agreed.asked if self.agreed else None
        if agreed is None:
            return
        free = {n: getattr(header, n) for n in ("round", "trip", "evaluate", "stop")}
        due = replace(agreed, **free, cohort=0 if header.evaluate else agreed.cohort)
        for name in (f.name for f in fields(Header)):
            if (said := getattr(header, name)) != (own := getattr(due, name)):
                raise Declined(
                    f"{name} = {said} is none of the recipe that this site agreed to: {own}"
                )
        if not 0 <= header.round < max(1, agreed.rounds):  # a run without any evaluates its start
            raise Declined(
                f"round {header.round} is none of the {agreed.rounds} that this site agreed to"
            )

    def begin(self, number: int, purpose: str, key: str) -> str:
        # no name of a job has a "+"
        recipe = self.agreed.recipe[:16] if self.agreed else ""
        about = f"{recipe}+-{number:06d}-{purpose}"
        keys = self._note(about, "tries")
        keys[key] = True
        if len(keys) > MOST_TRIES:
            raise RanBefore(
                f"round {number} of this recipe was asked for {MOST_TRIES} times: to run it once"
                " more, agree on another seed"
            )
        self._keep(about, "tries", keys)
        return about

    def meet(self, about: str, roster: str, keys: Iterable[str]) -> None:
        seen = self._note(about, "seen")
        for key in keys:
            if seen.setdefault(key, roster) != roster:
                raise Declined("a client's key was used before, with others: it is replayed")
        self._keep(about, "seen", seen)

    def forget(self, about: str) -> None:
        job, number, _ = about.rsplit("-", 2)
        for path in self.folder.glob(f"{job}-*/*.secret"):
            other, earlier, _ = path.parent.name.rsplit("-", 2)
            # a server that goes on from its last checkpoint asks for one round again
            if other == job and int(earlier) < int(number) - 1:
                path.unlink()
        # nobody tells a site that a job has ended
        for path in [*self.folder.glob("*.secret"), *self.folder.glob("*/*.secret")]:
            ended = path.stat().st_mtime < time.time() - ENDED_SECONDS
            if ended and path.name != f"{job}.secret" and path.parent.name != about:
                path.unlink()

    # -- files -------------------------------------------------------------------------------------

    def _place(self, about: str) -> Path:
        folder = self.folder / about
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _secret(self, path: Path, make: bool = False) -> bytes:
        if make and not path.exists():
            # whole or not at all: an empty file would be damaged for good
            with atomic_path(path) as part:
                part.unlink(missing_ok=True)
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(os.urandom(32))
                    file.flush()
                    os.fsync(file.fileno())
        data = path.read_bytes()
        if len(data) != 32:
            raise Declined(f"{path.name} in this site's folder is damaged")
        return data

    def _note(self, about: str, kind: str) -> dict[str, Any]:
        path = self._place(about) / f"{kind}.json"
        table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return table

    def _keep(self, about: str, kind: str, table: Mapping[str, Any]) -> None:
        write_atomically(self._place(about) / f"{kind}.json", json.dumps(table), sync=True)


def open_vault(site: SiteSettings) -> SiteVault:
    """This site's own secrets, its key, and the keys of the others, which its operator has put
    there: a server that names them could put its own in their place.
    """
    if site.key is None or site.peers is None:
        raise ConfigError(
            "SecureSum is on: this site needs its private key (key) and a folder with the public"
            " keys of all sites (peers) in its settings, as `fedlens join` has them"
        )
    secret, peers = read_signing_key(site.key), read_peers(site.peers)
    if missing := [str(i) for i in range(site.clients) if i not in peers]:
        raise ConfigError(
            f"SecureSum is on, and {site.peers} lacks the public keys of clients"
            f" {', '.join(missing)}: ask each site's operator for its .pub file"
            f" (site-{missing[0]}.pub), not the server's"
        )
    own = peers.get(site.client)
    if own and public_text(own).split()[:2] != public_text(secret.public_key()).split()[:2]:
        raise ConfigError(
            f"the public key of client {site.client} in {site.peers} is not that of {site.key}"
        )
    return SiteVault(site.folder / VAULT, secret, peers, site)


def read_peers(folder: Path) -> dict[int, PublicKey]:
    """The public keys (*.pub) in a folder, by client: the number in a file's name. Those that
    `fedlens rotate` replaced (*.old.pub) stay for the ledger, and count no more.
    """
    found: dict[int, PublicKey] = {}
    for path in sorted(folder.glob("*.pub")):
        if path.stem.endswith(".old"):
            continue
        digits = re.findall(r"\d+", path.stem)
        if len(digits) != 1:
            continue
        number = int(digits[0])
        if number in found:
            raise Declined(f"two public keys in {folder} are of client {number}: keep one")
        found[number] = parse_public_key(path.read_text(), str(path))
    _check_distinct(found, folder)
    return found


def _check_distinct(keys: Mapping[int, PublicKey], folder: Path) -> None:
    """Whoever holds the key of two clients is two of those among whom a site hides."""
    owners: dict[str, int] = {}
    for number, key in sorted(keys.items()):
        if (first := owners.setdefault(public_text(key), number)) != number:
            raise Declined(
                f"clients {first} and {number} have the same public key in {folder}: ask their"
                " operators for the right ones"
            )
