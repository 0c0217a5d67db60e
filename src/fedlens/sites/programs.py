"""Flower's programs as child processes, and how they find and trust each other: home folder, ports,
addresses, certificates.

Every command is one of Flower's own programs and is said aloud before it runs, so that an existing
Flower federation can be used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedlens.config.convert import ConfigError

Say = Callable[[str], None]


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
    home = Path(
        os.environ.get("FLWR_HOME")
        or Path(os.environ.get("FEDLENS_HOME", Path.home() / ".fedlens")) / "flwr"
    ).absolute()
    home.mkdir(parents=True, exist_ok=True)
    return home


def need(program: str) -> str:
    found = shutil.which(program, path=environment(Path())["PATH"])
    if not found:
        raise ConfigError(f'{program} is not installed: pip install "fedlens[flower]"')
    return found


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _die_with_parent() -> None:
    """Between fork and exec: even `kill -9` leaves no server behind that nobody watches (Linux;
    elsewhere a polite kill is needed).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Crew:
    """Child processes that live and die together. Each is announced as the command it is."""

    def __init__(self, say: Say, home: Path) -> None:
        self.say, self.env, self.children = say, environment(home), list[subprocess.Popen[bytes]]()

    def line(self, *command: str) -> str:
        """The command as a shell takes it. `flwr` finds our connection only with the Flower home
        that it is written in.
        """
        home = f"FLWR_HOME={shlex.quote(self.env['FLWR_HOME'])} " if command[0] == "flwr" else ""
        return home + shlex.join(command)

    def start(self, *command: str, quiet: bool = False) -> subprocess.Popen[bytes]:
        need(command[0])
        if not quiet:
            self.say("$ " + self.line(*command))
        child = subprocess.Popen(
            command, env=self.env, start_new_session=True, preexec_fn=_die_with_parent
        )
        self.children.append(child)
        return child

    def again(self, child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """The same command once more, in place of one that ended."""
        self.children.remove(child)
        assert isinstance(child.args, tuple)
        return self.start(*map(str, child.args), quiet=True)

    def call(self, *command: str, check: bool = True) -> str:
        """Run a short one to its end; its output."""
        need(command[0])
        self.say("$ " + self.line(*command))
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if check and done.returncode:
            lines = [x for x in (done.stderr + done.stdout).strip().splitlines() if x.strip()]
            raise ConfigError(
                f"{shlex.join(command[:3])} failed:"
                f" {lines[-1].strip() if lines else done.returncode}"
            )
        return done.stdout + (done.stderr if not check else "")

    def stop(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            for child in self.children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # the session of a child: Flower's programs have children of their own
                    os.killpg(child.pid, how)
            until = time.monotonic() + 8
            while (
                how == signal.SIGTERM
                and time.monotonic() < until
                and any(c.poll() is None for c in self.children)
            ):
                time.sleep(0.1)
        for child in self.children:
            child.wait()

    def __enter__(self) -> Crew:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a polite kill cleans up too
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def private_file(path: Path) -> Path:
    """Its owner's alone, and so is its folder if new: a SuperLink's database holds what sites send.
    SQLite's side files follow.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
    return path.absolute()


def trusting(ca: Path) -> ssl.SSLContext:
    """TLS that trusts this CA alone. Flower's programs would wait for ever with a file that is
    none.
    """
    try:
        return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError as e:
        raise ConfigError(
            f"{ca} is not a CA certificate: take the ca.crt that `fedlens keys` made at the server"
        ) from e


def await_port(host: str, port: int, ca: Path, crew: Crew, seconds: float = 60) -> None:
    trust, until, why = trusting(ca), time.monotonic() + seconds, ""
    while time.monotonic() < until:
        if any(c.poll() is not None for c in crew.children):
            raise ConfigError("the SuperLink ended at once: its own words are above")
        try:
            with (
                socket.create_connection((host, port), 1) as plain,
                trust.wrap_socket(plain, server_hostname=host),
            ):
                return
        except ssl.SSLCertVerificationError as e:  # waiting makes no other certificate of it
            raise ConfigError(
                f"the server at {host}:{port} cannot prove that it is the one of {ca}"
                f" ({e.verify_message.strip('.')}): the CA file must be that server's, and its"
                f" certificate must name {host} (`fedlens keys --host {host}` at the server makes"
                " one)"
            ) from e
        except OSError as e:
            why = e.strerror or str(e)
        time.sleep(0.1)
    raise ConfigError(f"the SuperLink did not answer at {host}:{port} within {seconds:g} s ({why})")


def connection(home: Path, address: str, ca: Path) -> str:
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
                text = _without(text, f"[superlink.{name}]")
        file.write_text(text.rstrip() + "\n\n" + table if text.strip() else table)
    return name


def _without(text: str, header: str) -> str:
    kept, skipping = [], False
    for line in text.splitlines():
        if line.startswith("["):
            skipping = line.strip() == header
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def claim(host: str, port: int) -> None:
    """Refuse a port that cannot be had. Somebody else's SuperLink there would take our sites' keys,
    and only then would ours end.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as s:
            # connections of a server that just ended are no obstacle
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(place)
    except OSError as e:
        hint = (
            "something listens there already, choose another --port"
            if e.errno == errno.EADDRINUSE
            else e.strerror or str(e)
        )
        raise ConfigError(f"cannot serve at {host}:{port}: {hint}") from e


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not host or not 0 < number < 65536 or not host.isprintable() or set(host) & set("/@ "):
        raise ConfigError(
            f"{address!r} is not an address: write host:port, such as 127.0.0.1:8000, with a port"
            " up to 65535"
        )
    return host.strip("[]"), number


def node_config(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={_toml(v)}" for k, v in facts.items() if v not in (None, ""))


def _toml(value: Any) -> str:
    """As Flower reads a node config: TOML, which has no surrogate pairs (JSON escapes an emoji as
    one), cut at the next quotation mark.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    return (
        '"'
        + r"\u0022".join(json.dumps(part, ensure_ascii=False)[1:-1] for part in value.split('"'))
        + '"'
    )
