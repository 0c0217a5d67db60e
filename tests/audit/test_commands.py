"""`fedlens run --record-messages` and `fedlens audit`: what they write, print and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedlens.audit.evidence import collect, open_run
from fedlens.cli import main as cli
from fedlens.engines.recorder import read_exchanges

SCENE = ("image=camera", "data.size=64", "clients=3", "rounds=6", "evaluate_every=0")
Said = tuple[int, str, str]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Said:
        code = cli.invoke(list(args))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_recorded_messages_are_those_of_a_replay(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    """Recorded by two worker processes, replayed in this one: the same bits, and files that the
    safetensors library reads."""
    from safetensors.torch import load_file

    code, _, _ = command("run", "deblur", *SCENE, "workers=2", "--record-messages", "--out", "r")
    assert code == 0
    recorded = read_exchanges(tmp_path / "r" / "messages")
    assert [e.round for e in recorded] == list(range(6))
    setup = open_run(tmp_path / "r")
    (tmp_path / "r" / "messages").rename(tmp_path / "kept")
    replayed = collect(tmp_path / "r", setup, 6)
    assert not replayed.recorded and len(replayed.exchanges) == 6
    for a, b in zip(recorded, replayed.exchanges, strict=True):
        assert sorted(a.replies) == sorted(b.replies) == [0, 1, 2]
        for k in a.replies:
            assert a.replies[k].to_bytes() == b.replies[k].to_bytes()
    arrays = load_file(tmp_path / "kept" / "round-0002" / "client-0001.safetensors")
    assert torch.equal(arrays["w/camera"], recorded[2].replies[1].trees["w"]["camera"])


def test_an_audit_writes_its_page_and_says_what_it_found(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    assert command("run", "deblur", *SCENE, "--out", "r")[0] == 0
    code, out, _ = command("audit", "r", "--client", "1", "--rounds", "6")
    assert code == 0
    assert "An attack that fails proves nothing" in out and "audit.html" in out
    numbers = json.loads((tmp_path / "r" / "audit.json").read_text())
    plain, *others = [row for row in numbers["rows"] if row["attack"] == "feddeblur"]
    assert plain["protection"] == "plain" and plain["score"] > plain["baseline"] + 5
    assert [row["protection"] for row in others][-1] == "SecureSum"
    assert others[-1]["score"] < plain["score"] - 5
    page = (tmp_path / "r" / "audit.html").read_text()
    assert page.count("data:image/png;base64,") >= 3
    assert "http" not in page.replace("http-equiv", "")
    assert "proves nothing" in page and "Learned nothing" in page
    assert numbers["headline"] in (tmp_path / "r" / "report.html").read_text()
    (tmp_path / "r" / "audit.json").write_text("{damaged")
    assert command("report", "r")[0] == 0  # the report then has no such section
    assert numbers["headline"] not in (tmp_path / "r" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "not a run folder"),
        (("r", "--client", "9"), "client 9 sent nothing"),
        (("r", "--attack", "feddeblur,lables"), "labels"),
        (("r", "--attack", "feddeblr"), "feddeblur"),
        (("r", "--budget", "0"), "--budget"),
        (("r", "--rounds", "0"), "--rounds"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    command: Callable[..., Said], arguments: tuple[str, ...], said: str
) -> None:
    assert command("run", "deblur", *SCENE, "--out", "r")[0] == 0
    code, _, err = command("audit", *arguments)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_a_damaged_message_is_named(command: Callable[..., Said], tmp_path: Path) -> None:
    assert command("run", "deblur", *SCENE, "--record-messages", "--out", "r")[0] == 0
    broken = tmp_path / "r" / "messages" / "round-0003" / "client-0001.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    code, _, err = command("audit", "r")
    assert code == 2 and "round-0003/client-0001.safetensors" in err


def test_a_message_under_another_name_is_refused(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    """Somebody who swaps two files must not make one client look like another."""
    assert command("run", "deblur", *SCENE, "--record-messages", "--out", "r")[0] == 0
    place = tmp_path / "r" / "messages" / "round-0000"
    (place / "client-0000.safetensors").write_bytes(
        (place / "client-0002.safetensors").read_bytes()
    )
    code, _, err = command("audit", "r")
    assert code == 2 and "it comes from client 2" in err


def test_attacks_are_listed(command: Callable[..., Said]) -> None:
    code, out, _ = command("list", "attacks")
    assert code == 0 and "feddeblur" in out


def test_a_run_behind_secure_sum_is_judged_by_the_sum(
    command: Callable[..., Said], tmp_path: Path
) -> None:
    """What was recorded is masked, so the run is replayed without the mask and the headline is
    about the sum."""
    code, _, err = command("run", "deblur", *SCENE, "--secure", "--record-messages", "--out", "r")
    assert code == 0, err
    code, out, err = command("audit", "r", "--client", "1", "--rounds", "6")
    assert code == 0 and "Behind SecureSum, which this run had" in out, err
    numbers = json.loads((tmp_path / "r" / "audit.json").read_text())
    assert not numbers["recorded"]
