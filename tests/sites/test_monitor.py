"""Health and metrics over real sockets: readable here, elsewhere only with a certificate."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedlens.cli.main import invoke
from fedlens.config.convert import ConfigError
from fedlens.sites.keys import (
    make_authority,
    make_server_certificate,
    make_site_certificate,
    make_site_key,
)
from fedlens.sites.monitor import (
    Metric,
    Monitor,
    RunMetrics,
    SiteMetrics,
    exposition,
    noted_runs,
)
from fedlens.sites.network import free_port, front_tls, site_tls
from fedlens.sites.serve import REVOKED, revoked_keys
from fedlens.trust.ledger import LEDGER_FILE, Leaving, Ledger


def got(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def values(text: str) -> dict[str, float]:
    """As a scraper reads them: a name with its labels, and a number."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_text_format() -> None:
    odd = 'a"b\\c\nd'
    metric = Metric("fedlens_x_total", "What it is", [({}, 3.0), ({"run": odd}, 0.5)])
    assert exposition([metric]) == (
        "# HELP fedlens_x_total What it is\n# TYPE fedlens_x_total counter\nfedlens_x_total 3\n"
        'fedlens_x_total{run="a\\"b\\\\c\\nd"} 0.5\n'
    )


def test_a_sites_numbers_are_its_ledgers(tmp_path: Path) -> None:
    """A greeting of 3 bytes, then replies of 10 in rounds 0 and 1."""
    ledger = Ledger(tmp_path / LEDGER_FILE, ec.generate_private_key(ec.SECP384R1()), sync=False)
    ledger.append(Leaving("greeting", 0, [b"abc"]))
    port = free_port()
    with Monitor(f"127.0.0.1:{port}", {"site": 0}, SiteMetrics(tmp_path)):
        here = f"127.0.0.1:{port}"
        assert json.loads(got(here, "/health")) == {"status": "ok", "site": 0}
        for k in range(2):
            ledger.append(Leaving("reply", 0, [b"0123456789"], "job", "r", k))
        found = values(got(here, "/metrics"))
        assert found['fedlens_site_bytes_total{kind="greeting"}'] == 3
        assert found['fedlens_site_bytes_total{kind="reply"}'] == 20
        assert found['fedlens_site_messages_total{kind="reply"}'] == 2
        assert found["fedlens_site_rounds"] == 2 and found["fedlens_site_refused_total"] == 0
        ledger.append(Leaving("failure", 0, [b"x"]))
        assert values(got(here, "/metrics"))["fedlens_site_refused_total"] == 1
        for path in ("/", "/metrics?x=1", "/../etc/passwd", "/health/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                got(here, path)
        assert invoke(["status", here]) == 0
    assert invoke(["status", here]) == 2


ROUNDS = [
    {"round": 0, "seconds": 2.0, "heard": 2, "asked": 3, "refused": 1, "bytes_up": 10,
     "bytes_down": 30, "lost": [{"client": 1, "reason": "x", "refused": True}], "loss": 1.0,
     "metrics": {}, "state": {"epsilon": 0.5}},
    {"round": 1, "seconds": 3.0, "heard": 3, "asked": 3, "refused": 0, "bytes_up": 15,
     "bytes_down": 30, "lost": [], "loss": 0.5, "metrics": {}, "state": {"epsilon": 0.9}},
]  # fmt: skip


def test_a_servers_numbers_are_its_run_folders(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('[task]\nname = "X"\n[federation]\nrounds = 9\n')
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROUNDS))
    found = values(exposition(RunMetrics(lambda: [run, tmp_path / "gone"])()))
    expected = {
        "rounds_total": 2, "heard_total": 5, "refused_total": 1, "lost_total": 1,
        "bytes_up_total": 25, "bytes_down_total": 60, "seconds_total": 5.0,
        "last_round_seconds": 3.0, "epsilon": 0.9,
    }  # fmt: skip
    assert {k: found[f'fedlens_{k}{{run="run"}}'] for k in expected} == expected
    assert any(name.startswith('fedlens_run_info{run="run"') for name in found)


def test_somebody_elses_parser_reads_it(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="not installed")
    ledger = Ledger(tmp_path / LEDGER_FILE, ec.generate_private_key(ec.SECP384R1()), sync=False)
    overhead = {"requests": 3, "headers": 40, "bodies": 2}
    ledger.append(Leaving("reply", 0, [b"0123456789"], "job", "r", 1, overhead=overhead))
    odd = Metric("fedlens_odd", "A name", [({"run": 'a"b\\c\nd'}, 64.6484)], "gauge")
    families = parser.text_string_to_metric_families(
        exposition([*SiteMetrics(tmp_path)(), *RunMetrics(list)(), odd])
    )
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found["fedlens_site_bytes_total", "reply"] == 10
    assert found["fedlens_site_overhead_bytes_total",] == 42
    assert found["fedlens_odd", 'a"b\\c\nd'] == 64.6484


def test_files_that_cannot_be_read_are_an_error_and_not_a_missing_page(tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text("damaged")
    port = free_port()
    with Monitor(f"127.0.0.1:{port}", {}, RunMetrics(lambda: noted_runs(tmp_path))):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            got(f"127.0.0.1:{port}", "/metrics")
        assert json.loads(got(f"127.0.0.1:{port}", "/health")) == {"status": "ok"}


def test_elsewhere_only_with_a_certificate(tmp_path: Path) -> None:
    """Bound to all addresses; asked with the authority's certificate, with a stranger's, with none
    and in plain HTTP."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    for folder in (keys, others):
        make_authority(folder)
        make_server_certificate(folder, ["127.0.0.1"])
        make_site_certificate(folder, make_site_key(folder / "site-0")[1])
    port = free_port()
    with pytest.raises(ConfigError, match="could be read by others"):
        Monitor(f"0.0.0.0:{port}", {}, list)
    with Monitor(f"0.0.0.0:{port}", {}, list, front_tls(keys)):
        mine = site_tls(keys / "ca.crt", keys / "site-0.crt", keys / "site-0")
        url = f"https://127.0.0.1:{port}/health"
        with urllib.request.urlopen(url, context=mine, timeout=20) as answer:
            assert json.loads(answer.read())["status"] == "ok"
        stranger = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        for wrong in (stranger, None):
            with pytest.raises(OSError):
                urllib.request.urlopen(url, context=wrong, timeout=20)
        forged = site_tls(keys / "ca.crt", others / "site-0.crt", others / "site-0")
        with pytest.raises(OSError):
            urllib.request.urlopen(url, context=forged, timeout=20)
        with socket.create_connection(("127.0.0.1", port), 20) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            said = b""
            with contextlib.suppress(OSError):
                said = plain.recv(1000)
            assert b"ok" not in said and b"HTTP" not in said
        options = ["--ca", str(keys / "ca.crt"), "--key", str(keys / "site-0")]
        assert invoke(["status", f"127.0.0.1:{port}", *options]) == 0


def test_a_revoked_key_reads_no_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two keys with a certificate of the authority; one is revoked while the endpoint answers. And
    where the list of revoked keys cannot be read, it may name anybody."""
    keys, state = tmp_path / "keys", tmp_path / "superlink"
    make_authority(keys)
    make_server_certificate(keys, ["127.0.0.1"])
    state.mkdir()
    for name in ("site-0", "site-1"):
        make_site_certificate(keys, make_site_key(keys / name)[1])
    port = free_port()

    def ask(name: str) -> int:
        options = ["--ca", str(keys / "ca.crt"), "--key", str(keys / name)]
        return invoke(["status", f"127.0.0.1:{port}", *options])

    revoked = partial(revoked_keys, state)
    with Monitor(f"0.0.0.0:{port}", {}, list, front_tls(keys), revoked):
        assert [ask("site-0"), ask("site-1")] == [0, 0]
        assert invoke(["revoke", str(keys / "site-0.pub"), "--state", str(state)]) == 0
        assert [ask("site-0"), ask("site-1")] == [2, 0]
        assert "does not answer" in capsys.readouterr().err
        (state / REVOKED).write_text("{")
        assert [ask("site-0"), ask("site-1")] == [2, 2]


@pytest.mark.parametrize(
    "health", ['{"status": "\\u001b[2J\\u001b]0;owned\\u0007"}', "[1]", "{", "7", ""]
)
def test_what_an_endpoint_says_is_shown_without_what_a_terminal_obeys(
    health: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = health if self.path == "/health" else "fedlens_x 1\x1b[31m\x1b]52;c;eA==\x07\n"
            self.send_response(200 if text else 500, "OK" if text else "\x1b[2J")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = invoke(["status", f"127.0.0.1:{server.server_port}"])
    server.shutdown()
    server.server_close()
    shown = capsys.readouterr()
    assert code == (0 if "status" in health else 2)
    assert all(c.isprintable() or c == "\n" for c in shown.out + shown.err)
    words = "is no endpoint of FedLens" if health else "does not answer: "
    assert "[2J" in shown.out if code == 0 else words in shown.err
