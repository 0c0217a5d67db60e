"""The server's side of ledgers: it keeps the last head that it has seen of each, in its run folder,
and hands every site a countersignature of it with the next message.

A site can then show that the server has seen its ledger up to there, and whoever has the run folder
can see that no line was taken from its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.core.files import write_atomically
from fedlens.trust.ledger import Head, LedgerError
from fedlens.trust.signing import (
    PublicKey,
    SigningKey,
    canonical,
    read_signing_key,
    sign,
    signature_fits,
)

HEADS = "heads.json"  # in a run folder at the server


class Receipts:
    """Of one run.

    Args:
        folder: the run's.
        job: its name for the sites.
        keys: folder with server.pem and server.key; where they are not, heads are kept unsigned.
    """

    def __init__(self, folder: Path, job: str, keys: Path) -> None:
        self.folder, self.job = folder, job
        self.heads = read_heads(folder) if (folder / HEADS).is_file() else {}
        signs = (keys / "server.key").is_file() and (keys / "server.pem").is_file()
        self.key = read_signing_key(keys / "server.key") if signs else None
        self.certificate = (keys / "server.pem").read_text() if signs else ""

    def see(self, client: int, fields: Mapping[str, Any]) -> str | None:
        """Note the head that came with a reply. A message if the ledger cannot be the same as
        before."""
        line, head = fields.get("line"), fields.get("head")
        if type(line) is not int or not isinstance(head, str) or len(head) != 64:
            return None
        before = self.heads.get(client)
        self.heads[client] = Head(line, head)
        self._save()
        if before and line <= before.line:
            return f"client {client}: its ledger was at line {before.line} and is now at {line}"
        return None

    def fields(self, client: int) -> dict[str, str]:
        """What a message to this client carries."""
        head = self.heads.get(client)
        if head is None or self.key is None:
            return {}
        receipt = make_receipt(self.key, client, self.job, head)
        return {"receipt": json.dumps(receipt), "certificate": self.certificate}

    def _save(self) -> None:
        table = {str(i): {"line": h.line, "head": h.hash} for i, h in sorted(self.heads.items())}
        write_atomically(self.folder / HEADS, json.dumps(table, indent=1), sync=False)


def read_heads(run: Path) -> dict[int, Head]:
    """By client, the last head that the server of this run has seen."""
    path = run / HEADS
    if not path.is_file():
        raise LedgerError(f"there is no {HEADS} in {run}: a server over real sites keeps one")
    try:
        found = json.loads(path.read_bytes())
        return {int(k): Head(int(v["line"]), str(v["head"])) for k, v in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise LedgerError(f"{path} is damaged: {e}") from e


# -- one countersignature ----------------------------------------------------------------------


def make_receipt(key: SigningKey, client: int, job: str, head: Head) -> dict[str, Any]:
    """What a server hands a site as a proof that it has seen its ledger's head."""
    table = {"client": client, "job": job, "line": head.line, "head": head.hash}
    return {**table, "signature": sign(key, canonical(table))}


def receipt_fits(server: PublicKey, receipt: Mapping[str, Any]) -> bool:
    table = {k: v for k, v in receipt.items() if k != "signature"}
    return signature_fits(server, canonical(table), receipt.get("signature"))
