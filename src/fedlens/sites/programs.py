"""Flower's programs as child processes, and the configuration they find each other by.

Every command is one of Flower's own programs and is printed before it runs, so that an existing
Flower federation can be used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from fedlens.config.convert import ConfigError
from fedlens.core.files import home_folder
from fedlens.core.log import Log

Process = subprocess.Popen[bytes]
GRACE = 8.0  # seconds between asking a program to end and killing it


class Programs:
    """Child processes that live and die together. Each is logged as the command it is."""

    def __init__(self, log: Log, home: Path) -> None:
        self.log = log
        self.env = environment(home)
        self.children: list[Process] = []

    def __enter__(self) -> Programs:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a polite kill cleans up too
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def shell_line(self, *command: str) -> str:
        """The command as a shell takes it. `flwr` finds our connection only with the Flower home
        that it is written in.
        """
        home = f"FLWR_HOME={shlex.quote(self.env['FLWR_HOME'])} " if command[0] == "flwr" else ""
        return home + shlex.join(command)

    def start(self, *command: str, quiet: bool = False) -> Process:
        require_program(command[0])
        if not quiet:
            self.log("$ " + self.shell_line(*command))
        child = subprocess.Popen(
            command, env=self.env, start_new_session=True, preexec_fn=_die_with_parent
        )
        self.children.append(child)
        return child

    def run(self, *command: str, check: bool = True) -> str:
        """Run a short one to its end; its output."""
        require_program(command[0])
        self.log("$ " + self.shell_line(*command))
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if check and done.returncode:
            lines = [x for x in (done.stderr + done.stdout).strip().splitlines() if x.strip()]
            reason = lines[-1].strip() if lines else done.returncode
            raise ConfigError(f"{shlex.join(command[:3])} failed: {reason}")
        return done.stdout + (done.stderr if not check else "")

    def all_alive(self) -> bool:
        return all(child.poll() is None for child in self.children)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(c.poll() is None for c in self.children):
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        for child in self.children:
            child.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To the session of each child: Flower's programs have children of their own."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)


def _die_with_parent() -> None:
    """Between fork and exec: even `kill -9` leaves no orphaned server behind (Linux; elsewhere a
    polite kill is needed).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def require_program(name: str) -> None:
    if not shutil.which(name, path=environment(Path())["PATH"]):
        raise ConfigError(f'{name} is not installed: pip install "fedlens[flower]"')


# -- Flower's configuration ------------------------------------------------------------------------


def environment(home: Path) -> dict[str, str]:
    """Flower without telemetry and update checks, with its quickest public settings, and with our
    Python's programs first.
    """
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": os.environ.get(
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1"
        ),
    }


def flower_home() -> Path:
    """Flower's own if the user set one; else a folder of ours, so that nobody's Flower
    configuration is touched.
    """
    ours = home_folder() / "flwr"
    home = Path(os.environ.get("FLWR_HOME") or ours).absolute()
    home.mkdir(parents=True, exist_ok=True)
    return home


def private_file(path: Path) -> Path:
    """Its owner's alone, and so is its folder if new: a SuperLink's database holds what sites send.
    SQLite's side files follow.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
    return path.absolute()


def write_connection(home: Path, address: str, ca: Path) -> str:
    """The name under which Flower's own commands reach this SuperLink, written into its config.toml
    once.
    """
    if not ca.is_file():
        raise ConfigError(
            f"there is no CA certificate {ca}: `fedlens keys` makes one, the server's operator"
            " has it"
        )
    name = "fedlens-" + "".join(c if c.isalnum() else "-" for c in address)
    table = f'[superlink.{name}]\naddress = "{address}"\nroot-certificates = "{ca.absolute()}"\n'
    file = home / "config.toml"
    text = file.read_text() if file.exists() else ""
    if table not in text:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if name in tomllib.loads(text).get("superlink", {}):
                text = _without_table(text, f"[superlink.{name}]")
        file.write_text(text.rstrip() + "\n\n" + table if text.strip() else table)
    return name


def _without_table(text: str, header: str) -> str:
    kept, skipping = [], False
    for line in text.splitlines():
        if line.startswith("["):
            skipping = line.strip() == header
        if not skipping:
            kept.append(line)
    return "\n".join(kept)
