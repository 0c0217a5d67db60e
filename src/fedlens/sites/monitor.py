"""Health and metrics for whoever looks after a server or a site, at an address of their own.

`GET /health` is JSON, `GET /metrics` is Prometheus' text format. On this machine in plain HTTP; at
any other address only by TLS and with a client certificate of the federation's authority, whose key
was not revoked. There is nothing here that a ledger or a run folder does not hold, and no name of a
file or of a patient.
"""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.config.convert import ConfigError
from fedlens.core.files import write_atomically
from fedlens.report.reading import as_list, as_number, read_overview
from fedlens.sites.keys import certified_key
from fedlens.sites.network import is_loopback, require_free_port, split_address
from fedlens.trust.departures import Followed
from fedlens.trust.ledger import LEDGER_FILE

SECONDS = 10.0  # that one who asks may be silent


@dataclass(frozen=True)
class Metric:
    """One name with its values. samples: labels and a number."""

    name: str
    help: str
    samples: Sequence[tuple[Mapping[str, Any], float]] = field(default_factory=tuple)
    kind: str = "counter"

    def text(self) -> str:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        for labels, value in self.samples:
            inside = ",".join(f'{k}="{_escaped(str(v))}"' for k, v in labels.items())
            number = f"{value:.0f}" if float(value).is_integer() else repr(float(value))
            lines.append(f"{self.name}{{{inside}}} {number}" if inside else f"{self.name} {number}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


Collect = Callable[[], Iterable[Metric]]


def exposition(metrics: Iterable[Metric]) -> str:
    return "".join(metric.text() for metric in metrics)


# -- what there is to tell -------------------------------------------------------------------------


class SiteMetrics:
    """Of a site: what its ledger holds."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Followed(folder / LEDGER_FILE)

    def __call__(self) -> Iterable[Metric]:
        left = self.ledger.catch_up()
        kinds = left.kinds
        messages = [({"kind": kind}, float(item.times)) for kind, item in kinds.items()]
        sizes = [({"kind": kind}, float(item.bytes)) for kind, item in kinds.items()]
        failures = kinds["failure"].times if "failure" in kinds else 0
        rounds = {r for (job, r) in left.rounds if r is not None}
        return [
            Metric("fedlens_site_messages_total", "Messages that left this site", messages),
            Metric("fedlens_site_bytes_total", "Bytes of payload that left this site", sizes),
            Metric(
                "fedlens_site_overhead_bytes_total",
                "Bytes of requests that are not payload: heartbeats, headers",
                [({}, left.overhead.bytes)],
            ),
            Metric("fedlens_site_refused_total", "Requests not answered", [({}, failures)]),
            Metric("fedlens_site_rounds", "Rounds answered", [({}, len(rounds))], "gauge"),
            Metric(
                "fedlens_site_countersigned_line",
                "Last line of the ledger that the server countersigned",
                [({}, left.countersigned)],
                "gauge",
            ),
        ]


class RunMetrics:
    """Of a server: what the run folders hold that its note names."""

    def __init__(self, folders: Callable[[], Iterable[Path]]) -> None:
        self.folders = folders

    def __call__(self) -> Iterable[Metric]:
        states: list[tuple[Mapping[str, Any], float]] = []
        samples: dict[str, list[tuple[Mapping[str, Any], float]]] = {name: [] for name in _RUN}
        for folder in self.folders():
            if not folder.is_dir():
                continue
            run = read_overview(folder)
            labels = {"run": folder.name}
            states.append(({**labels, "status": run.status}, 1.0))
            for name, value in run_totals(run.rounds).items():
                samples[name].append((labels, value))
        return [
            Metric("fedlens_run_info", "Runs and how they stand", states, "gauge"),
            *(Metric(name, _RUN[name][0], samples[name], _RUN[name][1]) for name in _RUN),
        ]


_RUN = {
    "fedlens_rounds_total": ("Rounds done", "counter"),
    "fedlens_heard_total": ("Replies that counted", "counter"),
    "fedlens_refused_total": ("Replies refused", "counter"),
    "fedlens_lost_total": ("Clients asked and not heard", "counter"),
    "fedlens_bytes_up_total": ("Bytes from clients", "counter"),
    "fedlens_bytes_down_total": ("Bytes to clients", "counter"),
    "fedlens_seconds_total": ("Seconds of all rounds", "counter"),
    "fedlens_last_round_seconds": ("Seconds of the last round", "gauge"),
    "fedlens_epsilon": (
        "Epsilon spent; the whole statement is in metrics.jsonl",
        "gauge",
    ),
}


def run_totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over the lines of metrics.jsonl."""

    def total(name: str) -> float:
        return sum(as_number(r.get(name)) or 0.0 for r in rounds)

    found = {
        "fedlens_rounds_total": float(len(rounds)),
        "fedlens_heard_total": total("heard"),
        "fedlens_refused_total": total("refused"),
        "fedlens_lost_total": float(sum(len(as_list(r.get("lost"))) for r in rounds)),
        "fedlens_bytes_up_total": total("bytes_up"),
        "fedlens_bytes_down_total": total("bytes_down"),
        "fedlens_seconds_total": total("seconds"),
    }
    if rounds:
        last = rounds[-1]
        found["fedlens_last_round_seconds"] = as_number(last.get("seconds")) or 0.0
        state = last.get("state")
        spent = as_number(state.get("epsilon")) if isinstance(state, Mapping) else None
        if spent is not None:
            found["fedlens_epsilon"] = spent
    return found


RUNS = "runs.json"  # in the folder of `fedlens serve`


def note_run(state: Path, folder: Path) -> None:
    """So that whoever watches the server finds the run's folder."""
    runs = [str(path) for path in noted_runs(state)]
    if (place := str(folder.absolute())) not in runs:
        write_atomically(state / RUNS, json.dumps([*runs, place], indent=1))


def noted_runs(state: Path) -> list[Path]:
    path = state / RUNS
    return [Path(text) for text in json.loads(path.read_text())] if path.exists() else []


# -- the endpoint ----------------------------------------------------------------------------------


class Monitor:
    """Answers in a thread of its own, until it is closed.

    Args:
        address: host:port.
        about: what stands in /health besides that all is well.
        collect: the metrics, when they are asked for.
        tls: needed for any address but this machine's; asks for client certificates.
        revoked: public keys as PEM that are not answered all the same; asked at every connection,
            and while it cannot say, nobody is answered.
    """

    def __init__(
        self,
        address: str,
        about: Mapping[str, Any],
        collect: Collect,
        tls: ssl.SSLContext | None = None,
        revoked: Callable[[], Collection[bytes]] = frozenset,
    ) -> None:
        host, port = split_address(address)
        if not is_loopback(host):
            if tls is None or tls.verify_mode != ssl.CERT_REQUIRED:
                raise ConfigError(
                    f"metrics at {host} could be read by others: only with TLS and client"
                    " certificates, or at 127.0.0.1"
                )
        else:
            tls = None
        require_free_port(host, port)
        self.about, self.collect, self.tls = about, collect, tls
        self.server = _Server((host, port), self._handler())
        self.server.tls, self.server.revoked = tls, revoked
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def page(self, path: str) -> tuple[str, str] | None:
        """Type and text of what is at this path."""
        if path == "/health":
            return "application/json", json.dumps({"status": "ok", **self.about})
        if path == "/metrics":
            return "text/plain; version=0.0.4; charset=utf-8", exposition(self.collect())
        return None

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        monitor = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = SECONDS
            server_version, sys_version = "FedLens", ""

            def do_GET(self) -> None:
                try:
                    found = monitor.page(self.path)
                    code = 200 if found else 404
                except (OSError, ValueError):
                    found, code = ("text/plain", "The files behind it cannot be read.\n"), 500
                kind, text = found or ("text/plain", "There is /health and /metrics.\n")
                data = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass  # a look every few seconds is no news

        return Handler


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    tls: ssl.SSLContext | None = None
    revoked: Callable[[], Collection[bytes]] = frozenset

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the thread of this connection: whoever is slow in showing a certificate holds up
        nobody else."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(SECONDS)
        with self.tls.wrap_socket(request, server_side=True) as secure:
            if certified_key(secure.getpeercert(binary_form=True) or b"") in self.revoked():
                return
            super().finish_request(secure, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # somebody without a certificate, or gone
