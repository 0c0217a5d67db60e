"""Masks that cancel in a sum: keys, keystreams, secret shares and sealed boxes (Bonawitz et al.,
2017), made of the primitives of the `cryptography` package. This composition is unaudited.

A client's `Secrets` for one sum all follow from 32 bytes: an X25519 key for the masks it shares
with others, a seed for its own mask, and the polynomials by which both are shared out.

- Mask of a pair: key = HKDF-SHA256(X25519(a, B), context), AES-128 in counter mode on zeros. One
  of the two adds the stream, the other subtracts it, modulo 2^bits.
- Own mask: the same stream, with the seed as key. Without it, a server that says "client 3 is lost"
  and then receives its reply after all would have recovered all masks of that reply.
- Shares: Shamir's, over the integers modulo 2^521 - 1: any `threshold` of them give the secret
  back, one fewer say nothing.
- Box: ChaCha20-Poly1305 under HKDF(X25519(own box key, the other's), context). The context names
  the owner's mask key, so every key is used for one box and its nonce can be constant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
except ImportError as e:
    raise ImportError('SecureSum needs cryptography: pip install "fedlens[secure]"') from e

PRIME = 2**521 - 1
SHARE_BYTES = 66  # of a number modulo PRIME
# bytes of a mask made and added at a time: what is made is added while the cache still holds it
PIECE = 1 << 19
_NO_NONCE = bytes(12)
_ZEROS = bytes(PIECE)


class Tampered(ValueError):
    """A box or a share that is not what it claims to be."""


def expand(key: bytes, *context: object, size: int = 32) -> bytes:
    """A key for one purpose (HKDF-SHA256). context: what it is for; parts cannot run together."""
    info = b"".join(len(part := str(word).encode()).to_bytes(4, "big") + part for word in context)
    return HKDF(hashes.SHA256(), size, salt=b"fedlens", info=info).derive(key)


def public_of(secret: bytes) -> bytes:
    key = X25519PrivateKey.from_private_bytes(secret).public_key()
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def pair_key(secret: bytes, public: bytes, *context: object) -> bytes:
    """What the owner of `secret` and the owner of `public` both get, and nobody else."""
    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as e:  # not 32 bytes, or a point that gives everyone the same key
        raise Tampered("a public key is none") from e
    return expand(shared, *context)


@dataclass(frozen=True)
class Secrets:
    """Of one client for one sum. mask: its X25519 key. own: the seed of its own mask."""

    seed: bytes

    @property
    def mask(self) -> bytes:
        return expand(self.seed, "mask key")

    @property
    def own(self) -> bytes:
        return expand(self.seed, "own mask")

    def shares(self, ids: Sequence[int], threshold: int) -> dict[int, bytes]:
        """For each of these clients its share of both secrets, one behind the other."""
        both = [
            split(secret, ids, threshold, expand(self.seed, "shares", name))
            for name, secret in (("mask", self.mask), ("own", self.own))
        ]
        return {i: both[0][i] + both[1][i] for i in ids}


# -- shares ----------------------------------------------------------------------------------------


def split(secret: bytes, ids: Sequence[int], threshold: int, seed: bytes) -> dict[int, bytes]:
    """Shamir's shares: client i gets f(i + 1), f(0) the secret, f of degree threshold - 1 with
    coefficients that follow from `seed`.
    """
    rest = [int.from_bytes(expand(seed, k, size=96), "big") % PRIME for k in range(1, threshold)]
    coefficients = [int.from_bytes(secret, "big"), *rest]
    return {i: _at(coefficients, i + 1).to_bytes(SHARE_BYTES, "big") for i in ids}


def _at(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for c in reversed(coefficients):
        value = (value * x + c) % PRIME
    return value


def rebuild(shares: Mapping[int, bytes], size: int = 32) -> bytes:
    """The secret, from at least `threshold` shares: f(0)."""
    total = _value_at(shares, 0)
    if total >> 8 * size:
        raise Tampered("shares do not belong together")
    return total.to_bytes(size, "big")


def due_share(client: int, shares: Mapping[int, bytes]) -> bytes:
    """What this client's share must be, if `threshold` others are right."""
    return _value_at(shares, client + 1).to_bytes(SHARE_BYTES, "big")


def _value_at(shares: Mapping[int, bytes], x: int) -> int:
    """f(x) by Lagrange's formula, from f(i + 1) for some i."""
    total = 0
    for i, share in shares.items():
        above = below = 1
        for j in shares:
            if j != i:
                above = above * (x - j - 1) % PRIME
                below = below * (i - j) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    return total % PRIME


# -- boxes -----------------------------------------------------------------------------------------


def seal(key: bytes, text: bytes) -> bytes:
    return ChaCha20Poly1305(key).encrypt(_NO_NONCE, text, None)


def unseal(key: bytes, box: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_NO_NONCE, box, None)
    except InvalidTag as e:
        raise Tampered("a box was not sealed for this") from e


# -- masks -----------------------------------------------------------------------------------------

Streams = Sequence[tuple[bytes, bool]]


def add_masks(flats: Sequence[Tensor], streams: Streams) -> None:
    """Add keystreams to whole numbers, in place and modulo 2^bits. streams: a key each, and whether
    its stream is added or subtracted. The stream of a key runs through all arrays in their order.
    """
    open_streams = [(_stream(key), plus) for key, plus in streams]
    space = bytearray(PIECE + 15)  # the cipher wants room for one more block
    for piece in _pieces(flats):
        zeros = memoryview(_ZEROS)[: piece.numel() * piece.element_size()]
        mask = torch.frombuffer(space, dtype=piece.dtype, count=piece.numel())
        for stream, plus in open_streams:
            stream.update_into(zeros, space)
            piece.add_(mask) if plus else piece.sub_(mask)


def _pieces(flats: Sequence[Tensor]) -> Iterator[Tensor]:
    for flat in flats:
        if flat.numel():
            yield from torch.split(flat, PIECE // flat.element_size())


def mask_numbers(key: bytes, count: int) -> list[int]:
    """The beginning of a key's stream as numbers modulo 2^128, for a stream of its own: `add_masks`
    must not have the same key.
    """
    data = _stream(key).update(bytes(16 * count))
    return [int.from_bytes(data[16 * k : 16 * k + 16], "little") for k in range(count)]


def few_masks(streams: Streams, count: int) -> list[int]:
    """The sum of these streams for the few numbers."""
    total = [0] * count
    for key, plus in streams:
        for k, number in enumerate(mask_numbers(expand(key, "few"), count)):
            total[k] += number if plus else -number
    return total


def _stream(key: bytes) -> Any:
    """AES-128 in counter mode. Half of the key: the exchange that made it is worth 128 bits, and a
    longer cipher key is only slower.
    """
    return Cipher(algorithms.AES(key[:16]), modes.CTR(bytes(16))).encryptor()


def fingerprint(*parts: str) -> str:
    """sha256 of texts that cannot run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
