"""Addresses, ports and TLS: how a SuperLink is reached, and proved to be the right one."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fedlens.config.convert import ConfigError
from fedlens.sites.keys import pem
from fedlens.trust.signing import read_signing_key


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not host or not 0 < number < 65536 or not host.isprintable() or set(host) & set("/@ "):
        raise ConfigError(
            f"{address!r} is not an address: write host:port, such as 127.0.0.1:8000, with a port"
            " up to 65535"
        )
    return host.strip("[]"), number


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def require_free_port(host: str, port: int) -> None:
    """Refuse a port that cannot be used. Somebody else's SuperLink there would take our sites'
    keys, and only then would ours end.
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


def tls_context(ca: Path) -> ssl.SSLContext:
    """TLS that trusts this CA alone. Flower's programs would wait for ever with a file that is
    none.
    """
    try:
        return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError as e:
        raise ConfigError(
            f"{ca} is not a CA certificate: take the ca.crt that `fedlens keys` made at the server"
        ) from e


def site_tls(ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS of a site: trusts this CA alone, and shows a certificate of its own."""
    secret = read_signing_key(key)
    context = tls_context(ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not certificate.is_file():
        raise ConfigError(
            f"there is no certificate {certificate} for {key}: the server's operator makes it with"
            f" `fedlens keys --certify {key.name}.pub`"
        )
    with tempfile.NamedTemporaryFile() as file:  # its owner's alone, and gone at once
        file.write(pem(secret))
        file.flush()
        try:
            context.load_cert_chain(certificate, file.name)
        except ssl.SSLError as e:
            raise ConfigError(f"{certificate} is not the certificate of the key {key}") from e
    return context


def front_tls(keys: Path) -> ssl.SSLContext:
    """TLS of a server that only sites with a certificate of this folder's authority can open."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(keys / "ca.crt")
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    return context


def wait_for_port(
    host: str,
    port: int,
    ca: Path,
    is_alive: Callable[[], bool] = lambda: True,
    seconds: float = 60,
) -> None:
    """Until the SuperLink answers there. is_alive: whether its process still runs, where that is
    known.
    """
    context = tls_context(ca)
    deadline = time.monotonic() + seconds
    problem = ""
    while time.monotonic() < deadline:
        if not is_alive():
            raise ConfigError("the SuperLink ended at once: its own words are above")
        try:
            with (
                socket.create_connection((host, port), 1) as plain,
                context.wrap_socket(plain, server_hostname=host),
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
            problem = e.strerror or str(e)
        time.sleep(0.1)
    raise ConfigError(
        f"the SuperLink did not answer at {host}:{port} within {seconds:g} s ({problem})"
    )
