"""A real deployment on 127.0.0.1 for tests: `fedlens serve` (a SuperLink, and the front before it),
and some sites.

Every process is started in a session of its own and ended by that session's id, whatever happens to
the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.sites import keys

TESTS = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def die_with_me() -> None:
    """Between fork and exec: even a test run that is killed leaves nothing behind (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Deployment:
    """sites: so many have keys that the server knows, as clients 0, 1, ..."""

    def __init__(self, folder: Path, sites: int = 2) -> None:
        self.folder, self.port, self.inner = folder, free_port(), free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.keys, self.jobs = folder / "keys", folder / "jobs"
        keys.make_authority(self.keys)
        keys.make_server_certificate(self.keys, ["127.0.0.1"])
        self.known = [self.make_key(f"site-{k}") for k in range(sites)]
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self.inner}"\nroot-certificates ='
            f' "{self.keys / "ca.crt"}"\n'
        )
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
        self.env = {
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": path,
            "FLWR_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    # -- processes ---------------------------------------------------------------------------------

    def start(self, name: str, *command: str, **env: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env={**self.env, **env},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_me,
            )

    def stop(self, name: str, how: int = signal.SIGKILL) -> None:
        """The whole session: a SuperNode has a SuperExec and ClientApps below it."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    def close(self) -> None:
        for name in list(self.running):
            self.stop(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # -- the parts of a federation -----------------------------------------------------------------

    def make_key(self, name: str) -> Path:
        """A site's key with a certificate of the federation's authority; returns its .pub."""
        _, public = keys.make_site_key(self.keys / name)
        keys.make_site_certificate(self.keys, public)
        return public

    def bindings(self) -> dict[int, bytes]:
        """client -> public key, as the server's list has it."""
        return {k: keys.public_pem(keys.site_public_key(p)) for k, p in enumerate(self.known)}

    def serve(self, *options: str, program: Sequence[str] = ("-m", "fedlens.cli.main")) -> None:
        """program: what `fedlens` is."""
        self.start(
            "server",
            "python",
            *program,
            "serve",
            "--port",
            str(self.port),
            "--control-port",
            str(self.inner),
            "--keys",
            str(self.keys),
            "--state",
            str(self.folder / "superlink"),
            *(part for public in self.known for part in ("--site", str(public))),
            *options,
        )
        began = self.log("server").count("sites can join")
        self.wait_for(
            lambda: self.log("server").count("sites can join") > began, 240, "the server's start"
        )

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def site(self, site: int, /, module: str = "toy_app", **settings: Any) -> None:
        """A site with the fleet client of `fedlens join` and the `make_site` of a module. settings:
        of the node; `client` makes a site call itself another one."""
        node: Mapping[str, Any] = {
            "client": site,
            "folder": str(self.folder / f"memory-{site}"),
            "jobs": str(self.jobs),
            **settings,
        }
        self.start(
            f"site-{site}",
            "python",
            str(TESTS / "a_site.py"),
            module,
            f"127.0.0.1:{self.port}",
            str(self.keys / "ca.crt"),
            str(self.keys / f"site-{site}"),
            json.dumps(node),
        )

    def supernode(self, site: int) -> None:
        """Flower's own, which runs the ClientApp of whatever app is submitted."""
        folder = self.folder / f"memory-{site}"
        self.start(
            f"site-{site}",
            "flower-supernode",
            "--superlink",
            f"127.0.0.1:{self.inner}",
            "--root-certificates",
            str(self.keys / "ca.crt"),
            "--auth-supernode-private-key",
            str(self.keys / f"site-{site}"),
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
            "--node-config",
            f'client={site} folder="{folder}"',
        )

    def submit(self, app: Path, name: str = "run") -> None:
        self.start(name, "flwr", "run", str(app), "here", "--stream")

    def study(self, recipe: str, out: Path, name: str = "study", resume: bool = False) -> None:
        """Begin a run of this recipe, as `fedlens run --engine flower` does."""
        from fedlens.engines.flower.engine import write_app

        config = {
            "name": name,
            "text": recipe,
            "out": str(out),
            "resume": resume,
            "fresh": False,
            "wait": 600.0,
            "least": len(self.known),
            "forgive": False,
        }
        app = self.folder / f"app-{name}"
        write_app(app, "fedlens.sites.server:run_server", "fedlens.sites.site:make_site", config)
        self.submit(app, f"run-{name}")

    def wait_for(self, condition: Any, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                tails = "\n".join(
                    f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}"
                    for p in sorted(self.folder.glob("*.log"))
                )
                raise AssertionError(f"{what} did not happen within {seconds:g} s\n{tails}")
            time.sleep(0.1)


@contextlib.contextmanager
def deployment(folder: Path, sites: int = 2) -> Iterator[Deployment]:
    here = Deployment(folder, sites)
    try:
        yield here
    finally:
        here.close()
