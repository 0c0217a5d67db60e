"""A run with private parts, used as one of its clients has it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from fedlens import experiment
from fedlens.cli import main as cli
from fedlens.config.recipe import ConfigError
from fedlens.core.weights import read_weights
from fedlens.runs.personal import Ended, evaluate_run, run_of_client

SMALL = {
    "data.images": 120,
    "data.test_images": 24,
    "data.holdout": 0.2,
    "federation.clients": 3,
    "federation.cohort": 3,
    "federation.rounds": 2,
    "federation.workers": 0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fedper"
    experiment("demo", algorithm="fedper", out=folder, **SMALL)
    return folder


def test_a_client_has_the_common_body_and_its_own_head(run: Path) -> None:
    common = read_weights(run / "model.safetensors")
    ended = Ended.read(run)
    with run_of_client(run, 1) as folder:
        whole = read_weights(folder / "model.safetensors")
    heads = {n for n in whole if n.startswith("head.")}
    assert heads and not heads & common.keys() and whole.keys() == heads | common.keys()
    assert all(torch.equal(whole[n], t) for n, t in common.items())
    assert all(torch.equal(whole[n], ended.memories[1]["private"][n]) for n in heads)
    assert not torch.equal(whole["head.bias"], ended.memories[0]["private"]["head.bias"])


def test_evaluating_again_gives_what_the_run_wrote_down(run: Path) -> None:
    """The mean over clients is the last line of metrics.jsonl."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    _, common, clients = evaluate_run(run)
    assert common == {} and sorted(clients) == [0, 1, 2]
    mean = sum(row["accuracy"] for row in clients.values()) / 3
    assert mean == pytest.approx(last["client_accuracy"])


def test_apply_asks_for_a_client_and_uses_its_head(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (20, 20), (200, 30, 30)).save(photos / "a.png")
    labels = tmp_path / "labels.csv"
    assert cli.invoke(["apply", str(run), str(photos), str(labels)]) == 2
    assert "stays with the clients: say whose to use, with --client and one of 0, 1, 2" in (
        capsys.readouterr().err
    )
    assert cli.invoke(["apply", str(run), str(photos), str(labels), "--client", "2"]) == 0
    ((_, label, confidence),) = list(csv.reader(labels.read_text().splitlines()))[1:]
    with run_of_client(run, 2) as folder:
        from fedlens.config import recipe as recipes
        from fedlens.core.weights import load_weights

        task = recipes.read(run).build_task()
        model = load_weights(task.model(), folder / "model.safetensors").eval()  # type: ignore[attr-defined]
    x = torch.tensor([200, 30, 30]).view(1, 3, 1, 1).expand(1, 3, 20, 20) / 255
    with torch.no_grad():
        share, best = model(x).softmax(1)[0].max(0)
    names = json.loads((run / "federation.json").read_text())["facts"]["classes"]
    assert (label, float(confidence)) == (names[int(best)], pytest.approx(float(share), abs=1e-4))


def test_evaluate_prints_a_line_for_each_client(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["evaluate", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(f"client {i}, held out" in out for i in range(3)) and "accuracy" in out


def test_there_is_no_such_client(run: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"client 7 has no model of its own in .*: 0, 1, 2 do"),
        run_of_client(run, 7),
    ):
        pass
    plain = tmp_path / "plain"
    experiment("demo", out=plain, **{**SMALL, "federation.rounds": 1})
    with (
        pytest.raises(ConfigError, match="no client has a model of its own"),
        run_of_client(plain, 0),
    ):
        pass
