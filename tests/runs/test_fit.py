"""`fedlens.fit`: one call from Python gives what a recipe gives."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from toy import flat, same_bits

import fedlens
from fedlens import Client, Federation, Layer, Message, run, stack
from fedlens.algorithms import FedAvg
from fedlens.cli.main import invoke
from fedlens.core.training import survives
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx
from fedlens.runs.job import Interrupted
from fedlens.runs.notebook import NotebookProgress
from fedlens.tasks import Custom


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.body(x)))
        return out


def some(n: int, seed: int) -> TensorDataset:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


CLIENTS = [some(40 + 5 * k, k) for k in range(4)]
TEST = some(200, 99)


def fit(out: Path | None, **more: Any) -> fedlens.FitResult:
    usual: dict[str, Any] = {"test": TEST, "rounds": 3, "lr": 0.3, "batch": 8, "workers": 0}
    given = {"verbose": False, "out": out, **usual, **more}
    return fedlens.fit(Net, F.cross_entropy, CLIENTS, **given)


def test_it_is_the_job_that_its_parts_make(tmp_path: Path) -> None:
    """The same bits as the long form, and everything in the folder that a recipe leaves."""
    result = fit(tmp_path / "run", algorithm="fedprox", mu=0.01)
    algorithm = stack(FedAvg(Custom(Net, F.cross_entropy), lr=0.3, batch=8), FedProx(mu=0.01))
    with Simulator(algorithm, Federation(CLIENTS), workers=0) as engine:
        state = run(algorithm, engine, rounds=3)
    assert same_bits(result.outcome.state, state)
    assert all(
        torch.equal(t, flat(state)[f"model/{n}"]) for n, t in result.model.state_dict().items()
    )
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"}
    assert names >= {"checkpoint", "federation.json", "report.html"}


def test_what_is_learned_is_learned(tmp_path: Path) -> None:
    """Guessing the most frequent class of three (1/4, 1/2, 1/4) gets one half."""
    result = fit(tmp_path / "run", rounds=25)
    assert result.metrics["accuracy"] > 0.8
    x, y = TEST.tensors
    with torch.no_grad():
        by_hand = float((result.model(x).argmax(1) == y).float().mean())
    assert by_hand == pytest.approx(result.metrics["accuracy"])
    assert result.history[-1]["accuracy"] == result.metrics["accuracy"]


def test_closures_and_worker_processes(tmp_path: Path) -> None:
    """A network and a loss that no other process could import, with two workers: as without."""

    class Local(Net):
        pass

    def run_with(workers: int) -> fedlens.FitResult:
        torch.manual_seed(3)
        out = tmp_path / str(workers)
        return fedlens.fit(
            Local(), lambda p, t: F.cross_entropy(p, t), CLIENTS,
            rounds=2, lr=0.3, workers=workers, verbose=False, out=out,
        )  # fmt: skip

    assert same_bits(run_with(0).outcome.state, run_with(2).outcome.state)


def test_the_given_network_is_not_changed(tmp_path: Path) -> None:
    net = Net()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    result = fedlens.fit(
        net, "cross_entropy", CLIENTS, rounds=1, verbose=False, out=tmp_path / "a", workers=0
    )
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert not torch.equal(result.model.body.weight, before["body.weight"])
    assert result.model is not result.model and not result.model.training


def test_the_folder_says_what_was_given(tmp_path: Path) -> None:
    fedlens.fit(
        Net(), lambda p, t: F.cross_entropy(p, t), CLIENTS, test=TEST, rounds=1, verbose=False,
        out=tmp_path / "a", workers=0,
    )  # fmt: skip
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert config["task"]["model"] == "<given in Python: Net, 195 parameters>"  # 8*16+16+16*3+3
    assert config["task"]["loss"] == "<given in Python: <lambda>>"
    assert config["data"]["clients"] == "<given in Python: 4 of TensorDataset, 190 examples>"
    fit(tmp_path / "b", rounds=1)
    named = tomllib.loads((tmp_path / "b" / "config.toml").read_text())
    assert named["task"]["loss"] == "torch.nn.functional:cross_entropy"


def test_the_command_line_says_that_the_objects_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedlens.fit(
        Net(), "cross_entropy", CLIENTS, rounds=1, verbose=False, out=tmp_path / "a", workers=0
    )
    assert invoke(["run", str(tmp_path / "a"), "--resume", "rounds=2"]) == 2
    said = capsys.readouterr().err
    assert "go on with fedlens.fit(" in said and said.count("\n") == 1


def test_resume_with_the_same_objects(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", rounds=4)
    fit(tmp_path / "part", rounds=2)
    again = fit(tmp_path / "part", rounds=4, resume=True)
    assert same_bits(again.outcome.state, whole.outcome.state) and len(again.history) == 4
    with pytest.raises(ValueError, match="was run with other settings"):
        fit(tmp_path / "part", rounds=5, resume=True, test=some(7, 1))
    with pytest.raises(ValueError, match="already holds a run"):
        fit(tmp_path / "part")
    fit(tmp_path / "part", rounds=1, fresh=True)


def test_a_clients_own_network(tmp_path: Path) -> None:
    """Two clients share the body and not the head; the common network has the head it began with,
    and says so."""
    result = fit(tmp_path / "run", rounds=2, algorithm="fedper", own=["last.*"], holdout=0.2)
    with pytest.warns(UserWarning, match=r"stays with the clients .* result.client_model\(0\)"):
        common = result.model
    one, other = result.client_model(0), result.client_model(1)
    assert torch.equal(one.body.weight, common.body.weight)
    assert not torch.equal(one.last.weight, other.last.weight)
    assert not torch.equal(one.last.weight, common.last.weight) and not one.training
    with pytest.raises(ValueError, match="client 9 has no model of its own"):
        result.client_model(9)
    with pytest.raises(ValueError, match="no client has a model of its own"):
        fit(tmp_path / "plain", rounds=1).client_model(0)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    def press(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"after round 2 of 4; .* out='\S+part', resume=True"):
        fit(tmp_path / "part", rounds=4, callbacks=press)
    again = fit(tmp_path / "part", rounds=4, resume=True)
    assert same_bits(again.outcome.state, fit(tmp_path / "whole", rounds=4).outcome.state)


def test_resume_and_fresh_without_a_folder_mean_the_last_run_and_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the command line."""
    monkeypatch.chdir(tmp_path)
    assert fit(None, rounds=1).folder == Path("runs/net")
    assert fit(None, rounds=1).folder == Path("runs/net-2")
    on = fit(None, rounds=2, resume=True)
    assert on.folder == Path("runs/net-2") and len(on.history) == 2
    assert fit(None, rounds=1, fresh=True).folder == Path("runs/net")


def test_callbacks_hear_of_each_round_and_may_end_it(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def stop(row: dict[str, Any]) -> bool:
        seen.append((row["round"], row["accuracy"]))
        return row["round"] == 2

    result = fit(tmp_path / "run", rounds=9, callbacks=[stop, lambda row: row.clear()])
    assert [r for r, _ in seen] == [1, 2] and len(result.history) == 2
    assert [r["accuracy"] for r in result.history] == [a for _, a in seen]
    assert result.outcome.summary["rounds"] == 2 and not result.outcome.summary["interrupted"]
    on = fit(tmp_path / "run", rounds=9, resume=True)
    assert len(on.history) == 9 and same_bits(
        on.outcome.state, fit(tmp_path / "b", rounds=9).outcome.state
    )


def test_a_layer_of_ones_own(tmp_path: Path) -> None:
    """Objects and classes, on FedAvg unless there is a base. This layer halves every update, so a
    round with it goes half as far as one without: by hand, from the saved weights."""

    @dataclass
    class Half(Layer):
        share: float = 0.5

        def client_step(self, message: Message, client: Client) -> Message:
            reply = self.inner.client_step(message, client)
            return reply.put(delta={n: self.share * t for n, t in reply.trees["delta"].items()})

    start = Custom(Net, "mse_loss")
    first = FedAvg(start).init().trees["model"]
    plain = fit(tmp_path / "plain", rounds=1)
    for k, algorithm in enumerate((Half(), Half, ["fedavg", Half(0.5)])):
        half = fit(tmp_path / str(k), rounds=1, algorithm=algorithm)
        for n, t in half.model.state_dict().items():
            whole = plain.model.state_dict()[n] - first[n]
            torch.testing.assert_close(t - first[n], whole / 2, rtol=1e-4, atol=1e-6)
    assert half.outcome.setup.stack == "FedAvg + Half"
    assert "share = 0.5" in (tmp_path / "2" / "config.toml").read_text()
    both = fit(tmp_path / "both", rounds=1, algorithm=[Half(), FedProx(mu=0.0)], share=1.0)
    torch.testing.assert_close(both.model.state_dict(), plain.model.state_dict())


def test_one_data_set_is_divided(tmp_path: Path) -> None:
    result = fedlens.fit(
        Net, "cross_entropy", some(120, 0), n_clients=6, partition="dirichlet", alpha=0.3, rounds=1,
        holdout=0.2, personal=True, verbose=False, workers=0, out=tmp_path / "a",
    )  # fmt: skip
    held = json.loads((tmp_path / "a" / "federation.json").read_text())
    assert sum(held["examples"]) + sum(held["held_out"]) == 120 and held["clients"] == 6
    assert "client_accuracy" in result.metrics


def test_the_history_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fit(tmp_path / "run").history
    table = history.table()
    assert list(table.index) == [1, 2, 3]
    assert table["accuracy"].tolist() == [row["accuracy"] for row in history]
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    assert history.table() is history


def test_how_it_shows_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(tmp_path / "run", verbose=True)
    assert "round 3/3" in capsys.readouterr().out
    text = repr(result)
    assert "FedAvg" in text and f"{result.metrics['accuracy']:.4f}" in text
    assert "<table>" in result._repr_html_() and str(result.folder) in result._repr_html_()
    assert dict(result.__rich_repr__())["rounds"].startswith("3, 4 clients")
    report = result.report()
    assert os.fspath(report) == str(tmp_path / "run" / "report.html") == repr(report)
    inline = re.search(r'srcdoc="(.*?)" style', report._repr_html_(), re.DOTALL)
    assert inline and html.unescape(inline[1]) == report.path.read_text()
    result.save(tmp_path / "weights.safetensors")
    assert load_file(tmp_path / "weights.safetensors").keys() == Net().state_dict().keys()


def test_a_notebook_sees_the_rounds(tmp_path: Path) -> None:
    shown: list[str] = []
    listener = NotebookProgress(shown.append)
    config = fit(tmp_path / "a").outcome.setup.config
    from fedlens.runs.job import run_job

    run_job(config, tmp_path / "b", listener=listener)
    assert "value='3'" in shown[-1] and "accuracy" in shown[-1] and "report.html" in shown[-1]
    assert "value='0'" in shown[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"algorithm": "fedprx"}, "did you mean FedProx"),
        ({"lr": -1}, "must be a number above 0"),
        ({"learning_rate": 1}, "nothing here is called 'learning_rate'"),
        ({"engine": "flower"}, "fit cannot send"),
        ({"algorithm": 3}, "int is neither a layer nor an algorithm"),
        ({"algorithm": []}, "empty list"),
        ({"rounds": 0.5}, "must be a whole number"),
        ({"n_clients": 7}, "4 data sets are given"),
    ],
)
def test_what_cannot_be_meant_leaves_no_folder(tmp_path: Path, more: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_said_before_any_work(tmp_path: Path) -> None:
    """A network of the wrong width, a loss that raises, one that gives a number an example."""

    def go(model: Any, loss: Any) -> None:
        fedlens.fit(model, loss, CLIENTS, rounds=1, verbose=False, out=tmp_path / "a")

    with pytest.raises(ValueError, match="shapes cannot be multiplied"):
        go(nn.Linear(7, 3), "cross_entropy")
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        go(Net(), lambda p, t: 1 / 0)
    with pytest.raises(ValueError, match="one number, a mean over the batch"):
        go(Net(), nn.CrossEntropyLoss(reduction="none"))


def test_what_a_device_cannot_do_is_found_out_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal instruction ends the child and is a sentence here; what only raises does not."""
    assert survives(lambda: os.kill(os.getpid(), signal.SIGILL)) == "SIGILL"
    assert survives(lambda: None) is None
    assert survives(lambda: 1 / 0) is None  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(
        FedAvg, "_try_mixed", lambda self, data: os.kill(os.getpid(), signal.SIGILL)
    )
    with pytest.raises(ValueError, match=r"ended with SIGILL\): set mixed_precision=false"):
        fit(tmp_path / "run", mixed_precision=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
