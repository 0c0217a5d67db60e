"""Federation with pictures, for tests: a real deployment, joined as an operator would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
from deployment import BIN, Deployment
from PIL import Image

PATIENCE = 300.0

STUDY = """
[task]
name = "Classification"
model = "resnet8"
classes = 2
size = 8

[data]
name = "ImageFolder"
root = "scans"
size = 8
names = ["benign", "malignant"]

[federation]
clients = 2
rounds = 1

[[algorithm]]
name = "FedAvg"
"""


def write_pictures(folder: Path, seed: int) -> None:
    """Six a class, with names of patients."""
    rng = np.random.default_rng(seed)
    for name in ("benign", "malignant"):
        (folder / name).mkdir(parents=True)
        for k in range(6):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"Mustermann-{k}.png")


class Federation(Deployment):
    """Federation with pictures, joined as an operator would."""

    def __init__(self, folder: Path, sites: int = 2, study: str = STUDY) -> None:
        super().__init__(folder, sites)
        self.env["FEDLENS_HOME"] = str(folder / "fedlens-home")
        for site in range(sites):
            write_pictures(folder / f"hospital-{site}" / "scans", site)
            (folder / f"hospital-{site}" / "study.toml").write_text(study)
        (folder / "study.toml").write_text(study)

    def join_command(self, site: int) -> list[str]:
        home = self.folder / f"hospital-{site}"
        options = {
            "--recipe": home / "study.toml",
            "--data": home / "scans",
            "--key": self.keys / f"site-{site}",
            "--ca": self.keys / "ca.crt",
            "--folder": home / "memory",
        }
        command = ["python", "-m", "fedlens.cli.main", "join", f"127.0.0.1:{self.port}"]
        return [*command, *(str(word) for pair in options.items() for word in pair), "--yes"]

    def join(self, site: int, *options: str) -> None:
        self.start(f"site-{site}", *self.join_command(site), *options)

    def wait_until_joined(self, site: int, times: int = 1) -> None:
        self.wait_for(
            lambda: self.log(f"site-{site}").count("joined 127.0.0.1") >= times,
            PATIENCE,
            f"site {site}'s coming",
        )

    def run(self, out: str, *options: str, recipe: str = "study.toml") -> tuple[int, str]:
        """`fedlens run --engine flower`; its exit code and everything it said."""
        done = subprocess.run(
            [
                str(BIN / "python"),
                "-m",
                "fedlens.cli.main",
                "run",
                str(self.folder / recipe),
                "--engine",
                "flower",
                "--superlink",
                str(self.folder / "superlink"),
                "--out",
                str(self.folder / out),
                *options,
            ],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout + done.stderr
