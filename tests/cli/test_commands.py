"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from namespaces import NO_NAMESPACE, small_disk
from PIL import Image
from torch import Generator, Tensor
from toy_job import RECIPE, ToySource, write_recipe
from typer.core import TyperArgument

import fedlens
from fedlens import Batch, Federation
from fedlens.cli import list as listing
from fedlens.cli import main as cli
from fedlens.data.images.tensors import Tensors
from fedlens.report import html as report
from fedlens.report import page_data as view
from fedlens.report import reading as folder
from fedlens.runs import text as terminal

TESTS = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
Said = tuple[int, str, str]


@pytest.fixture
def fedlens_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """`fedlens ARGS` in a folder that holds toy.toml: exit code, stdout, stderr."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)

    def command(*args: str) -> Said:
        code = cli.invoke(list(args))
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def test_help_answers_without_loading_torch() -> None:
    script = (
        "import sys; from fedlens.cli import main as cli; print(cli.invoke(['--help']), 'torch' in"
        " sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], env=ENV, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "0 False False"
    for command in ("run", "compare", "list", "partition", "report", "apply"):
        assert command in out
    assert "fedlens run demo" in out


def test_fedlens_loads_neither_flower_nor_ray() -> None:
    script = (
        "import sys, fedlens; fedlens.experiment; print('flwr' in sys.modules, 'ray' in"
        " sys.modules, callable(fedlens.run))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], env=ENV, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "False False True"


@pytest.mark.parametrize("command", ["run", "compare", "list", "partition", "report", "apply"])
def test_every_command_has_examples(fedlens_command: Callable[..., Said], command: str) -> None:
    code, out, _ = fedlens_command(command, "--help")
    assert code == 0 and f"fedlens {command}" in out.split("Examples")[1]


def words(text: str) -> str:
    """Without the frame around it, and in one line."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_every_argument_of_every_command_is_explained(fedlens_command: Callable[..., Said]) -> None:
    expected = {
        "run": [
            "A shipped recipe, a TOML file, or a run folder.",
            "Overrides: rounds=6, FedProx.mu=0.01, data.alpha=0.1",
        ],
        "apply": [
            "A run folder, or with --task a file of weights.",
            "A file or folder of yours.",
            "Where the result goes.",
            "Options of the task; with --task also its keys.",
        ],
        "list": [
            "recipes, algorithms, layers, tasks",
            "One of them: all that is said about it, and its keys.",
        ],
        "report": ["A run folder, or a folder of runs to compare."],
        "keys": ["Sites that get a key, by client number or name."],
        "join": ["The server, as host:port."],
        "board": ["Where the run folders are. [default: runs]"],
        "analyse": ["landscape, surface, perturbation or target.", "Finished run folders."],
    }
    commands = cli.command_group().commands
    for name, command in commands.items():
        said = words(fedlens_command(name, "--help")[1].split("Options ─")[0])
        arguments = [p for p in command.params if isinstance(p, TyperArgument)]
        assert all(p.help and p.help in said for p in arguments), name
        assert all(text in said for text in expected.get(name, [])), name
    assert expected.keys() < commands.keys()


def test_a_run_in_a_pipe_prints_plain_lines(fedlens_command: Callable[..., Said]) -> None:
    code, out, err = fedlens_command("run", "toy.toml", "rounds=2")
    assert code == 0 and err == "" and "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == "toy: FedAvg + Scaffold"
    assert re.fullmatch(
        r"round 1/2  loss \d\.\d{4}  accuracy \d\.\d{4}  heard 6/6  \d+\.\d\d s", lines[2]
    )
    assert lines[4].startswith("accuracy ")
    assert lines[5].startswith("2 rounds in") and "23.4 kB down, 23.4 kB up" in lines[5]
    assert Path("runs/toy/summary.json").exists()
    fedlens_command("run", "toy.toml", "rounds=2")
    assert Path("runs/toy-2/summary.json").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "dmeo"], "there is no recipe 'dmeo': did you mean demo?"),
        (["run", "toy.toml", "roundz=1"], "did you mean rounds?"),
        (["run", "toy.toml", "--algorithm", "scafold"], "did you mean Scaffold?"),
        (
            ["run", "toy.toml", "clients=0"],
            "federation.clients must be a whole number of at least 1, not 0.",
        ),
        (["run", "toy.toml", "cohort=9"], "there are only 6 clients"),
        (["run", "toy.toml", "broken=true"], "images.bin ends after 12 of 100 bytes."),
        (["run", "toy.toml", "--engine", "pigeon"], "there is no engine 'pigeon'"),
        (["run", "toy.toml", "-a", "FedAvg+FedAvg"], "FedAvg is a base of its own"),
        (["run", "toy.toml", "--resume"], "there is no run in runs/toy to resume."),
        (["run", "toy.toml", "--resume", "--fresh"], "choose one"),
        (["run", "toy.toml", "--out", "toy.toml"], "toy.toml is a file, not a folder."),
        (["run", "toy.toml", "--resum"], "No such option"),
        (["run", "toy.toml", "--workers", "two"], "'two' is not a valid int"),
        (["run"], "Missing argument 'RECIPE'"),
        (["rum", "toy.toml"], "No such command 'rum'"),
        (["run", "toy.toml", "init_from=no.safetensors"], "no weights at no.safetensors."),
        (["run", "toy.toml", "init_from=toy.toml"], "toy.toml cannot be read as weights"),
        (
            ["run", "toy.toml", "device=foo"],
            "there is no device 'foo' here, but device=cpu always works.",
        ),
        (["run", "toy.toml", "device=cuda:99"], "there is no device 'cuda:99' here"),
        (
            ["run", "toy.toml", "-a", "FedDeblur"],
            "it restores images and trains nothing, but the task Slow is to learn a network.",
        ),
        (
            ["run", "deblur", "-a", "fedavg"],
            "FedAvg trains a network, but the task Deblurring has none.",
        ),
        (
            ["run", "deblur", "patch=[0,0]"],
            "data.patch must be a list of 2 (a whole number of at least 1, ",
        ),
        (
            ["run", "deblur", "data.name=Synthetic"],
            "FedDeblur restores scenes from blurred views, but this data has none",
        ),
        (
            ["run", "demo", "data.name=Scene", "data.size=64"],
            "Scene does not fit Classification as it is set up here: it has no batches",
        ),
        (["compare", "toy.toml"], "which ones? add --algorithms"),
        (["compare", "toy.toml", "-a", "fedavg", "--seeds", "a"], "--seeds takes whole numbers"),
        (
            ["compare", "toy.toml", "-a", "fedavg", "seed=5"],
            "compare takes its seeds together: --seeds 5 instead of seed=5.",
        ),
        (["compare", "toy.toml", "-a", "fedavg", "federation.seed=0"], "--seeds 0 instead of"),
        (["compare", "toy.toml", "-a", "fedavg,fedprox", "nu=1"], "nothing here is called 'nu'"),
        (["compare", "toy.toml", "-a", "a:Own,a:OWN"], "a:Own and a:OWN would share one folder"),
        (["list", "layres"], "did you mean layers?"),
        (
            ["partition", "toy.toml", "broken=true", "--out", "a.doc"],
            "--out a.doc: a picture cannot be a .doc file; ",
        ),
        (["report", "nowhere"], "there is no run folder nowhere."),
        (["apply", "nowhere", "a", "b"], "nowhere is not a run folder"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_code_2(
    fedlens_command: Callable[..., Said], args: list[str], words: str
) -> None:
    code, out, err = fedlens_command(*args)
    assert code == 2 and words in err
    assert err.startswith("fedlens: ") and err.count("\n") == 1 and "Traceback" not in err + out


def test_a_dry_run_writes_nothing_and_knows_the_traffic(
    fedlens_command: Callable[..., Said],
) -> None:
    before = sorted(Path().rglob("*"))
    code, out, _ = fedlens_command("run", "toy.toml", "rounds=2", "cohort=3", "--dry-run")
    assert code == 0 and sorted(Path().rglob("*")) == before
    assert "FedAvg(lr=0.1, batch=8)" in out and "6, 20 to 35 examples each, 165 in all" in out
    assert "11.7 kB down, 11.7 kB up" in out  # 2 rounds x 3 clients x 1952 bytes (see test_job)
    assert "time" in out and "memory" in out


def test_a_run_folder_is_a_recipe(fedlens_command: Callable[..., Said]) -> None:
    """`run FOLDER --resume` needs nothing else."""
    fedlens_command("run", "toy.toml", "rounds=2", "lr=0.2", "--out", "first")
    Path("toy.toml").unlink()
    code, out, _ = fedlens_command("run", "first", "rounds=3", "--resume")
    assert code == 0 and "going on after round 2" in out and "round 3/3" in out


def test_a_pipe_hears_of_damage_and_of_a_report_that_failed(
    fedlens_command: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedlens_command("run", "toy.toml", "rounds=3")
    (tmp_path / "runs/toy/checkpoint/state-000003.safetensors").write_bytes(b"")

    def broken(path: Path) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(report, "write_report", broken)
    code, out, err = fedlens_command("run", "toy.toml", "rounds=3", "--resume")
    lines = out.splitlines()
    assert code == 0 and err == ""
    assert (
        lines[0]
        == "checkpoint manifest-000003.json is damaged (state-000003.safetensors was changed); the"
        " one before is used"
    )
    assert (
        "going on after round 2" in lines[2]
        and "report.html could not be written: RuntimeError: no ink" in lines
    )


def test_clients_that_fail_are_named_with_their_reason(
    fedlens_command: Callable[..., Said], tmp_path: Path
) -> None:
    write_recipe(tmp_path, RECIPE.replace("toy_job:ToySource", f"{__name__}:BadDisks"))
    code, out, _ = fedlens_command("run", "toy.toml", "rounds=1")
    assert (
        code == 0
        and "round 1: clients 3, 4, 5 OSError: cannot read image" in out
        and "heard 3/6" in out
    )
    assert out.count("cannot read") == 1  # what the engine said about each is not repeated
    line = json.loads(Path("runs/toy/metrics.jsonl").read_text())
    assert [x["client"] for x in line["lost"]] == [3, 4, 5] and line["heard"] == 3


def test_rounds_in_which_nobody_is_heard_are_skipped_until_patience_ends(
    fedlens_command: Callable[..., Said], tmp_path: Path
) -> None:
    """Patience of 2: the first such round is skipped and said so, the second ends the run with a
    client's reason, so that nobody takes an untrained model for a result."""
    write_recipe(tmp_path, RECIPE.replace("toy_job:ToySource", f"{__name__}:BadDisks"))
    code, out, err = fedlens_command("run", "toy.toml", "rounds=3", "healthy=0", "patience=2")
    assert code == 2 and "round 1: nobody was heard, so it is skipped" in out
    assert re.search(r"nobody was heard .*: client 0: \w+", out + err)


def test_a_client_missing_from_the_evaluation_is_named_with_its_reason(
    fedlens_command: Callable[..., Said], tmp_path: Path
) -> None:
    """Mean and worst over the others would be silent about just the client that does worst."""
    write_recipe(tmp_path, RECIPE.replace("toy_job:ToySource", f"{__name__}:BadHeldOut"))
    code, out, _ = fedlens_command("run", "toy.toml", "rounds=2", "personal=true")
    assert (
        code == 0
        and "round 1: client 2 left out of the evaluation: OSError: cannot read image 9" in out
        and "heard 6/6" in out
    )
    assert ", 2 evaluations by clients lost" in out
    line = json.loads(Path("runs/toy/metrics.jsonl").read_text().splitlines()[0])
    assert (
        line["unevaluated"]
        == [{"client": 2, "reason": "OSError: cannot read image 9", "refused": False}]
        and line["lost"] == []
    )
    assert json.loads(Path("runs/toy/summary.json").read_text())["unevaluated"] == 2
    shown = view.run_view(folder.read_run(Path("runs/toy")), str)["lost"]
    assert shown == [
        {
            "reason": "left out of the evaluation: OSError: cannot read image 9",
            "times": 2,
            "clients": [2],
        }
    ]


class BadHeldOut(ToySource):
    """Client 2 cannot read what was held out."""

    def federation(self, clients: int, seed: int) -> Federation:
        made = super().federation(clients, seed)
        return replace(
            made, held_out=[Gone(h.columns) if i == 2 else h for i, h in enumerate(made.held_out)]
        )


class Gone(Tensors):
    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        raise OSError("cannot read image 9")


class BadDisks(ToySource):
    """Clients from number `healthy` on cannot read what they train on."""

    def __init__(self, healthy: int = 3) -> None:
        super().__init__()
        self.healthy = healthy

    def federation(self, clients: int, seed: int) -> Federation:
        made = super().federation(clients, seed)
        return replace(
            made,
            holdings=[
                h if i < self.healthy else Unreadable(h.columns)
                for i, h in enumerate(made.holdings)
            ],
        )


class Unreadable(Tensors):
    def batch(self, index: Tensor, rng: Generator | None = None) -> Batch:
        if rng is not None:
            raise OSError("cannot read image 7")
        return super().batch(index)


def test_lists(fedlens_command: Callable[..., Said]) -> None:
    assert "fedlens list layers" in fedlens_command("list")[1]
    layers = fedlens_command("list", "layers")[1]
    assert "FedProx" in layers and "mu=0.01" in layers
    assert "FedAvg + Scaffold" in fedlens_command("list", "algorithms")[1]
    assert "demo" in fedlens_command("list", "recipes")[1]
    models = fedlens_command("list", "models")[1]
    # the count is the public class's
    assert "30,676,435 parameters; a training step on 6 frames of 64x64" in models
    for kind in ("tasks", "datasets", "metrics", "engines"):
        assert fedlens_command("list", kind)[0] == 0


def test_partition_prints_a_table_and_draws(fedlens_command: Callable[..., Said]) -> None:
    code, out, _ = fedlens_command(
        "partition", "toy.toml", "clients=3", "--out", "pictures/split.png"
    )
    assert code == 0 and "3 clients hold 69 examples (20 to 26 each), 100 to test on" in out
    assert len(re.findall(r"^\s+\d\s+2\d\s+10\s+3\s+\d+ %", out, re.M)) == 3
    with Image.open("pictures/split.png") as image:
        assert image.width > 300 and len(set(image.convert("RGB").resize((60, 40)).getdata())) > 5


@pytest.mark.parametrize(
    ("out", "written"), [("old", "old/partition.png"), ("new", "new.png"), ("a/b.SVG", "a/b.SVG")]
)
def test_partition_names_the_picture_it_wrote(
    fedlens_command: Callable[..., Said], out: str, written: str
) -> None:
    Path("old").mkdir()
    assert (
        fedlens_command("partition", "toy.toml", "--out", out)[1].splitlines()[-1]
        == f"Picture: {written}"
    )
    assert [str(p) for p in Path().rglob("*") if p.is_file() and p.name != "toy.toml"] == [written]


def test_partition_shows_what_clients_cameras_do(fedlens_command: Callable[..., Said]) -> None:
    """Three clients, blur up to 3: 0, 1.5 and 3. The picture grows by a row of images."""
    given = ["partition", "classification", "data.images=60", "test_images=20", "clients=3"]
    assert "look" not in fedlens_command(*given, "--out", "plain.png")[1]
    code, out, _ = fedlens_command(*given, "skew=blur", "strongest=3", "--out", "blurred.png")
    assert code == 0 and re.findall(r"blur [\d.]+", out) == ["blur 0", "blur 1.5", "blur 3"]
    with Image.open("plain.png") as plain, Image.open("blurred.png") as blurred:
        assert blurred.height > plain.height and blurred.width == plain.width


def test_what_was_left_out_or_filled_up_is_said(
    fedlens_command: Callable[..., Said], tmp_path: Path
) -> None:
    for k, name in enumerate(("forest", "river")):
        (tmp_path / "sat" / name).mkdir(parents=True)
        for j in range(8):
            Image.new("RGB", (16, 16), (90 * k, 10 * j, 0)).save(
                tmp_path / "sat" / name / f"{j}.png"
            )
    (tmp_path / "sat" / "river" / "broken.jpg").write_text("no image")
    given = [
        "classification",
        "data.name=ImageFolder",
        "root=sat",
        "data.holdout=0",
        "clients=2",
        "partition=iid",
    ]
    left_out = "1 file could not be read and was left out: river/broken.jpg"
    assert left_out in fedlens_command("partition", *given)[1]
    small = ["model=niid", "task.size=16", "classes=2", "rounds=1", "--workers", "0"]
    assert left_out in fedlens_command("run", *given, *small)[1]
    out = fedlens_command("compare", *given, *small, "--algorithms", "fedavg,median")[1]
    assert "2 runs" in out and out.count(left_out) == 1  # cells share their data


def test_personal_metrics_without_anything_held_out_are_remarked_on(
    fedlens_command: Callable[..., Said],
) -> None:
    few = ["images=60", "test_images=12", "clients=2", "cohort=2", "rounds=1", "workers=0"]
    note = (
        "clients are not evaluated, because none of Synthetic keeps anything for that:"
        " data.holdout=0.1"
    )
    assert note in fedlens_command("run", "demo", "personal=true", *few)[1]
    assert note in fedlens_command("run", "demo", "--algorithm", "ditto", *few)[1]
    for quiet in (["personal=true", "holdout=0.2"], ["personal=false"]):
        assert "not evaluated" not in fedlens_command("run", "demo", *quiet, *few)[1]


def test_compare_runs_what_is_missing_and_tabulates(fedlens_command: Callable[..., Said]) -> None:
    """An override for FedProx alone leaves FedAvg as it is. The mean and the spread are those of
    the cells' own summaries.
    """
    args = [
        "compare",
        "toy.toml",
        "--algorithms",
        "fedavg,fedprox",
        "--seeds",
        "0,1",
        "rounds=2",
        "mu=0.5",
        "--out",
        "both",
    ]
    code, out, _ = fedlens_command(*args)
    assert code == 0 and "4 runs" in out and "mean ± standard deviation over 2 seeds" in out
    table = json.loads(Path("both/table.json").read_text())
    cells = [json.loads(Path(f"both/fedprox/seed-{s}/summary.json").read_text()) for s in (0, 1)]
    a, b = (c["metrics"]["accuracy"] for c in cells)
    row = table["algorithms"]["fedprox"]
    assert row["stack"] == "FedAvg + FedProx" and row["metrics"]["accuracy"][
        "mean"
    ] == pytest.approx((a + b) / 2)
    assert row["metrics"]["accuracy"]["spread"] == pytest.approx(abs(a - b) / 2**0.5)
    assert "mu = 0.5" in Path("both/fedprox/seed-0/config.toml").read_text()
    assert Path("both/table.md").read_text().count("\n| ") == 3
    with Image.open("both/compare.png") as image:
        assert image.width > 500
    stamp = Path("both/fedavg/seed-0/summary.json").stat().st_mtime_ns
    Path("both/fedavg/seed-1/summary.json").unlink()
    code, out, _ = fedlens_command(*args)
    assert (
        code == 0
        and "3 of them finished before" in out
        and Path("both/fedavg/seed-0/summary.json").stat().st_mtime_ns == stamp
    )
    assert json.loads(Path("both/table.json").read_text())["algorithms"]["fedprox"] == row
    code, _, err = fedlens_command(*args, "lr=0.3")
    assert (
        code == 2
        and "was run with other settings (algorithm.FedAvg.lr was 0.1, now it is 0.3)" in err
    )


def test_an_algorithm_in_another_case_is_the_same_one(fedlens_command: Callable[..., Said]) -> None:
    code, out, _ = fedlens_command(
        "compare", "toy.toml", "-a", "FedAvg,fedavg,fedprox,FEDAVG", "rounds=1", "--out", "both"
    )
    assert code == 0 and "toy: 2 runs" in out
    assert list(json.loads(Path("both/table.json").read_text())["algorithms"]) == [
        "FedAvg",
        "fedprox",
    ]


def test_cells_in_a_pipe_follow_each_other_without_gaps(
    fedlens_command: Callable[..., Said],
) -> None:
    _, out, _ = fedlens_command(
        "compare", "toy.toml", "-a", "fedavg,fedprox", "rounds=1", "--seeds", "0,1"
    )
    lines = out.splitlines()
    assert lines[0] == "toy: 4 runs" and [line[:2] for line in lines[1:5]] == ["✓ "] * 4


def test_apply_hands_over_to_the_task(fedlens_command: Callable[..., Said], tmp_path: Path) -> None:
    fedlens_command("run", "toy.toml", "rounds=1", "--out", "run")
    code, _, err = fedlens_command("apply", "run", "toy.toml", "out.csv")
    assert code == 2 and "Slow has nothing to apply to a file" in err
    assert (
        fedlens_command("apply", "run", "missing.png", "out.csv")[2]
        == "fedlens: there is no missing.png.\n"
    )
    same = "fedlens: the result would take the place of toy.toml: give it another name.\n"
    assert fedlens_command("apply", "run", "toy.toml", "./toy.toml")[::2] == (2, same)


def fork_command(args: list[str], said: Path, before: Callable[[], None] = lambda: None) -> int:
    """A process of its own without loading torch again; what it says goes to said.out and
    said.err.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(
                    os.open(said.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                    number,
                )
            sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
            before()
            code = cli.invoke(args)
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """The real thing: a process, a terminal's signal, exit code 130."""
    recipe, said = write_recipe(tmp_path), tmp_path / "said"
    child = fork_command(
        [
            "run",
            str(recipe),
            "pause=0.01",
            "rounds=500",
            "workers=2",
            "--out",
            str(tmp_path / "run"),
        ],
        said,
    )
    while (
        not said.with_suffix(".out").exists()
        or "round 2/500" not in said.with_suffix(".out").read_text()
    ):
        time.sleep(0.05)
    os.kill(child, signal.SIGINT)
    assert exit_code(child) == 130
    expected = (
        r"fedlens: stopped after round \d+ of 500; what was done is saved\. Go on with: fedlens run"
        r" .*/run --resume --module toy_job\n"
    )
    assert re.fullmatch(expected, said.with_suffix(".err").read_text())


def test_words_and_numbers() -> None:
    assert [terminal.size(n) for n in (999, 1500, 23_400_000, 5.1e9)] == [
        "999 B",
        "1.5 kB",
        "23.4 MB",
        "5.1 GB",
    ]
    assert [terminal.duration(s) for s in (0.04, 12.3, 61, 3725)] == [
        "0.0 s",
        "12 s",
        "1 min 01 s",
        "1 h 02 min",
    ]
    assert (
        terminal.bars([0, 1, 100]) == " ▁█"
        and terminal.spark([1.0, 2.0, 3.0]) == "▁▅█"
        and terminal.spark([2.0, 2.0]) == "▁▁"
    )
    assert (
        listing.first_sentence("LossAware (FedVSR, Eqs. 16-21): small. More.")
        == "LossAware (FedVSR, Eqs. 16-21): small."
    )


def test_a_list_says_what_a_thing_is_and_not_what_its_first_key_means() -> None:
    """TrimmedMean's docstring begins with a key, its module's with the idea; FedAdam shares a
    module with three others.
    """
    layers = listing.rows_of("layers")
    assert layers["TrimmedMean"].startswith("Trimmed mean (Yin et al., 2018)") and layers[
        "TrimmedMean"
    ].endswith("\n[share=0.2]")
    assert layers["FedAdam"].startswith("Adam on the server (Reddi et al., 2021).\n[lr=0.01")
    for kind in listing.KINDS:
        for name, text in listing.rows_of(kind).items():
            assert not re.match(r"[a-z_]+(, [a-z_]+)*: ", text), (name, text)


def test_one_name_of_a_list_gives_all_that_is_said_about_it(
    fedlens_command: Callable[..., Said],
) -> None:
    code, out, _ = fedlens_command("list", "layers", "lossaware")
    assert (
        code == 0
        and "Hellinger" in out
        and "greedy: inverse-loss weights" in out
        and "tau=0.05" in out
    )
    assert "[[algorithm]]" in fedlens_command("list", "recipes", "demo")[1]
    code, _, err = fedlens_command("list", "layers", "FedProxx")
    assert code == 2 and "did you mean FedProx?" in err


def test_a_full_disk_costs_one_sentence_and_nothing_that_was_written(tmp_path: Path) -> None:
    """A real one, in a namespace of its own. With room again, --resume ends in the bits of an
    undisturbed run.
    """
    recipe, disk, said = write_recipe(tmp_path), tmp_path / "disk", tmp_path / "said"
    disk.mkdir()
    command = ["run", str(recipe), "--out", str(disk / "run"), "rounds=16"]

    def fill_then_make_room() -> None:
        small_disk(disk, 400_000)
        (disk / "ballast").write_bytes(bytes(290_000))
        print("exit", cli.invoke(command))
        (disk / "ballast").unlink()

    code = exit_code(fork_command([*command, "--resume"], said, fill_then_make_room))
    if code == NO_NAMESPACE:
        pytest.skip("needs a mount namespace")
    out = said.with_suffix(".out").read_text()
    full = (
        rf"fedlens: the disk is full \({disk}/run/\S+\); what was written before is whole: make"
        r" room and add --resume\.\n"
    )
    assert re.fullmatch(full, said.with_suffix(".err").read_text())
    assert code == 0 and "\nexit 2\n" in out
    before, after = out.split("exit 2")
    reached = len(re.findall(r"^round ", before, re.M))
    assert 1 <= reached < 16 and f"going on after round {reached}" in after
    whole = fedlens.experiment(recipe, out=tmp_path / "whole", rounds=16).rounds[-1]
    assert (
        f"round 16/16  loss {whole['loss']:.4f}  accuracy {whole['metrics']['accuracy']:.4f}"
        in after
    )


def test_version_is_that_of_the_package(fedlens_command: Callable[..., Said]) -> None:
    code, out, _ = fedlens_command("--version")
    assert (code, out.strip()) == (0, f"fedlens {importlib.metadata.version('fedlens')}")
