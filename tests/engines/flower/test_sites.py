"""Flower for real: a SuperLink and SuperNodes on 127.0.0.1, TLS and node authentication on, and the
simulator's bits at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployment import Deployment, deployment
from flower_kills import kill_often
from stacks import STACKS
from toy import Replay, drawing_as, same_bits, toy_federation

from fedlens import Message, run
from fedlens.config import recipe as recipes
from fedlens.engines.loopback import Loopback
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.folder import read_records
from fedlens.runs.job import run_job
from fedlens.sites.logs import TOO_FEW
from fedlens.trust.departures import read_departures

pytest.importorskip("flwr")
from fedlens.engines.flower import engine as flower

pytestmark = pytest.mark.timeout(1200)
# seconds until something that should happen counts as not happening; a busy machine is no failure
WAIT = 600.0


def job(here: Deployment, name: str, **config: Any) -> Path:
    """Write the app of one run; returns its output folder."""
    out = here.folder / name
    out.mkdir(exist_ok=True)
    facts = {
        "stack": "scaffold",
        "clients": 2,
        "rounds": 2,
        "delay": 0.0,
        "timeout": 0.0,
        "wait": WAIT,
        "personal": False,
        "bindings": json.dumps({k: v.decode() for k, v in here.bindings().items()}),
        "job": name,
        "out": str(out),
        **config,
    }
    flower.write_app(here.folder / f"app-{name}", "toy_server:main", "toy_app:make_site", facts)
    (here.folder / "jobs").mkdir(exist_ok=True)
    (here.folder / "jobs" / f"{name}.json").write_text(json.dumps(facts))
    return out


def finished(here: Deployment, out: Path) -> Message:
    here.wait_for(
        lambda: (out / "done").exists() or (out / "failed").exists(),
        WAIT,
        f"the end of {out.name}",
    )
    assert (out / "done").exists(), (out / "failed").read_text()
    return Message.from_bytes((out / "state").read_bytes())


def rounds(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def expected(stack: str, clients: int, number: int) -> Message:
    algorithm = STACKS[stack].make()
    return run(algorithm, Loopback(algorithm, toy_federation(clients)), number, seed=3)


def replayed(stack: str, clients: int, out: Path) -> Message:
    algorithm = STACKS[stack].make()
    engine = Replay(algorithm, toy_federation(clients))
    engine.heard = [r["heard"] for r in rounds(out)]
    return run(algorithm, engine, len(engine.heard), seed=3)


def working(out: Path, client: int, number: int) -> bool:
    return any(out.glob(f"working-{client}-{number}-*"))


@pytest.fixture(scope="module")
def two_sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """For the tests that break nothing: starting a deployment takes longer than they do."""
    with deployment(tmp_path_factory.mktemp("flower")) as here:
        here.serve()
        here.site(0)
        here.site(1)
        yield here


@pytest.fixture
def two_supernodes(tmp_path: Path) -> Iterator[Deployment]:
    """Flower's own, for apps that bring their ClientApp along."""
    with deployment(tmp_path) as here:
        here.serve()
        here.supernode(0)
        here.supernode(1)
        yield here


def test_scaffold_ends_in_the_simulators_bits(two_sites: Deployment) -> None:
    """Two rounds: in the second one the control variates come from the sites' own disks."""
    here = two_sites
    out = job(here, "short")
    here.submit(here.folder / "app-short", "run-short")
    assert same_bits(finished(here, out), expected("scaffold", 2, 2))
    assert [r["heard"] for r in rounds(out)] == [[0, 1], [0, 1]] and not any(
        r["lost"] for r in rounds(out)
    )


METHODS = {
    "fedvsr": [
        "clients=2",
        "cohort=1",
        "rounds=4",
        "data.clips=2",
        "data.groups=2",
        "data.height=32",
        "data.width=32",
        "data.crop=16",
    ],
    "deblur-partial": ["clients=2", "rounds=3", "evaluate_every=2", "data.size=48"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_in_the_simulators_bits(two_sites: Deployment, name: str) -> None:
    """Recipes as `fedlens run --engine flower` sends them: trained networks, and a scene whose
    state stays on the nodes. What metrics.jsonl says of every round is equal too, bytes on the wire
    and all, up to the seconds. For a partial cohort the simulator gets the server's secret."""
    here, config = two_sites, recipes.read(name, METHODS[name])
    out = here.folder / name
    facts: dict[str, Any] = {
        "name": name,
        "text": config.to_toml(),
        "out": str(out),
        "resume": False,
        "fresh": False,
        "wait": WAIT,
        "least": 2,
        "forgive": False,
        "bindings": json.dumps({k: v.decode() for k, v in here.bindings().items()}),
    }
    flower.write_app(
        here.folder / f"app-{name}",
        "fedlens.sites.server:run_server",
        "fedlens.sites.site:make_site",
        facts,
    )
    here.submit(here.folder / f"app-{name}", f"run-{name}")
    here.wait_for(lambda: (out / "summary.json").exists(), WAIT, f"the end of {name}")
    wanted = run_job(config, here.folder / f"{name}-simulated", engine=drawing_as(out))
    found = Checkpoint(out / "checkpoint").load()
    assert found and same_bits(found[0].state, wanted.state)
    real, simulated = (read_records(f / "metrics.jsonl") for f in (out, wanted.folder))
    for a, b in zip(real, simulated, strict=True):
        assert b["bytes_up"] > 0 < b["bytes_down"]
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


@pytest.mark.slow
def test_heads_stay_private_and_are_evaluated_where_they_are(two_sites: Deployment) -> None:
    here = two_sites
    out = job(here, "heads", stack="fedvssl", personal=True)
    here.submit(here.folder / "app-heads", "run-heads")
    assert same_bits(finished(here, out), expected("fedvssl", 2, 2))
    assert all("client_accuracy" in r["metrics"] for r in rounds(out))


@pytest.mark.slow
def test_the_example_app_runs_both_ways(two_supernodes: Deployment) -> None:
    """`flwr run examples/flower_app` as it is; then with the user's own ClientApp and the stack as
    a Strategy.
    """
    here, example = two_supernodes, Path(__file__).resolve().parents[3] / "examples" / "flower_app"
    own = here.folder / "own"
    shutil.copytree(example, own)
    text = (own / "pyproject.toml").read_text()
    (own / "pyproject.toml").write_text(
        text.replace("client_app:app", "own_client_app:app").replace(
            "strategy = false", "strategy = true"
        )
    )
    here.start("first", "flwr", "run", str(example), "here", "--stream")
    here.wait_for(
        lambda: "round 1: loss" in here.log("first"), WAIT, "the second round of the example"
    )
    here.start("second", "flwr", "run", str(own), "here", "--stream")
    here.wait_for(
        lambda: "Strategy execution finished" in here.log("second"),
        WAIT,
        "the end of Flower's own loop",
    )
    assert here.log("second").count("aggregate_train: Received 2 results and 0 failures") == 2


@pytest.mark.slow
def test_a_deadline_leaves_the_slow_behind(two_sites: Deployment) -> None:
    """The only client takes longer than a round may: it is lost, and a run that hears nobody ends
    with that client's reason instead of an untrained model.
    """
    here = two_sites
    out = job(here, "slow", clients=1, rounds=1, delay=40.0, timeout=12.0, stack="fedavg")
    here.submit(here.folder / "app-slow", "run-slow")
    ended = [out / "done", out / "failed"]
    here.wait_for(lambda: any(file.exists() for file in ended), WAIT, "the end")
    # by our clock, or by Flower's, whose message expires with the round
    why = "nobody was heard in round 1: client 0: no answer within"
    assert (out / "failed").read_text().startswith(why)


@pytest.mark.slow
def test_a_node_dies_and_another_comes_late(tmp_path: Path) -> None:
    """Site 2 joins when the run is under way; site 1 is killed in the middle of a round and comes
    back with its memory. Whoever is heard, the bits are those of a federation in which just they
    were heard."""
    with deployment(tmp_path, 3) as here:
        here.serve()
        here.site(0)
        here.site(1)
        here.wait_for(
            lambda: all("joined" in here.log(f"site-{k}") for k in (0, 1)),
            WAIT,
            "two sites",
        )
        out = job(here, "bad-day", clients=3, rounds=7, delay=2.0, wait=60.0)
        here.submit(here.folder / "app-bad-day")
        here.wait_for(lambda: working(out, 1, 1), WAIT, "round 1 at site 1")
        here.stop("site-1", signal.SIGKILL)
        here.site(2)
        here.wait_for(lambda: len(rounds(out)) > 1, WAIT, "the end of round 1")
        here.site(1)
        final = finished(here, out)
        lines = rounds(out)
        reasons = {(r["round"], client): why for r in lines for client, why in r["lost"]}
        assert lines[0]["heard"] == [0, 1] and reasons[0, 2] == "has not joined"
        assert 1 not in lines[1]["heard"] and reasons[1, 1].startswith("has vanished")
        assert lines[-1]["heard"] == [0, 1, 2], lines
        assert same_bits(final, replayed("scaffold", 3, out))


@pytest.mark.slow
def test_a_site_killed_at_work_says_so_when_it_is_back(tmp_path: Path) -> None:
    """Killed in the middle of round 1 and started again at once, long before anybody misses it. Its
    first word is that nobody need wait for that reply; the round goes on, and it takes part in the
    next one. The bits are those of a federation that heard just these."""
    with deployment(tmp_path) as here:
        here.serve()
        here.site(0)
        here.site(1)
        out = job(here, "back", rounds=3, delay=3.0)
        here.submit(here.folder / "app-back")
        here.wait_for(lambda: working(out, 1, 1), WAIT, "round 1 at site 1")
        here.stop("site-1", signal.SIGKILL)
        here.site(1)
        final = finished(here, out)
        lines = rounds(out)
        assert [r["heard"] for r in lines] == [[0, 1], [0], [0, 1]]
        assert lines[1]["lost"] == [[1, "was restarted while it worked"]]
        assert same_bits(final, replayed("scaffold", 2, out))


@pytest.mark.slow
def test_a_stranger_stays_outside(tmp_path: Path) -> None:
    """A key that is not on the server's list, a site that calls itself somebody else, and a site
    with another recipe: all refused, in words.
    """
    with deployment(tmp_path, 3) as here:
        here.make_key("site-9")  # has a certificate, and is not on the list
        here.serve()
        here.site(0)
        here.site(9, client=1)
        stranger = here.running["site-9"]
        here.wait_for(lambda: stranger.poll() is not None, WAIT, "the stranger's refusal")
        assert stranger.returncode != 0
        assert "refused this site's key" in here.log("site-9")
        assert "refused a stranger: a certificate whose key is not on the list" in here.log(
            "server"
        )
        here.site(1, agreed="something else")
        here.site(2, client=0)
        out = job(here, "strangers", rounds=1, wait=60.0)
        here.submit(here.folder / "app-strangers")
        finished(here, out)
        said = here.log("run")
        assert (
            "the site of client 2 was not let in: calls itself client 0, but its key belongs to"
            " client 2" in said
        )
        assert (
            "the site of client 1 was not let in: agreed to another recipe; these keys differ:"
            " unknown" in said
        )
        assert rounds(out)[0]["heard"] == [0] and rounds(out)[0]["lost"] == [[1, "has not joined"]]


@pytest.mark.slow
def test_a_superlink_that_restarts_in_the_middle_and_a_server_that_dies(tmp_path: Path) -> None:
    """First the SuperLink is killed with a round under way and started again from its database;
    then the run itself is killed and submitted anew from its last checkpoint. The bits are those of
    an undisturbed run."""
    with deployment(tmp_path) as here:
        here.serve()
        here.site(0)
        here.site(1)
        out = job(here, "twice", rounds=6, delay=1.0)
        here.submit(here.folder / "app-twice")
        here.wait_for(lambda: working(out, 0, 1), WAIT, "round 1 at site 0")
        here.stop("server", signal.SIGKILL)
        here.serve()
        before = len(rounds(out))
        with contextlib.suppress(
            AssertionError
        ):  # Flower may give a run up with its SuperLink: it is resumed below all the same
            here.wait_for(
                lambda: len(rounds(out)) > before + 1 or (out / "done").exists(),
                150,
                "two more rounds",
            )
        print("rounds before and after the SuperLink's death:", before, len(rounds(out)))
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if "flwr-serverapp" in command and f":{here.inner}" in command:
                process.kill()
        (out / "done").unlink(missing_ok=True)
        here.submit(here.folder / "app-twice", "again")
        assert same_bits(finished(here, out), expected("scaffold", 2, 6))


@pytest.mark.slow
def test_kills_at_random_moments_leave_the_bits_alone(tmp_path: Path) -> None:
    """`python tests/flower_kills.py` makes a hundred of them."""
    found = kill_often(tmp_path, 6, seed=1)
    print(found)
    assert found["same_bits"] and sum(found["kills"].values()) == 6 <= found["rounds"]


@pytest.mark.slow
def test_the_walkthrough_works_as_written(tmp_path: Path) -> None:
    """docs/sites.md: every `sh` block, in order, in one empty folder: three hospitals, then two. A
    line that ends in & runs on in the background.
    """
    text = (Path(__file__).resolve().parents[3] / "docs" / "sites.md").read_text()
    blocks = [b.split("```")[0] for b in text.split("```sh\n")[1:]]
    assert len(blocks) >= 5
    here = Deployment(tmp_path)
    script = (
        "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"
        + "\n".join(blocks)
    )
    here.env["FEDLENS_HOME"] = str(tmp_path / "fedlens-home")
    del here.env["FLWR_HOME"]
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "fedlens"
    command.write_text('#!/bin/sh\nexec python -m fedlens.cli.main "$@"\n')
    command.chmod(0o755)
    here.env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{here.env['PATH']}"
    work = tmp_path / "work"
    work.mkdir()
    with open(tmp_path / "walkthrough.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=work,
            env=here.env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    here.running["walkthrough"] = process
    try:
        process.wait(900)
        said = here.log("walkthrough")
        assert process.returncode == 0, said[-5000:]
        three, two = said.split("SecureSum hides a site among three or more", 1)
        assert "finished:completed" in three and "finished:completed" in two
        # the three sites and the run say it, and so do the two sites, their server and their run
        assert three.count("SecureSum is on: the server sees sums over all sites") == 4
        assert said.count(TOO_FEW) == 4 and "SecureSum is on" not in two
        # what left shows it too
        ledgers = [work / f / "sites/site-0" for f in ("hospital-a", "hospital-a/pair")]
        left = [read_departures(f / "ledger.jsonl") for f in ledgers]
        assert left[0].trees.keys() == {"masked"} and not left[0].readable
        assert left[1].trees.keys() == {"delta", "control"} and not left[1].protection
    finally:
        here.close()
