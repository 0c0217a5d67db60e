"""Signatures with the keys that sites and servers have anyway: EC P-384, from `cryptography`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

SigningKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
_ALGORITHM = ec.ECDSA(hashes.SHA384())


class KeyFileError(ValueError):
    """A file that holds no key of ours; the message names it."""


def canonical(table: Mapping[str, Any]) -> bytes:
    """The one byte form of a table that is signed and hashed."""
    return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def make_signing_key(path: Path) -> SigningKey:
    """A new key from the operating system's randomness in PATH, for its owner only, and its public
    half in PATH.pub, both in OpenSSH form. A key is never overwritten.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    path.with_name(path.name + ".pub").write_text(public_text(key.public_key()) + "\n")
    return key


def read_signing_key(path: Path) -> SigningKey:
    """A private key, in the form of `fedlens keys` (OpenSSH) or of a certificate's key (PEM)."""
    data = path.read_bytes()
    ssh = b"OPENSSH" in data[:64]
    load = serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key
    try:
        key = load(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise KeyFileError(f"{path} is not a private key that can be read: {e}") from e
    if not isinstance(key, SigningKey):
        raise KeyFileError(f"{path} is not an elliptic-curve key: `fedlens keys` makes one")
    return key


def parse_public_key(text: str, where: str = "this") -> PublicKey:
    """One line of an OpenSSH .pub file."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm) as e:
        raise KeyFileError(f"{where} is not a site's public key: {e}") from e
    if not isinstance(key, PublicKey):
        raise KeyFileError(f"{where} is not an elliptic-curve key")
    return key


def parse_public_pem(data: bytes) -> PublicKey:
    """A public key as the server's list of sites has it."""
    key = serialization.load_pem_public_key(data)
    if not isinstance(key, PublicKey):
        raise KeyFileError("a key on the server's list of sites is not an elliptic-curve key")
    return key


def read_certificate_key(path: Path) -> PublicKey:
    """The public key that a certificate in PEM form is about."""
    try:
        key = x509.load_pem_x509_certificate(path.read_bytes()).public_key()
    except (ValueError, UnsupportedAlgorithm) as e:
        raise KeyFileError(f"{path} is not a certificate: {e}") from e
    if not isinstance(key, PublicKey):
        raise KeyFileError(f"{path} is not a certificate of an elliptic-curve key")
    return key


def public_text(key: PublicKey) -> str:
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_bytes(*form).decode()


def sign(key: SigningKey, data: bytes) -> str:
    return base64.b64encode(key.sign(data, _ALGORITHM)).decode()


def signature_fits(key: PublicKey, data: bytes, signature: Any) -> bool:
    """Whatever somebody else wrote there as a signature: it fits or it does not."""
    try:
        key.verify(base64.b64decode(str(signature), validate=True), data, _ALGORITHM)
    except (InvalidSignature, ValueError):
        return False
    return True
