"""Five newcomers follow docs/first_hour.md, each in an empty folder with nothing but the installed
package and its own data: from the first line to a report, within the lines that the page shows.

What they write is read from the page, so the page is what works. Lines and seconds are printed.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from own_data import flower_app, people, photos

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first_hour.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE = 280  # seconds; a newcomer who waits longer has found a hang


class Section(NamedTuple):
    """Of the page: files by name, and commands in their order."""

    files: dict[str, str]
    commands: list[str]

    @property
    def lines(self) -> int:
        written = [line for text in self.files.values() for line in text.splitlines()[1:]]
        return len([line for line in written if line.strip()]) + len(self.commands)


def section(title: str) -> Section:
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    text = dict(zip(parts[1::2], parts[2::2]))[title]
    files: dict[str, str] = {}
    commands: list[str] = []
    for kind, body in BLOCK.findall(text):
        if kind:
            files[body.splitlines()[0].removeprefix("# ")] = body
        else:
            commands += body.splitlines()
    return Section(files, commands)


def follow(title: str, folder: Path, program: str = sys.executable) -> tuple[Section, str]:
    """Write the files and run the commands, each in a process of its own; all that they said.
    program: the Python of another environment, which then sees nothing of this one's paths."""
    told = section(title)
    for name, text in told.files.items():
        (folder / name).write_text(text)
    said, began = "", time.monotonic()
    for command in told.commands:
        said += run_command(command, folder, program)
    print(f"\n{title}: {told.lines} lines, {time.monotonic() - began:.1f} s")
    return told, said


def run_command(command: str, folder: Path, program: str = sys.executable) -> str:
    first, *words = command.split()
    known = {"fedlens": [program, "-m", "fedlens.cli.main"], "python": [program]}
    hidden = ("FEDLENS_", "PYTHON") if program != sys.executable else ("FEDLENS_",)
    done = subprocess.run(
        [*known[first], *words],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith(hidden)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def summary_of(run: Path) -> dict[str, Any]:
    """Of a run that came to its end with everybody heard, and has its report."""
    assert "<html" in (run / "report.html").read_text()[:200]
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert found["heard"] == found["asked"] > 0 and not found["interrupted"]
    return found


# -- the newcomers ---------------------------------------------------------------------------------


def test_a_network_and_torch_datasets(tmp_path: Path) -> None:
    """At most ten lines. Guessing the most frequent class of three gets one half."""
    told, said = follow("A network and torch Datasets", tmp_path)
    assert told.lines - 1 <= 10  # without the command that starts it
    assert summary_of(tmp_path / "runs" / "sequential")["metrics"]["accuracy"] > 0.75
    assert "FitResult" in said


@pytest.mark.slow
def test_a_folder_of_images_and_a_network_of_timm(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    told, _ = follow("A folder of images, a network of timm", tmp_path)
    assert told.lines == 2
    config = (tmp_path / "runs" / "classification" / "config.toml").read_text()
    assert '"leaf", "sky", "soil"' in config and "classes = 3" in config
    summary_of(tmp_path / "runs" / "classification")
    rows = list(csv.DictReader((tmp_path / "labels.csv").read_text().splitlines()))
    assert len(rows) == 36 and {r["label"] for r in rows} <= {"leaf", "sky", "soil"}


@pytest.mark.slow
def test_a_layer_in_a_recipe(tmp_path: Path) -> None:
    _, said = follow("A layer of your own", tmp_path)
    assert summary_of(tmp_path / "runs" / "mine")["algorithm"] == "FedAvg + Ridge"
    assert "FedAvg+ridge:Ridge" in said


@pytest.mark.slow
def test_keypoints_as_coco_writes_them(tmp_path: Path) -> None:
    people(tmp_path / "people")
    told, _ = follow("Keypoints as COCO writes them", tmp_path)
    assert told.lines == 2
    summary_of(tmp_path / "runs" / "raf")
    found = json.loads((tmp_path / "found" / "keypoints.json").read_text())
    assert [len(a["keypoints"]) for a in found["annotations"]] == [51] * 30


@pytest.mark.slow
def test_from_a_flower_app(tmp_path: Path) -> None:
    flower_app(tmp_path)
    follow("From a Flower app", tmp_path)
    assert summary_of(tmp_path / "runs" / "net")["metrics"]["client_accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_has_worked_before_does_not_hang(tmp_path: Path, workers: int) -> None:
    """OpenMP's helpers, a DataLoader's workers, threads of one's own and a Flower client do not
    come along into a fork: whoever waits for them there waits for ever."""
    flower_app(tmp_path)
    (tmp_path / "busy.py").write_text(
        textwrap.dedent(f"""
        import threading, time
        import torch
        import fedlens
        from client_app import Client
        from task import Net, load_data

        torch.set_num_threads(2)
        threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
        loaders = [load_data(k, 4) for k in range(4)]
        Client(loaders[0]).fit([], {{}})
        (torch.rand(400, 400) @ torch.rand(400, 400)).sort()
        kept = iter(loaders[1][0])
        next(kept)
        loss = torch.nn.functional.cross_entropy
        fedlens.fit(Net(), loss, [a for a, _ in loaders], rounds=2, workers={workers}, out="run")
        """)
    )
    run_command("python busy.py", tmp_path)
    summary_of(tmp_path / "run")


def output_of(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_from_a_wheel_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """What is packed is enough: recipes, templates, pages. The other packages are those of this
    environment, but its ours is not: a folder named in a .pth file has its own .pth files not read.
    """
    here = tmp_path / "here"
    here.mkdir()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=PATIENCE)
    if built.returncode and "hatchling" in built.stdout + built.stderr:
        pytest.skip("a package index is needed to build a wheel")
    assert built.returncode == 0, built.stderr
    output_of(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    program = tmp_path / "venv" / "bin" / "python"
    own = Path(output_of(program, "-c", "import site; print(site.getsitepackages()[0])"))
    (wheel,) = tmp_path.glob("*.whl")
    output_of(sys.executable, "-m", "zipfile", "-e", wheel, own)
    shared = next(p for p in sys.path if p.endswith("site-packages"))
    (own / "shared.pth").write_text(shared)
    (here / "where.py").write_text("import fedlens; print(fedlens.__file__)")
    found = run_command("python where.py", here, str(program))
    assert Path(found.strip()).is_relative_to(own)
    follow("A network and torch Datasets", here, str(program))
    summary_of(here / "runs" / "sequential")
    run_command("fedlens new project hospitals", here, str(program))
    run_command("fedlens run hospitals/hospitals.toml rounds=1", here, str(program))
    summary_of(here / "runs" / "hospitals")
