"""The board as a server: what it answers, what it refuses, and that it only reads."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from run_folders import write_run

pytest.importorskip("starlette", reason='the board needs "fedlens[board]"')
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from fedlens.cli import board as cli_board
from fedlens.report.board.app import Board, make_app


@pytest.fixture
def root(tmp_path: Path) -> Path:
    here = tmp_path / "runs"
    write_run(here / "a", rounds=4, clients=5, cohort=4)
    write_run(here / "sweep" / "b", rounds=2, clients=5, cohort=4, layer="FedProx", pictures=False)
    (here / "empty").mkdir()
    (here / "notes").mkdir()
    (here / "notes" / "todo.txt").write_text("x")
    (tmp_path / "secret.png").write_bytes(b"secret")
    write_run(tmp_path / "elsewhere", rounds=1)
    (here / "link").symlink_to(tmp_path / "elsewhere")
    return here


@pytest.fixture
def client(root: Path) -> TestClient:
    return TestClient(make_app(root), base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_the_list(client: TestClient) -> None:
    runs = {c["name"]: c for c in client.get("/api/runs").json()["runs"]}
    assert {n: c["status"] for n, c in runs.items()} == {
        "a": "finished",
        "sweep/b": "finished",
        "empty": "empty",
        "notes": "not a run",
    }
    assert runs["sweep/b"]["title"]["algorithm"] == ["FedAvg", "FedProx"] and runs["a"]["done"] == 4


def test_a_run_and_its_pictures(client: TestClient, root: Path) -> None:
    view = client.get("/api/run", params={"name": "a"}).json()["views"][0]
    assert len(view["curves"]["loss"]) == 4
    answer = client.get(view["pictures"][0]["images"][0])
    assert (
        answer.headers["content-type"] == "image/png"
        and answer.content == (root / "a" / "pictures" / "00-00.png").read_bytes()
    )


def test_what_is_no_run_is_shown_as_what_it_is(client: TestClient) -> None:
    views = client.get("/api/run", params={"name": ["empty", "notes"]}).json()["views"]
    assert [v["status"] for v in views] == ["empty", "not a run"]


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere",
        "a/../../elsewhere",
        "/etc",
        "link",
        "",
        "absent",
        "a/config.toml",
        "a\0",
        "x" * 5000,
        "..",
        "%2e%2e",
    ],
)
def test_no_run_outside_the_directory(client: TestClient, name: str) -> None:
    for path in ("/api/run", "/picture", "/report", "/events"):
        answer = client.get(path, params={"name": name, "run": name or "../x", "file": "00-00.png"})
        assert answer.status_code == 404 and answer.json() in (
            {"error": "There is no such run."},
            {"error": "There is no such picture."},
        )


@pytest.mark.parametrize(
    "file",
    [
        "../config.toml",
        "../../../secret.png",
        "index.json",
        "",
        ".",
        "/etc/hostname",
        "out.png",
        "a\0.png",
    ],
)
def test_no_file_but_pictures(client: TestClient, root: Path, file: str) -> None:
    (root / "a" / "pictures" / "out.png").symlink_to(root.parent / "secret.png")
    answer = client.get("/picture", params={"run": "a", "file": file})
    assert answer.status_code == 404 and b"secret" not in answer.content


def test_a_pictures_folder_that_is_a_link_out(client: TestClient, root: Path) -> None:
    (root / "sweep" / "b" / "pictures").symlink_to(root.parent / "elsewhere" / "pictures")
    assert client.get("/picture", params={"run": "sweep/b", "file": "00-00.png"}).status_code == 404


def test_static_files_are_a_fixed_list(client: TestClient) -> None:
    assert client.get("/static/page.css").status_code == 200
    for name in ("report.html", "..%2freport.py", "%2e%2e/report.py"):
        assert client.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_it_only_reads(client: TestClient, root: Path, method: str) -> None:
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    for path in (
        "/",
        "/api/runs",
        "/api/run?name=a",
        "/picture?run=a&file=00-00.png",
        "/report?run=a",
    ):
        assert getattr(client, method)(path).status_code == 405
        assert client.get(path).status_code == 200
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_another_site_cannot_reach_it_under_its_own_name(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/api/runs", headers={"host": "localhost:8600"}).status_code == 200


def test_the_report_can_be_saved(client: TestClient) -> None:
    answer = client.get("/report", params={"run": "a"})
    assert (
        answer.headers["content-disposition"] == 'attachment; filename="a.html"'
        and "data:image/png;base64," in answer.text
    )


def test_only_what_changed_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlens.report import page_data as views

    board, read = Board(root), []
    real = views.run_card
    monkeypatch.setattr(
        views, "run_card", lambda path, name: (read.append(name), real(path, name))[1]
    )
    board.cards()
    read.clear()
    board.cards()
    assert read == []
    with (root / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "loss": 0.5}) + "\n")
    assert board.cards()["a"]["done"] == 5 and read == ["a"]


def test_broken_files_do_not_take_the_list_down(client: TestClient, root: Path) -> None:
    with (root / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 1' + "0" * 400 + "}\n" + "[" * 100_000 + "\n")
    (root / "sweep" / "b" / "summary.json").write_text(
        '{"metrics": {"accuracy": 1' + "0" * 400 + "}}"
    )
    write_run(root / "c", rounds=1)
    (root / "c" / "config.toml").write_text("x = " + "[" * 100_000)
    (root / "c" / "pictures" / "index.json").write_text(json.dumps([{"files": ["a\0.png"]}]))
    assert {"a", "sweep/b", "c"} <= {c["name"] for c in client.get("/api/runs").json()["runs"]}
    views = client.get("/api/run", params={"name": ["a", "sweep/b", "c"]}).json()["views"]
    assert all(v["problems"] for v in views)


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlens.report import page_data as views

    real, board = views.read_overview, Board(root)

    def fail(path: Path) -> object:
        if path.name == "a":
            raise KeyError("whatever it is")
        return real(path)

    monkeypatch.setattr(views, "read_overview", fail)
    cards = board.cards()
    assert (
        cards["a"]["status"] == "broken"
        and cards["a"]["problem"] == "This folder could not be read (KeyError)."
    )
    assert cards["sweep/b"]["status"] == "finished"
    monkeypatch.setattr(views, "read_overview", real)
    assert board.cards()["a"]["status"] == "finished"


def test_a_name_that_is_not_utf8_is_listed_but_not_opened(client: TestClient, root: Path) -> None:
    write_run(root / os.fsdecode(b"bad\xffname"), rounds=1, pictures=False)
    text = client.get("/api/runs").text
    cards = {c["name"]: c for c in json.loads(text)["runs"]}
    assert cards["a"]["status"] == "finished" and all(name.encode() for name in cards)
    assert (
        cards["bad\\udcffname"]["status"] == "broken"
        and "not UTF-8" in cards["bad\\udcffname"]["problem"]
    )
    assert client.get("/api/run", params={"name": "bad\\udcffname"}).status_code == 404


def test_a_board_over_a_folder_whose_name_is_not_utf8(root: Path) -> None:
    odd = root.rename(root.parent / os.fsdecode(b"odd\xff"))
    client = TestClient(make_app(odd), base_url="http://127.0.0.1")
    assert client.get("/api/runs").json()["root"] == "odd\\udcff"
    for path in ("/api/run?name=a", "/report?run=a"):
        assert client.get(path).status_code == 200


def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no folder"):
        cli_board.board(tmp_path / "absent")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="The board cannot listen on"):
            cli_board.board(tmp_path, port=taken.getsockname()[1])
