"""Who adds to a sum, under which keys: how clients agree on it, what each checks, how it is opened.

SumTerms are what a sum is about: the job, its round and purpose, who holds shares, and how many of
them open a mask. Every client makes a `Deal` for these terms: fresh keys, signed, and a box for
each holder with shares of its secrets. A `Roster` is the deals under which masks are made. A client
checks every one of them itself: what the server says about others' keys counts for nothing.

Why replaying does not help a server, as long as clients are honest: a deal names its holders, so
all deals of a roster have the same ones; a client refuses a roster with a key that it has seen in
another; a key whose secret came out was in a roster that more than two thirds of the holders
accepted, and a sum opens with as many of the same ones. Some of them have seen the key before.

Why telling clients different lists of survivors does not help it: shares of a client's own mask and
of its key together would open its reply. Honest clients give one of the two, so with c that give
both to the server, 2 t <= n + c. With t > 2 n / 3 that takes more than n / 3 of them.
"""

from __future__ import annotations

import base64
import binascii
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fedlens.trust.masking import (
    SHARE_BYTES,
    Secrets,
    Streams,
    Tampered,
    due_share,
    expand,
    fingerprint,
    pair_key,
    public_of,
    rebuild,
    seal,
    unseal,
)
from fedlens.trust.signing import PublicKey, canonical, signature_fits
from fedlens.trust.vault import Declined, Vault

Purpose = Literal["train", "evaluate"]
Dropouts = Literal["auto", "recover", "skip"]
MOST_HOLDERS = 10_000
JOB = "[A-Za-z0-9_-]{1,64}"  # a name that is that of a folder too
FEW = 5  # of so many, one lost leaves hardly enough to hide among


def share_count(clients: int) -> int:
    """How many shares open a mask where so many clients are asked."""
    return 2 * clients // 3 + 1


@dataclass(frozen=True)
class SumTerms:
    """threshold: shares that open a mask; 0 where masks are never opened (`dropouts = "skip"`)."""

    job: str
    round: int
    purpose: Purpose
    holders: tuple[int, ...]
    threshold: int

    @property
    def about(self) -> str:
        return f"{self.job}-{self.round:06d}-{self.purpose}"

    def table(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "round": self.round,
            "purpose": self.purpose,
            "holders": list(self.holders),
            "threshold": self.threshold,
        }

    @cached_property
    def hash(self) -> str:
        return fingerprint(canonical(self.table()).decode())

    @staticmethod
    def read(table: Any) -> SumTerms:
        """From somebody else's JSON."""
        try:
            job, number, purpose = table["job"], table["round"], table["purpose"]
            holders, threshold = table["holders"], table["threshold"]
            fine = (
                isinstance(job, str)
                and re.fullmatch(JOB, job) is not None
                and purpose in ("train", "evaluate")
                and all(type(n) is int and n >= 0 for n in (number, threshold, *holders))
                and len(set(holders)) == len(holders) <= MOST_HOLDERS
            )
        except (KeyError, TypeError) as e:
            raise Declined("the terms of a sum are malformed") from e
        if not fine:
            raise Declined("the terms of a sum are malformed")
        return SumTerms(job, number, purpose, tuple(sorted(holders)), threshold)

    def check(self, least: int, dropouts: Dropouts, asked: int | None = None) -> None:
        """What a client accepts. least: holders. asked: clients that the round is about."""
        n = len(self.holders)
        if n < least:
            raise Declined(f"a sum of {n} is none that hides anybody: at least {least} take part")
        if asked is not None:
            self._check_asked(asked, dropouts)
        may_skip = not self.threshold and dropouts != "recover"
        if not may_skip and not share_count(asked or n) <= self.threshold <= n:
            raise Declined(
                f"{self.threshold} of {n} shares are to open a mask: more than two thirds of those"
                " who were asked it must be"
            )
        if dropouts == "skip" and self.threshold:
            raise Declined("masks are to be opened, but dropouts are skipped in this job")

    def _check_asked(self, asked: int, dropouts: Dropouts) -> None:
        n = len(self.holders)
        if n > asked or (n < asked and not self.threshold):
            raise Declined(f"{asked} are said to be asked, but {n} are to take part")
        if self.threshold and dropouts == "auto" and asked <= FEW:
            raise Declined(
                f"masks of {asked} are to be opened: of so few, no dropout is made up for"
            )


@dataclass(frozen=True)
class Deal:
    """One client's keys for one sum. box: the key that boxes for it are sealed with. mask: of the
    masks it shares. own: hash of the seed of its own mask. boxes: shares, by holder."""

    client: int
    box: str
    mask: str
    own: str
    name: str
    signature: str
    boxes: Mapping[int, str]

    def table(self) -> dict[str, Any]:
        fields = {k: getattr(self, k) for k in _DEAL}
        return {**fields, "boxes": {str(i): box for i, box in self.boxes.items()}}

    @staticmethod
    def read(client: int, table: Any) -> Deal:
        try:
            boxes = {int(i): box for i, box in table["boxes"].items()}
            fields = {k: table[k] for k in _DEAL}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise Declined(f"the keys of client {client} are malformed") from e
        texts = (*fields.values(), *boxes.values())
        if not all(isinstance(text, str) for text in texts) or not all(
            is_key(fields[k]) for k in ("box", "mask")
        ):
            raise Declined(f"the keys of client {client} are malformed")
        return Deal(client, **fields, boxes=boxes)

    def statement(self, terms: SumTerms) -> bytes:
        """What its client signs."""
        mine = {"client": self.client, "box": self.box, "mask": self.mask, "own": self.own}
        return canonical({**mine, "name": self.name, "terms": terms.hash, "kind": "fedlens deal"})


_DEAL = ("box", "mask", "own", "name", "signature")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def from_b64(text: str) -> bytes:
    """The one text of these bytes: what is compared as text must not have two."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise Tampered("not base64") from e
    if b64(data) != text:
        raise Tampered("not base64")
    return data


def is_key(text: str) -> bool:
    """Has it the form of a public key?"""
    return _holds(text, 32)


def is_share(text: Any) -> bool:
    """Has it the form of a share? One that has none is missing, like one that did not come."""
    return isinstance(text, str) and _holds(text, SHARE_BYTES)


def _holds(text: str, size: int) -> bool:
    try:
        return len(from_b64(text)) == size
    except Tampered:
        return False


# -- a client's half -------------------------------------------------------------------------------


def greet(vault: Vault, client: int, job: str) -> dict[str, str]:
    """A client's box key for this job, signed."""
    if not re.fullmatch(JOB, job):
        raise Declined("a job's name is malformed")
    box = b64(public_of(vault.box(job)))
    return {"box": box, "signature": vault.sign(_greeting(client, job, box))}


def _greeting(client: int, job: str, box: str) -> bytes:
    return canonical({"client": client, "job": job, "box": box, "kind": "fedlens greeting"})


def deal(vault: Vault, client: int, terms: SumTerms, greetings: Mapping[int, Any]) -> Deal:
    """Fresh keys of this client for these terms, and shares of them for every holder."""
    name, seed = vault.new(terms.about)
    secrets = Secrets(seed)
    mask = public_of(secrets.mask)
    boxes: dict[int, str] = {}
    if terms.threshold:
        shares = secrets.shares(terms.holders, terms.threshold)
        for holder in terms.holders:
            box = _checked_box(vault, holder, terms.job, greetings.get(holder))
            key = pair_key(vault.box(terms.job), box, "box", client, holder, b64(mask))
            boxes[holder] = b64(seal(key, shares[holder]))
    own = fingerprint(secrets.own.hex())
    mine = b64(public_of(vault.box(terms.job)))
    unsigned = Deal(client, mine, b64(mask), own, name, "", boxes)
    signature = vault.sign(unsigned.statement(terms))
    return Deal(client, unsigned.box, unsigned.mask, own, name, signature, boxes)


def _checked_box(vault: Vault, client: int, job: str, greeting: Any) -> bytes:
    try:
        box, signature = str(greeting["box"]), str(greeting["signature"])
    except (KeyError, TypeError) as e:
        raise Declined(f"client {client} is to hold shares, but has sent no key for them") from e
    if not vault.is_signed(client, _greeting(client, job, box), signature):
        raise Declined(f"the box key of client {client} is not signed by it")
    return from_b64(box)


@dataclass(frozen=True)
class Roster:
    """The deals under which a sum is masked, by client."""

    terms: SumTerms
    deals: Mapping[int, Deal]

    def table(self) -> dict[str, Any]:
        deals = {str(i): d.table() for i, d in self.deals.items()}
        return {"terms": self.terms.table(), "deals": deals}

    @staticmethod
    def read(table: Any) -> Roster:
        try:
            terms = SumTerms.read(table["terms"])
            found = {int(i): d for i, d in table["deals"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise Declined("the list of who takes part is malformed") from e
        return Roster(terms, {i: Deal.read(i, found[i]) for i in sorted(found)})

    @cached_property
    def hash(self) -> str:
        return fingerprint(*(d.statement(self.terms).decode() for d in self.deals.values()))

    def check(self, vault: Vault, client: int, least: int, dropouts: Dropouts, asked: int) -> None:
        """What a client looks at before it masks anything with these keys, or opens them. asked:
        how many the server says it asks; noise is shared out among so many. Masks that are never
        opened are everybody's: a sum without one client would tell its part from another's.
        """
        self.terms.check(least, dropouts, asked)
        need = max(least, self.terms.threshold or asked)
        if len(self.deals) < need:
            raise Declined(f"{len(self.deals)} are to take part, not the {need} there must be")
        if client not in self.deals:
            raise Declined(f"client {client} is not among those who are to take part")
        if strangers := sorted(self.deals.keys() - set(self.terms.holders)):
            raise Declined(f"client {strangers[0]} takes part, but was not among the holders")
        if len({d.mask for d in self.deals.values()}) < len(self.deals):
            raise Declined("two clients are to have the same key")
        for i, d in self.deals.items():
            if not vault.is_signed(i, d.statement(self.terms), d.signature):
                raise Declined(
                    f"the keys of client {i} are not signed by it for round {self.terms.round}"
                )
        self.secrets(vault, client)
        others = (d.mask for i, d in self.deals.items() if i != client)
        vault.meet(self.terms.about, self.hash, others)

    def secrets(self, vault: Vault, client: int) -> Secrets:
        mine = self.deals[client]
        secrets = Secrets(vault.seed(self.terms.about, mine.name))
        if b64(public_of(secrets.mask)) != mine.mask:
            raise Declined("the key that is to be this site's own is not")
        return secrets

    def streams(self, vault: Vault, client: int, request: str) -> Streams:
        """The masks of one client: one with everybody else, and its own where it can be opened.
        request: hash of what it works on. Masks of clients who work on something else do not
        cancel with these.
        """
        secrets = self.secrets(vault, client)
        streams = self._pairs(secrets.mask, client, self.deals, request)
        if self.terms.threshold:
            streams.append((expand(secrets.own, "own", self.hash, request), True))
        return streams

    def _pairs(
        self, secret: bytes, client: int, others: Collection[int], request: str
    ) -> list[tuple[bytes, bool]]:
        """By who the two are too: a client that calls another's key its own would else have a third
        one add and subtract the same mask.
        """
        about = ("mask", self.hash, request)
        keys = {i: from_b64(self.deals[i].mask) for i in others if i != client}
        return [
            (pair_key(secret, key, *about, *sorted((client, i))), client < i)
            for i, key in keys.items()
        ]

    def open(self, vault: Vault, client: int, survivors: Sequence[int]) -> dict[str, str]:
        """This client's shares: of survivors for their own masks, of the lost for their keys. Never
        both of one client, and once only. A box that holds none is left out.
        """
        out, secret = {}, vault.box(self.terms.job)
        for owner, d in self.deals.items():
            if client not in d.boxes:
                continue
            try:
                key = pair_key(secret, from_b64(d.box), "box", owner, client, d.mask)
                shares = unseal(key, from_b64(d.boxes[client]))
            except Tampered:
                continue  # the server names whose secret did not come out
            if len(shares) != 2 * SHARE_BYTES:
                continue
            half = shares[SHARE_BYTES:] if owner in survivors else shares[:SHARE_BYTES]
            out[str(owner)] = b64(half)
        return out


def check_opening(roster: Roster, client: int, survivors: Any, lost: Any, least: int) -> list[int]:
    """The survivors, if a client may open the masks of just these."""
    if not roster.terms.threshold:
        raise Declined("this sum has no masks that can be opened")
    lists = (survivors, lost)
    if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in lists):
        raise Declined("the lists of survivors and lost are malformed")
    both = set(survivors) & set(lost)
    if both or len(set(survivors)) < len(survivors) or len(set(lost)) < len(lost):
        raise Declined(
            f"client {min(both) if both else '?'} is to have survived and to be lost: the shares of"
            " both would open its reply"
        )
    if set(survivors) | set(lost) != set(roster.deals):
        raise Declined("the lists of survivors and lost are not those who took part")
    if client not in survivors:
        raise Declined("this client is said to be lost: it opens nothing")
    if len(survivors) < (need := max(least, roster.terms.threshold)):
        raise Declined(f"{len(survivors)} have survived, a sum opens for {need} or more")
    return sorted(survivors)


# -- the server's half -----------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownKeys:
    """What a server can tell of others' keys before it sends them to everybody: one that honest
    sites decline costs all of them the round. keys: with which clients sign; None where nobody has
    bound them, so that only sites can tell."""

    keys: Mapping[int, PublicKey] | None = None

    def accept_greeting(self, client: int, job: str, table: Any) -> bool:
        if not isinstance(table, Mapping):
            return False
        box, signature = table.get("box"), table.get("signature")
        if not isinstance(box, str) or not isinstance(signature, str):
            return False
        return _opens(box) and self._signed(client, _greeting(client, job, box), signature)

    def accept_deal(self, deal: Deal, terms: SumTerms) -> bool:
        usable = _opens(deal.box) and _opens(deal.mask)
        return usable and self._signed(deal.client, deal.statement(terms), deal.signature)

    def _signed(self, client: int, statement: bytes, signature: str) -> bool:
        if self.keys is None:
            return True
        return client in self.keys and signature_fits(self.keys[client], statement, signature)


def _opens(key: str) -> bool:
    """Can a secret be shared with it? Not with a point that gives everyone the same one."""
    try:
        pair_key(bytes(32), from_b64(key))
    except Tampered:
        return False
    return True


MOST_SUBSETS = 1000  # of shares that are tried for one secret
Wrong = dict[int, int]  # holder -> the client whose secret its share does not fit


def recover(
    roster: Roster,
    survivors: Collection[int],
    shares: Mapping[int, Mapping[str, str]],
    request: str,
) -> tuple[Streams, Wrong]:
    """The streams that are left in the sum of the survivors' replies: their own masks, and what
    they shared with the lost; and who sent shares that fit no secret, though enough others did.
    shares: by holder, then by owner. request: hash of what they worked on. Raises Tampered, which
    names whose secret did not come out."""
    out: list[tuple[bytes, bool]] = []
    wrong: Wrong = {}
    for owner, d in roster.deals.items():
        parts = {i: from_b64(own[str(owner)]) for i, own in shares.items() if str(owner) in own}
        if len(parts) < roster.terms.threshold:
            raise Tampered(f"too few shares of client {owner}'s secret came back")
        survived = owner in survivors

        def fits(secret: bytes, d: Deal = d, survived: bool = survived) -> bool:
            return (
                fingerprint(secret.hex()) == d.own if survived else b64(public_of(secret)) == d.mask
            )

        found = _fitting(parts, roster.terms.threshold, fits, wrong)
        if found is None:
            raise Tampered(f"the shares of client {owner}'s secret do not fit together")
        secret, right = found
        for i in parts.keys() - right.keys():
            if due_share(i, right) != parts[i]:
                wrong.setdefault(i, owner)
        if survived:
            out.append((expand(secret, "own", roster.hash, request), True))
            continue
        # A survivor i added its stream with this owner if i < owner.
        for key, before in roster._pairs(secret, owner, survivors, request):
            out.append((key, not before))
    return out, wrong


def _fitting(
    parts: Mapping[int, bytes],
    threshold: int,
    fits: Callable[[bytes], bool],
    suspects: Collection[int],
) -> tuple[bytes, dict[int, bytes]] | None:
    """A secret that its owner has committed itself to, and the shares that gave it: first of those
    whose other shares were right, then of any, as chance will have it.
    """
    chance = random.Random(threshold)
    order = sorted(parts, key=lambda i: (i in suspects, i))
    chosen = order[:threshold]
    for _ in range(MOST_SUBSETS if len(parts) > threshold else 1):
        some = {i: parts[i] for i in chosen}
        try:
            secret = rebuild(some)
        except Tampered:
            secret = b""
        if secret and fits(secret):
            return secret, some
        chosen = chance.sample(order, threshold)
    return None
