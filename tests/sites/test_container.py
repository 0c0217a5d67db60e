"""The Containerfile is built and compose.yaml is started, without an image registry, with what
`apt-get install buildah podman podman-compose mmdebstrap runc aardvark-dns` brings.

The base image is made with mmdebstrap. What FedLens needs besides itself is gigabytes: the packages
of the Python that runs this test are mounted into every container instead, so pip installs FedLens
alone there. What this machine cannot do at all skips the test with the words of the tool that says
so; from the first container that runs on, everything has to work.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hospitals import STUDY, write_pictures

pytest.importorskip("flwr")
from fedlens.cli.main import invoke

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("buildah", "podman", "podman-compose", "mmdebstrap")
PYTHON = ".".join(platform.python_version_tuple()[:2])
USER = 1000  # of the Containerfile
CONTAINERS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
volumes = ["{packages}:/packages:ro", "{programs}:/programs:ro"]
[network]
network_config_dir = "{folder}/networks"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{folder}/tmp"
{runtime}
"""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""
PROGRAM = """#!/usr/bin/python3
import sys
from {module} import {name}
sys.exit({name}())
"""


class Machine:
    """Images and containers in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir()
        for point in distribution("flwr").entry_points.select(group="console_scripts"):
            path = programs / point.name
            path.write_text(PROGRAM.format(module=point.module, name=point.attr))
            path.chmod(0o755)
        facts = {
            "folder": folder,
            "programs": programs,
            "packages": sysconfig.get_path("platlib"),
            # crun takes no mix of both kinds of cgroups
            "runtime": 'runtime = "runc"' if shutil.which("runc") else "",
        }
        (folder / "containers.conf").write_text(CONTAINERS.format(**facts))
        (folder / "storage.conf").write_text(STORAGE.format(**facts))
        self.env = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def attempt(
        self, *command: str, cwd: Path | None = None, seconds: float = 600
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.env,
            cwd=cwd or self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = self.attempt(*command, cwd=cwd)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        return done.stdout

    def try_out(self, *command: str) -> str:
        """A step that depends on the machine alone."""
        done = self.attempt(*command)
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["nothing said"])[-1]
            pytest.skip(f"{' '.join(command[:3])}: {last}")
        return done.stdout

    def close(self) -> None:
        for what in (("rm", "-fa", "-t", "2"), ("volume", "rm", "-fa"), ("rmi", "-fa")):
            self.attempt("podman", *what)
        self.attempt("umount", str(self.folder / "images" / "overlay"))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("images are made by root here")
    with tempfile.TemporaryDirectory(prefix="fl-", ignore_cleanup_errors=True) as text:
        machine = Machine(Path(text))
        machine.folder.chmod(0o755)
        try:
            make_base(machine)
            yield machine
        finally:
            machine.close()


def make_base(machine: Machine) -> None:
    """What the Containerfile stands on: Python, pip, and what builds a wheel without a network."""
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
    packages = "--include=python3,python3-pip,python3-hatchling,ca-certificates"
    machine.try_out("mmdebstrap", "--variant=minbase", packages, suite, "base.tar")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/programs"
    machine.try_out(
        "podman", "import", "--change", f"ENV PATH={path}", "--change", "ENV PYTHONPATH=/packages",
        "base.tar", "base",
    )  # fmt: skip
    (machine.folder / "base.tar").unlink()
    version = machine.try_out("podman", "run", "--rm", "base", "python3", "--version")
    if f"Python {PYTHON}." not in version:
        pytest.skip(f"{suite} has {version.strip()}, these packages are for {PYTHON}")


@pytest.fixture(scope="module")
def image(machine: Machine) -> str:
    pip = "--break-system-packages --ignore-installed --no-deps --no-build-isolation"
    machine.run(
        "buildah", "bud", "--isolation", "chroot", "--network", "host",
        "--build-arg", "BASE=localhost/base", "--build-arg", f"PIP_OPTIONS={pip}",
        "-t", "fedlens", str(REPOSITORY),
    )  # fmt: skip
    return "localhost/fedlens"


def inside(machine: Machine, image: str, *command: str) -> str:
    return machine.run(
        "podman", "run", "--rm", "--entrypoint", command[0], image, *command[1:]
    ).strip()


def test_the_image_holds_fedlens_and_works_as_nobody_special(machine: Machine, image: str) -> None:
    assert inside(machine, image, "id", "-u") == str(USER)
    code = "import fedlens, os; print(fedlens.__file__, os.path.exists('/src'), os.getcwd())"
    where, source, home = inside(machine, image, "python3", "-c", code).split()
    assert where.startswith("/usr/") and (source, home) == ("False", "/site")
    assert "Take part with this site's data" in inside(machine, image, "fedlens", "join", "--help")
    done = machine.attempt("podman", "run", "--rm", image, "127.0.0.1:1", "--recipe", "demo")
    assert done.returncode == 2 and "fedlens: " in done.stdout  # no key was mounted
    assert "Traceback" not in done.stdout


def test_a_server_and_three_hospitals(machine: Machine, image: str) -> None:
    """As the first lines of compose.yaml say; a run under masks; then every hospital's ledger."""
    here = machine.folder / "federation"
    here.mkdir()
    shutil.copy(REPOSITORY / "compose.yaml", here)
    (here / "study.toml").write_text(STUDY.replace("clients = 2", "clients = 3"))
    assert invoke(["keys", "0", "1", "2", "--host", "server", "--out", str(here / "keys")]) == 0
    for k in range(3):
        write_pictures(here / f"hospital-{k}" / "scans", k)
        keys = here / f"hospital-{k}" / "keys"
        keys.mkdir()
        names = ["ca.crt", f"site-{k}", f"site-{k}.crt", *(f"site-{j}.pub" for j in range(3))]
        for name in names:
            shutil.copy(here / "keys" / name, keys)
    for path in (here / "keys", *(here.glob("hospital-*/keys"))):
        for file in (path, *path.iterdir()):
            os.chown(file, USER, USER)
    compose = ("podman-compose", "-p", "study")
    try:
        machine.run(*compose, "up", "-d", cwd=here)
        for k in range(3):
            wait_for_words(machine, f"study_hospital-{k}_1", "joined server:8443")
        run = ("fedlens", "run", "/study.toml", "--engine", "flower", "--out", "run")
        machine.run("podman", "exec", "study_server_1", *run)
        summary = machine.run("podman", "exec", "study_server_1", "cat", "run/metrics.jsonl")
        assert json.loads(summary.splitlines()[0])["heard"] == 3
        for k in range(3):
            verify = ("fedlens", "ledger", "/site", "--verify", "--key", f"/keys/site-{k}.pub")
            said = machine.run("podman", "exec", f"study_hospital-{k}_1", *verify)
            assert "intact" in said and "Protection: SecureSum" in said
            kept = machine.run(
                "podman", "exec", f"study_hospital-{k}_1", "stat", "-c", "%a", "/site/ledger.jsonl"
            )
            assert kept.strip() == "600"
    finally:
        machine.attempt(*compose, "down", "-v", cwd=here)


def wait_for_words(machine: Machine, container: str, words: str, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while words not in (said := machine.attempt("podman", "logs", container).stdout):
        assert time.monotonic() < until, f"{container}\n{said[-4000:]}"
        time.sleep(1)
