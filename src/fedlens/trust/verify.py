"""Is a ledger as it was written? Each signature, the whole chain, and where somebody touched it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.trust.ledger import NOTHING, Head
from fedlens.trust.receipts import receipt_fits
from fedlens.trust.signing import (
    PublicKey,
    canonical,
    parse_public_key,
    public_text,
    signature_fits,
)

_MOST_FAULTS = 20


@dataclass(frozen=True)
class Verdict:
    """What verifying a ledger found.

    Args:
        lines: how many there are.
        head: hash of the last one.
        faults: one message each, in the order of the file.
        keys: the public keys that signed it, the first one first.
        countersigned: the last line that the server has countersigned, 0 where there is none.
    """

    lines: int
    head: str
    faults: tuple[str, ...]
    keys: tuple[str, ...]
    countersigned: int

    @property
    def intact(self) -> bool:
        return not self.faults


def verify(
    path: Path,
    key: PublicKey | None = None,
    server: PublicKey | None = None,
    known: Head | None = None,
) -> Verdict:
    """Is this ledger as it was written?

    Args:
        path: the file.
        key: the site's public key; without it, the key that the first line names is believed.
        server: the server's public key, to check what it has countersigned.
        known: a head that somebody else has kept; the ledger must still hold that line.
    """
    check = _Check(key, server)
    with path.open("rb") as file:
        for place, raw in enumerate(file, 1):
            check.line(place, raw)
    check.finish()
    if known and check.hashes.get(known.line) != known.hash:
        there = known.line in check.hashes
        what = "is another one here" if there else "is missing, and so may be others"
        check.fault(f"line {known.line}, which the server has seen, {what}")
    if key and check.keys and public_text(key) not in check.keys:
        check.fault("it is signed with another key than the one given")
    faults = check.faults[:_MOST_FAULTS]
    if len(check.faults) > _MOST_FAULTS:
        faults.append(f"and {len(check.faults) - _MOST_FAULTS} more")
    return Verdict(check.number, check.head, tuple(faults), tuple(check.keys), check.receipt)


class _Check:
    """Follows a ledger line by line. number, head: of the last line that fits. odd: the places
    behind it of lines that nobody signed as they are.
    """

    def __init__(self, key: PublicKey | None, server: PublicKey | None) -> None:
        self.given, self.server = key, server
        self.signer: PublicKey | None = None
        self.faults: list[str] = []
        self.keys: list[str] = []
        self.number, self.head, self.receipt = 0, NOTHING, 0
        self.odd: list[int] = []
        self.hashes: dict[int, str] = {}

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def line(self, place: int, raw: bytes) -> None:
        text = raw.removesuffix(b"\n")
        if text == raw:
            self.fault(f"place {place}: an unfinished line")
            return
        table = self._signed(text)
        if table is None:
            self.odd.append(place)
            return
        number, fits = table["line"], table["previous"] == self.head
        self._settle_odd(number, fits)
        if number <= self.number:
            self.fault(f"place {place}: line {number} again, or moved here from its own place")
            return
        if number > self.number + 1:
            gone = _lines(self.number + 1, number - 1)
            self.fault(f"place {place}: {gone} missing before line {number}")
        elif not fits and number - 1 in self.hashes:
            self.fault(f"place {place}: line {number} does not follow the line before it")
        try:
            self._accept(number, table, text)
        except (ValueError, TypeError, KeyError, AttributeError):
            self.fault(f"place {place}: line {number} is signed, but has not the form of a line")

    def finish(self) -> None:
        if not self.hashes:
            self.faults = ["there is no line that a site has signed"]
        elif self.odd:
            self._settle_odd(self.number + 1 + len(self.odd), fits=False)

    def _settle_odd(self, number: int, fits: bool) -> None:
        """What became of the odd lines, now that line `number` comes next: put between two that fit
        together, or changed where they stood."""
        if not self.odd:
            return
        places = f"place {self.odd[0]}" + (f" to {self.odd[-1]}" if self.odd[1:] else "")
        if number == self.number + 1 and fits:
            self.fault(f"{places}: inserted; the lines around it fit together without it")
        elif number == self.number + 1 + len(self.odd):
            verb = _lines(self.number + 1, number - 1, "was", "were")
            self.fault(f"{places}: {verb} changed after signing")
            self.number = number - 1
        else:
            self.fault(f"{places}: not signed by this site")
        self.odd = []

    def _signed(self, text: bytes) -> dict[str, Any] | None:
        """The table of a line whose signature fits, else None."""
        try:
            table = json.loads(text)
            signature = table.pop("signature")
            data = canonical(table)
            whole = canonical({**table, "signature": signature}) == text
            whole &= type(table["line"]) is int and isinstance(table["previous"], str)
            signers = [self.signer or self.given]
            if self.signer is None and table["kind"] == "key":
                signers.append(parse_public_key(table["key"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        fits = any(k is not None and signature_fits(k, data, signature) for k in signers)
        return table if whole and fits else None

    def _accept(self, number: int, table: Mapping[str, Any], text: bytes) -> None:
        self.number, self.head = number, hashlib.sha256(text).hexdigest()
        self.hashes[number] = self.head
        if table["kind"] == "key":
            self.signer = parse_public_key(table["key"])
            self.keys.append(str(table["key"]))
        if receipt := table.get("receipt"):
            self._check_receipt(number, receipt)

    def _check_receipt(self, number: int, receipt: Mapping[str, Any]) -> None:
        line = int(receipt["line"])
        if self.hashes.get(line, receipt["head"]) != receipt["head"]:
            self.fault(f"line {number}: the server has countersigned another line {line}")
        elif self.server and not receipt_fits(self.server, receipt):
            self.fault(f"line {number}: the countersignature of line {line} is not the server's")
        else:
            self.receipt = max(self.receipt, line)


def _lines(first: int, last: int, one: str = "is", several: str = "are") -> str:
    return f"line {first} {one}" if first == last else f"lines {first} to {last} {several}"
