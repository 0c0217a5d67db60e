"""What stands at a site's two doors: its policy at both, its ledger at the way out."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509

from fedlens.core.files import write_atomically
from fedlens.core.log import Log
from fedlens.core.message import Header, Message
from fedlens.core.privacy import Mechanism
from fedlens.trust.departures import Followed
from fedlens.trust.ledger import LEDGER_FILE, Head, Leaving, Ledger
from fedlens.trust.policy import PolicyError, Terms, site_policy
from fedlens.trust.receipts import receipt_fits
from fedlens.trust.signing import canonical, read_certificate_key

_SERVER = "server.pem"  # in a site's folder: the certificate of the server that countersigns


class Guard:
    """One site's.

    Args:
        folder: the site's; its ledger lies there.
        key: file of the site's private key; without one nothing is written down.
        policy: what the site allows; without one, everything that it agreed to.
        ca: file of the federation's CA certificate, which vouches for the server's.
        modules: that the operator listed beside the policy.
    """

    def __init__(
        self,
        folder: Path,
        key: Path | None = None,
        policy: Path | None = None,
        ca: Path | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.folder, self.ca = folder, ca
        self.policy = site_policy(policy, modules)
        self.ledger = Ledger(folder / LEDGER_FILE, key) if key else None
        self._followed = Followed(folder / LEDGER_FILE)
        self.so_far = self._followed.catch_up()

    @staticmethod
    def of(node: Mapping[str, Any]) -> Guard:
        """As the settings of a site's node say."""
        named = (str(node.get(k) or "") for k in ("key", "policy", "ca"))
        key, policy, ca = (Path(text) if text else None for text in named)
        folder = Path(str(node.get("folder", ".")))
        return Guard(folder, key, policy, ca, node.get("modules", ()))

    # -- in ----------------------------------------------------------------------------------------

    def check_terms(self, terms: Terms) -> None:
        if found := self.policy.objections(terms):
            raise found[0]

    def check_request(self, asked: Header) -> None:
        if found := self.policy.refuses(asked):
            raise found

    def check_cost(self, cost: Mechanism | None) -> None:
        """Before work, and again before its result leaves."""
        if found := self.policy.overspends(cost, self.so_far, self.ledger is not None):
            raise found

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """Work ends after `max_seconds` of the policy, by a signal."""
        seconds = self.policy.max_seconds
        if seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            raise PolicyError("max_seconds", f"work took longer than {seconds:g} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    # -- out ---------------------------------------------------------------------------------------

    def pass_reply(self, reply: Message, pieces: Sequence[bytes], about: Leaving) -> Head | None:
        """A reply leaves, or a PolicyError says why it does not."""
        size = sum(map(len, pieces))
        if found := self.policy.withholds(about.kind, reply, size, about.recipe, self.so_far):
            raise found
        return self._write(about)

    def pass_words(self, about: Leaving) -> Head | None:
        """A greeting or a reason leaves."""
        return self._write(about)

    def _write(self, about: Leaving) -> Head | None:
        if self.ledger is None:
            return None
        head = self.ledger.append(about)
        self._followed.catch_up()
        return head

    # -- receipts ----------------------------------------------------------------------------------

    def take_receipt(self, request: Mapping[str, Any], log: Log) -> Mapping[str, Any] | None:
        """What the server has countersigned of this ledger, if it is true."""
        text = request.get("receipt")
        if not text or self.ledger is None:
            return None
        try:
            receipt = json.loads(str(text))
            line, head = int(receipt["line"]), str(receipt["head"])
            fits = receipt_fits(self._server_key(str(request.get("certificate", ""))), receipt)
            known = self._hash_of(line) == head
            kept = {k: receipt[k] for k in ("client", "job", "line", "head", "signature")}
            whole = canonical(kept) == canonical(receipt)
        except Exception as e:  # whatever a server sends: what is to leave does leave
            log(f"the server's countersignature of this ledger cannot be read: {e}")
            return None
        if not fits or not known:
            what = "is not the server's" if not fits else "is about another ledger than this one"
            log(f"the countersignature of line {line} {what}; it is not kept")
            return None
        return kept if whole else None

    def _server_key(self, certificate: str) -> Any:
        """The key in the server's certificate, once the CA has vouched for that."""
        path = self.folder / _SERVER
        if self.ca is None:
            raise ValueError("this site has no CA certificate to check it with")
        if not path.exists() or path.read_text() != certificate:
            found = x509.load_pem_x509_certificate(certificate.encode())
            found.verify_directly_issued_by(x509.load_pem_x509_certificate(self.ca.read_bytes()))
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, certificate)
        return read_certificate_key(path)

    def _hash_of(self, line: int) -> str:
        with (self.folder / LEDGER_FILE).open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number == line:
                    return hashlib.sha256(raw.removesuffix(b"\n")).hexdigest()
        return ""
