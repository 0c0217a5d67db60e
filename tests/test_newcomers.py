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

import numpy as np
import pytest
from PIL import Image, ImageDraw

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


# -- what the newcomers bring ----------------------------------------------------------------------


def photos(root: Path, each: int = 12) -> None:
    """Three classes that differ in colour."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(("leaf", "sky", "soil")):
        (root / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 120, (70, 80, 3), dtype=np.uint8)
            pixels[..., k] += 120
            Image.fromarray(pixels).save(root / name / f"{i}.jpg")


def draw_person(rng: np.random.Generator) -> tuple[Image.Image, list[tuple[float, float]]]:
    """A figure with COCO's 17 joints: head, then left and right of shoulder, elbow, wrist, hip,
    knee, ankle."""
    x, y = rng.uniform(45, 75), rng.uniform(20, 30)
    head = [(x, y), (x - 3, y - 2), (x + 3, y - 2), (x - 6, y), (x + 6, y)]
    rows = [(12, 10), (18, 26), (16, 40), (9, 45), (10, 65), (11, 82)]
    limbs = [(x + side * w + rng.uniform(-2, 2), y + h) for w, h in rows for side in (-1, 1)]
    image = Image.new("RGB", (120, 130), (30, 40, 60))
    pen = ImageDraw.Draw(image)
    for a, b in ((0, 2), (2, 4), (1, 3), (3, 5), (6, 8), (8, 10), (7, 9), (9, 11), (0, 1), (6, 7)):
        pen.line([limbs[a], limbs[b]], fill=(220, 180, 40 + 15 * a), width=4)
    pen.ellipse([x - 8, y - 8, x + 8, y + 8], fill=(230, 200, 180))
    return image, [*head, *limbs]


def people(root: Path) -> None:
    """Photos and two files of annotations in COCO's form, with only what it must have."""
    rng = np.random.default_rng(1)
    (root / "images").mkdir(parents=True)
    for part, count in (("train", 24), ("val", 6)):
        images, annotations = [], []
        for k in range(count):
            picture, joints = draw_person(rng)
            name, id = f"{part}{k}.jpg", len(images) + 1
            picture.save(root / "images" / name)
            images.append({"id": id, "file_name": name, "width": 120, "height": 130})
            left, top = np.min(joints, 0)
            right, low = np.max(joints, 0)
            annotations.append(
                {
                    "id": id,
                    "image_id": id,
                    "category_id": 1,
                    "keypoints": [v for x, y in joints for v in (x, y, 2)],
                    "num_keypoints": 17,
                    "bbox": [left, top, right - left, low - top],
                    "area": (right - left) * (low - top),
                    "iscrowd": 0,
                }
            )
        kinds = [{"id": 1, "name": "person"}]
        whole = {"images": images, "annotations": annotations, "categories": kinds}
        (root / f"{part}.json").write_text(json.dumps(whole))


FLOWER_TASK = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Subset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 8, 3), nn.Linear(8, 2)
        def forward(self, x):
            return self.fc(torch.relu(self.conv(x)).mean((2, 3)))

    class Stripes(Dataset):
        def __len__(self):
            return 240
        def __getitem__(self, k):
            x = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(k))
            x[0, ::2] += k % 2
            x[0, :, ::2] += 1 - k % 2
            return {"img": x, "label": k % 2}

    def load_data(partition_id, num_partitions):
        mine = list(range(partition_id, 240, num_partitions))
        train, test = Subset(Stripes(), mine[:48]), Subset(Stripes(), mine[48:])
        loader = DataLoader(train, batch_size=16, shuffle=True, num_workers=2)
        return loader, DataLoader(test, batch_size=16)

    def train(net, loader, epochs, device):
        optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.05), nn.CrossEntropyLoss()
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                criterion(net(batch["img"].to(device)), batch["label"].to(device)).backward()
                optimizer.step()
"""
FLOWER_CLIENT = """
    from flwr.client import ClientApp, NumPyClient
    from task import Net, load_data, train

    class Client(NumPyClient):
        def __init__(self, loaders):
            self.net, (self.train_loader, self.test_loader) = Net(), loaders
        def fit(self, parameters, config):
            train(self.net, self.train_loader, 1, "cpu")
            return [v.numpy() for v in self.net.state_dict().values()], 48, {}

    def client_fn(context):
        config = context.node_config
        return Client(load_data(config["partition-id"], config["num-partitions"])).to_client()

    app = ClientApp(client_fn=client_fn)
"""


def flower_app(root: Path) -> None:
    for name, text in (("task.py", FLOWER_TASK), ("client_app.py", FLOWER_CLIENT)):
        (root / name).write_text(textwrap.dedent(text))


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
