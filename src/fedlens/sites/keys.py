"""Certificates and keys: what a server and its sites need to know each other. Secret are `*.key`
and a site's private key, which are written readable for their owner only.

`make_authority` makes ca.crt and ca.key, `make_server_certificate` one for the names and addresses
sites will use, `make_site_key` one key pair, `make_site_certificate` one for a site's public key.
The CA file goes to every site; its key stays with whoever issues certificates. A site has one key
for two purposes: its certificate opens the connection, and it signs what Flower asks a node for.
The front (`front`) sees to it that the two belong together.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlens.trust.signing import parse_public_key

YEARS = 2
# in every certificate: `serve` talks to its own SuperLink there, whatever name the sites use
LOCAL_HOSTS = (
    "127.0.0.1",
    "localhost",
)


def check_host(text: str) -> None:
    """A certificate names hosts in ASCII, without a port."""
    if not re.fullmatch(r"[A-Za-z0-9*_]([A-Za-z0-9._-]*[A-Za-z0-9])?", text) and not _address(text):
        raise ValueError(
            f"{text!r} is not a host: write its name or address alone, and a name that is not ASCII"
            " in its xn-- form"
        )


def check_name(text: str) -> None:
    """A site's key lies in the folder it was asked for, and is not what another site's public key
    would be called.
    """
    if (
        not text
        or re.search(r"[/\\\0]", text)
        or text.startswith((".", "-"))
        or text.endswith(".pub")
    ):
        raise ValueError(
            f"{text!r} is not a name for a site's key: no slashes, no dot or dash at its beginning,"
            " no .pub at its end"
        )


def make_authority(folder: Path) -> Path:
    """ca.crt and ca.key, once: an existing authority is kept, because sites already trust it."""
    x509, ec, hashes, ser = _cryptography()
    if (folder / "ca.crt").exists():
        return folder / "ca.crt"
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "FedLens federation")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _certificate(x509, name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write(folder / "ca.key", pem(key), secret=True)
    _write(folder / "ca.crt", builder.sign(key, hashes.SHA384()).public_bytes(ser.Encoding.PEM))
    return folder / "ca.crt"


def make_server_certificate(folder: Path, hosts: Sequence[str]) -> tuple[Path, Path]:
    """server.pem and server.key, signed by the authority in the same folder, valid for these names
    and addresses and for LOCAL_HOSTS.
    """
    x509, ec, _, _ = _cryptography()
    hosts = list(dict.fromkeys([*hosts, *LOCAL_HOSTS]))
    for host in hosts:
        check_host(host)
    key = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([_host(x509, h) for h in hosts])
    purpose = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
    issued = _issue(folder, hosts[0], key.public_key(), purpose, names)
    _write(folder / "server.key", pem(key), secret=True)
    _write(folder / "server.pem", issued)
    return folder / "server.pem", folder / "server.key"


def make_site_key(path: Path) -> tuple[Path, Path]:
    """A node key pair in OpenSSH form: PATH stays at the site, PATH.pub goes to the server."""
    _, ec, _, ser = _cryptography()
    if path.exists():
        raise ValueError(f"{path} exists already: a key is never overwritten")
    key = ec.generate_private_key(ec.SECP384R1())
    _write(
        path,
        key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.OpenSSH, ser.NoEncryption()),
        secret=True,
    )
    public = path.with_name(path.name + ".pub")
    _write(
        public,
        key.public_key().public_bytes(ser.Encoding.OpenSSH, ser.PublicFormat.OpenSSH) + b"\n",
    )
    return path, public


def make_site_certificate(folder: Path, public: Path) -> Path:
    """The public key's name with .crt, in `folder`, where the authority is: proves that it knows
    the key. Which client it belongs to is not in it; the server's own list says that.
    """
    x509, _, _, _ = _cryptography()
    purpose = x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
    place = folder / f"{public.stem}.crt"
    _write(place, _issue(folder, public.stem, site_public_key(public), purpose))
    return place


def _issue(folder: Path, name: str, public: Any, purpose: Any, names: Any = None) -> bytes:
    """A certificate of the authority in this folder, as PEM."""
    x509, _, hashes, ser = _cryptography()
    if not (folder / "ca.key").is_file():
        raise ValueError(
            f"{folder}/ca.crt has no ca.key beside it to sign a certificate with: bring it back, or"
            " use another folder"
        )
    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    ca_key = ser.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name[:64])])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        _certificate(x509, subject, ca.subject, public)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(issuer, critical=False)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    data: bytes = builder.sign(ca_key, hashes.SHA384()).public_bytes(ser.Encoding.PEM)
    return data


def site_public_key(path: Path) -> Any:
    """A site's public key, from the .pub that `make_site_key` or ssh-keygen wrote."""
    if not path.is_file():
        raise ValueError(
            f"{path} is not a site's public key: `fedlens keys 0` makes one and calls it site-0.pub"
        )
    return parse_public_key(path.read_text(errors="replace"), str(path))


def public_pem(key: Any) -> bytes:
    """The public half as Flower and our lists of sites write it."""
    _, _, _, ser = _cryptography()
    data: bytes = key.public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
    return data


def certified_key(certificate: bytes) -> bytes:
    """The public key in a certificate in DER form, as PEM."""
    x509, _, _, _ = _cryptography()
    return public_pem(x509.load_der_x509_certificate(certificate).public_key())


def _certificate(x509: Any, subject: Any, issuer: Any, public: Any) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _host(x509: Any, text: str) -> Any:
    address = _address(text)
    return x509.IPAddress(address) if address else x509.DNSName(text)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def pem(key: Any) -> bytes:
    """A private key in the form that TLS wants."""
    _, _, _, ser = _cryptography()
    data: bytes = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
    return data


def _write(path: Path, data: bytes, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644), "wb"
    ) as f:
        f.write(data)


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as e:
        raise ImportError(
            'keys and certificates need the flower extra: pip install "fedlens[flower]"'
        ) from e
    return x509, ec, hashes, serialization
