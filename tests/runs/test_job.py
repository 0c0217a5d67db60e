"""Jobs: what a run folder holds, and how a run ends, goes on or is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import Toy, same_bits, toy_federation
from toy_job import RECIPE, write_recipe

import fedlens
from fedlens import Heard, Lost, Message, Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.cli import main as cli
from fedlens.config.recipe import ConfigError
from fedlens.core.files import lock_folder
from fedlens.core.picture import Picture
from fedlens.core.rounds import Stalled
from fedlens.data.images.tensors import Tensors
from fedlens.data.source import Source
from fedlens.engines.simulator import Simulator
from fedlens.layers import LossAware, Scaffold
from fedlens.runs import job, records
from fedlens.runs.folder import free_folder, newest_folder
from fedlens.runs.job import Interrupted, Outcome
from fedlens.runs.listener import Listener


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def go(recipe: Path, out: Path, **more: Any) -> Outcome:
    return fedlens.experiment(recipe, out=out, **more)


def test_a_job_is_the_same_as_its_parts(recipe: Path, tmp_path: Path) -> None:
    """The five-line form and the long one end in the same bits."""
    outcome = go(recipe, tmp_path / "run")
    algorithm = stack(FedAvg(Toy(), lr=0.1, batch=8), Scaffold())
    with Simulator(algorithm, toy_federation(6), workers=0) as engine:
        state = run(algorithm, engine, rounds=4)
    assert same_bits(outcome.state, state)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in state.trees["model"].items())


def test_pictures_come_while_the_run_is_under_way_and_change_no_bits(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rounds, evaluated in each: pictures after the first three and at the end, although they
    use up random numbers; and a task whose pictures fail while the run is under way is asked once
    more, at the end."""
    plain = go(recipe, tmp_path / "plain")
    drawn: list[int] = []

    def pictures(self: Toy, result: Any, federation: Any) -> list[Picture]:
        drawn.append(len(drawn))
        return [Picture("noise", [torch.rand(3, 4, 4)])]

    monkeypatch.setattr(Toy, "pictures", pictures)
    monkeypatch.setattr(job, "PICTURE_DELAY", 0.0)
    monkeypatch.setattr(job, "PICTURE_SHARE", 1e9)
    watched = go(recipe, tmp_path / "watched", evaluate_every=1)
    assert drawn == [0, 1, 2, 3] and (tmp_path / "watched" / "pictures" / "index.json").is_file()
    assert same_bits(plain.state, watched.state)

    def failing(self: Toy, result: Any, federation: Any) -> list[Picture]:
        drawn.append(len(drawn))
        if len(drawn) == 5:
            raise RuntimeError("no")
        return []

    monkeypatch.setattr(Toy, "pictures", failing)
    assert same_bits(go(recipe, tmp_path / "failing", evaluate_every=1).state, plain.state)
    assert len(drawn) == 6


def test_short_runs_are_not_held_up_by_pictures(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(Toy, "pictures", lambda self, result, federation: drawn.append(1) or [])
    go(recipe, tmp_path / "run", evaluate_every=1)
    assert len(drawn) == 1


def test_the_folder_holds_what_the_contract_says(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    outcome = go(recipe, out, cohort=3, evaluate_every=2, personal=True)
    lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    assert [x["round"] for x in lines] == [0, 1, 2, 3] and lines == list(outcome.rounds)
    assert [bool(x["metrics"]) for x in lines] == [False, True, False, True]
    assert list(lines[1]["metrics"]) == [
        "accuracy",
        "client_accuracy",
        "client_accuracy_spread",
        "client_accuracy_worst",
    ]
    # BatchNorm: 2 weights, 2 buffers
    model, control = 16 * 8 + 16 + 16 * 4 + 3 * 16 + 3, 16 * 8 + 16 + 2 * 16 + 3 * 16 + 3
    size = 4 * (model + control) + 8  # and one 64-bit counter
    # every other round all six clients evaluate: the same goes down to each, metrics come up
    assert [x["evaluation_bytes"] for x in lines] == [0, 6 * size, 0, 6 * size]
    for x in lines:
        assert (x["asked"], x["heard"], x["refused"], x["lost"], x["unevaluated"]) == (
            3,
            3,
            0,
            [],
            [],
        )
        assert x["bytes_down"] - x["evaluation_bytes"] == x["bytes_up"] == 3 * size
        assert x["skipped"] == ""
        assert len(x["clients"]) == 3 and sum(
            c["weight"] for c in x["clients"].values()
        ) == pytest.approx(1)
        total = sum(c["examples"] for c in x["clients"].values())
        assert all(
            c["weight"] == pytest.approx(c["examples"] / total) for c in x["clients"].values()
        )
        assert x["loss"] == pytest.approx(
            sum(c["loss"] * c["examples"] for c in x["clients"].values()) / total
        )
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["metrics"] == lines[-1]["metrics"]
        and summary["rounds"] == 4
        and not summary["interrupted"]
    )
    assert (
        summary["bytes_up"] == 4 * 3 * size and summary["seed"] == 0 and summary["device"] == "cpu"
    )
    assert summary["bytes_down"] == (4 * 3 + 2 * 6) * size and summary["skipped"] == 0
    assert (
        summary["peak_memory"] > 50e6
        and summary["versions"]["torch"] == torch.__version__.split("+")[0]
    )
    held = json.loads((out / "federation.json").read_text())
    assert (
        held["examples"] == [20, 23, 26, 29, 32, 35]
        and held["held_out"] == [10] * 6
        and held["test"] == 100
    )
    assert [sum(row) for row in held["facts"]["labels"]] == held["examples"]
    assert not (out / "memory").exists() and not (out / ".part").exists()


def test_tensorboard_reads_the_events(recipe: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = go(recipe, tmp_path / "run")
    go(recipe, tmp_path / "run", rounds=6, resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("accuracy")] == [0, 1, 2, 3, 4, 5]
    assert [e.value for e in events.Scalars("loss")[:4]] == pytest.approx(
        [r["loss"] for r in outcome.rounds]
    )


def test_weights_are_what_the_mean_used() -> None:
    """Two clients, losses 1 and 4, exponent 1: loss weights 1/1 and 1/4, so 0.8 and 0.2. With mix
    0.5 between those and (0.5, 0.5): 0.65 and 0.35. Without a mix the only named weight counts: 10
    and 30 examples, 0.25 and 0.75."""

    def heard(**named: tuple[float, float]) -> dict[int, Heard]:
        return {i: Heard(i, 0, {}, 8, {n: w[i] for n, w in named.items()}) for i in (0, 1)}

    mixed = stack(FedAvg(Toy()), LossAware())
    state = Message(scalars={"mix": 0.5})
    weights = heard(uniform=(1.0, 1.0), loss=(1.0, 0.25))
    assert mixed.shares(weights, state) == pytest.approx({0: 0.65, 1: 0.35})
    plain = FedAvg(Toy())
    assert plain.shares(heard(mean=(10.0, 30.0)), state) == pytest.approx({0: 0.25, 1: 0.75})
    assert plain.shares(heard(), state) == {}


def test_who_got_lost_and_why_is_written_down() -> None:
    lost = [Lost(3, "took longer than 5 s"), Lost(4, "tree 'delta' holds NaN or Inf", refused=True)]
    heard = {1: Heard(1, 7, {"loss": 2.0, "examples": 5.0}, 20, {})}
    scored = {"psnr": float("inf")}
    finished = Round(7, 1.5, heard, 3, lost, 10, 20, 2.0, scored, Message())
    line = records.describe(finished, FedAvg(Toy()))
    assert line["clients"] == {"1": {"loss": 2.0, "examples": 5.0}}
    assert (line["round"], line["asked"], line["heard"], line["refused"]) == (7, 3, 1, 1)
    assert line["lost"][0] == {"client": 3, "reason": "took longer than 5 s", "refused": False}
    assert line["metrics"] == {"psnr": None} and json.loads(json.dumps(line)) == line


class StopAfter(Listener):
    """Ctrl-C after a round was reported."""

    def __init__(self, done: int) -> None:
        self.done = done

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] + 1 == self.done:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [0, 3])
def test_ctrl_c_saves_and_a_resumed_run_ends_in_the_same_bits(
    recipe: Path, tmp_path: Path, workers: int, every: int
) -> None:
    whole = go(recipe, tmp_path / "whole", rounds=5)
    with pytest.raises(Interrupted, match="stopped after round 2 of 5") as e:
        go(
            recipe,
            tmp_path / "cut",
            rounds=5,
            workers=workers,
            checkpoint_every=every,
            listener=StopAfter(2),
        )
    # a run folder imports nothing by itself: what would go on with it names the module
    assert e.value.again == f"fedlens run {tmp_path / 'cut'} --resume --module toy_job"
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["interrupted"] is True
    resumed = go(
        recipe, tmp_path / "cut", rounds=5, workers=workers, checkpoint_every=every, resume=True
    )
    assert same_bits(whole.state, resumed.state)

    def timeless(rounds: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k != "seconds"} for r in rounds]

    assert timeless(resumed.rounds) == timeless(whole.rounds)
    assert resumed.summary["interrupted"] is False


def test_a_finished_run_can_be_resumed_to_nothing_and_extended(
    recipe: Path, tmp_path: Path
) -> None:
    first = go(recipe, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    again = go(recipe, tmp_path / "run", resume=True)
    assert same_bits(first.state, again.state) and (tmp_path / "run" / "model.safetensors").exists()
    longer = go(recipe, tmp_path / "run", rounds=6, resume=True)
    assert same_bits(longer.state, go(recipe, tmp_path / "whole", rounds=6).state)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"schedule": "cosine"},
            "was planned for 4 rounds and FedAvg's schedule=cosine depends on that",
        ),
        ({"algorithm": "lossaware"}, "LossAware's decay=linear depends on that"),
    ],
)
def test_a_run_paced_by_its_number_of_rounds_is_not_extended(
    recipe: Path, tmp_path: Path, keys: dict[str, str], why: str
) -> None:
    first = go(recipe, tmp_path / "run", **keys)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=why):
        go(recipe, tmp_path / "run", **keys, rounds=6, resume=True)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before and (
        tmp_path / "run" / "summary.json"
    ).exists()
    assert same_bits(first.state, go(recipe, tmp_path / "run", **keys, resume=True).state)
    free = {**keys, "LossAware.decay": "paper"} if "algorithm" in keys else {"schedule": "step"}
    go(recipe, tmp_path / "other", **free)
    assert len(go(recipe, tmp_path / "other", **free, rounds=5, resume=True).rounds) == 5


def test_fewer_rounds_than_were_done_are_refused(recipe: Path, tmp_path: Path) -> None:
    go(recipe, tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match="has 4 rounds behind it, more than rounds=3: there is nothing to go on with",
    ):
        go(recipe, tmp_path / "run", rounds=3, resume=True)


def test_a_run_that_stopped_itself_stays_stopped(recipe: Path, tmp_path: Path) -> None:
    """`stop` in the state ends a run; resuming it must not go on."""
    recipe.write_text(RECIPE + f'[[algorithm]]\nname = "{__name__}:StopsAtTwo"\n')
    first = go(recipe, tmp_path / "run")
    assert len(first.rounds) == 2
    again = go(recipe, tmp_path / "run", resume=True)
    assert len(again.rounds) == 2 and same_bits(first.state, again.state)


class StopsAtTwo(fedlens.Layer):
    stage = "merge"

    def server_step(self, state: Message, replies: fedlens.Replies) -> Message:
        return self.inner.server_step(state, replies).with_header(stop=state.round == 1)


def test_a_cut_line_in_metrics_is_dropped(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        go(recipe, tmp_path / "run", listener=StopAfter(2))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as f:
        f.write('{"round": 2, "seco')
    assert [r["round"] for r in go(recipe, tmp_path / "run", resume=True).rounds] == [0, 1, 2, 3]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_that_ended_is_not_emptied_for_want_of_a_checkpoint(
    recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    go(recipe, out, checkpoint_every=0)
    written = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match="holds a run but no checkpoint to go on from: --fresh starts over"
    ):
        go(recipe, out, rounds=5, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == written and (out / "summary.json").exists()


def test_a_killed_run_without_a_checkpoint_says_that_it_starts_over(
    recipe: Path, tmp_path: Path
) -> None:
    out, listener = tmp_path / "run", Lines()
    go(recipe, out, checkpoint_every=0)
    (out / "summary.json").unlink()  # a kill leaves none
    assert len(go(recipe, out, resume=True, listener=listener).rounds) == 4
    assert listener.lines == [
        "there is no checkpoint yet, so the run starts over: 4 rounds will be run again"
    ]


class Lines(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


def test_refusals(recipe: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"there is no run in .* to resume"):
        go(recipe, run_folder, resume=True)
    go(recipe, run_folder)
    with pytest.raises(
        ConfigError, match="already holds a run: --resume goes on with it, --fresh starts over"
    ):
        go(recipe, run_folder)
    with pytest.raises(
        ConfigError, match=r"other settings \(algorithm.FedAvg.lr was 0.1, now it is 0.2\)"
    ):
        go(recipe, run_folder, resume=True, lr=0.2)
    with pytest.raises(
        ConfigError, match=r"there is no engine 'simulater': did you mean simulator\?"
    ):
        go(recipe, tmp_path / "b", engine="simulater")
    with pytest.raises(ConfigError, match="Flower runs at a SuperLink: fedlens run RECIPE"):
        go(recipe, tmp_path / "b", engine="flower")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        go(recipe, recipe)
    with pytest.raises(
        ConfigError, match=r"does not fit Slow as it is set up here: .*shapes cannot be multiplied"
    ):
        go(recipe, tmp_path / "c", **{"data.name": f"{__name__}:Wide"})


class Wide(Source):
    """Rows that are too long for the toy network."""

    def federation(self, clients: int, seed: int) -> fedlens.Federation:
        return fedlens.Federation(
            [Tensors({"x": torch.zeros(4, 9), "y": torch.zeros(4).long()})] * clients
        )


def test_fresh_removes_the_old_run_and_nothing_else(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(recipe, out, rounds=5)
    (out / "notes.txt").write_text("mine")
    outcome = go(recipe, out, rounds=2, lr=0.3, fresh=True)
    assert len(outcome.rounds) == 2 and (out / "notes.txt").read_text() == "mine"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2


def test_one_job_a_folder(recipe: Path, tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "run"),
        pytest.raises(ValueError, match="another job is running in"),
    ):
        go(recipe, tmp_path / "run")


def test_folders_are_numbered(tmp_path: Path) -> None:
    assert free_folder("demo", tmp_path) == tmp_path / "demo" == newest_folder("demo", tmp_path)
    for name in ("demo", "demo-2"):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
    assert free_folder("demo", tmp_path) == tmp_path / "demo-3"
    assert newest_folder("demo", tmp_path) == tmp_path / "demo-2"


def test_a_job_runs_in_any_thread(recipe: Path, tmp_path: Path) -> None:
    """Signals can be caught in the main thread only; elsewhere a job does without."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(go(recipe, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].summary["rounds"] == 4


def test_a_run_in_which_nobody_is_heard_ends_with_the_first_reason(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Python it raises, from the command line it is exit code 2 and one sentence; with more
    patience, a few rounds later. What was done is saved, and going on asks again."""
    out, unheard = tmp_path / "run", ("--algorithm", "toy_job:Unheard")
    with pytest.raises(Stalled, match="in round 1: client 0: RuntimeError: the disk is full of ca"):
        fedlens.experiment(recipe, algorithm="toy_job:Unheard", out=out)
    assert json.loads((out / "summary.json").read_text())["rounds"] == 0
    capsys.readouterr()
    keys = ["federation.patience=3", "rounds=9"]
    assert cli.invoke(["run", str(recipe), *unheard, "--out", str(out), "--fresh", *keys]) == 2
    said = re.sub(r"line \d+", "line N", " ".join(capsys.readouterr().err.split()))
    # the layer is no part of the package: whoever wrote it wants to know where it broke
    place = "(toy_job.py, line N)"
    why = f"client 0: RuntimeError: the disk is full of cats {place}, and 5 more were lost."
    assert said == f"fedlens: nobody was heard in 3 rounds up to 3: {why}"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    again = ["run", str(recipe), *unheard, "--out", str(out), "--resume", *keys[1:]]
    assert cli.invoke([*again, "federation.patience=3"]) == 2
    assert "in 3 rounds up to 5" in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_of_another_model_is_refused(recipe: Path, tmp_path: Path) -> None:
    """Whole, sealed and listed, but not of this network."""
    from fedlens.core.rounds import Progress
    from fedlens.runs.checkpoint import Checkpoint

    out = tmp_path / "run"
    state = go(recipe, out, rounds=2).state
    other = state.put(model={n: t[:1] for n, t in state.trees["model"].items() if t.dim()})
    shutil.rmtree(out / "checkpoint")
    Checkpoint(out / "checkpoint").save(Progress(other, 2), {})
    with pytest.raises(ConfigError, match="is of another model: the state's tree 'model'"):
        go(recipe, out, rounds=3, resume=True)
