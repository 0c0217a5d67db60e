"""Masks, shares and boxes against other implementations and against numbers worked out by hand."""

from __future__ import annotations

import hashlib
import hmac

import pytest
import torch

from fedlens.trust import masking
from fedlens.trust.masking import PRIME, Tampered, expand, pair_key, public_of, rebuild, split


def test_hkdf_and_streams_are_those_of_other_implementations() -> None:
    """RFC 5869 in five lines of the standard library, and pycryptodome's AES in counter mode."""
    aes = pytest.importorskip("Crypto.Cipher.AES")
    info = b"".join(len(w).to_bytes(4, "big") + w for w in (b"mask", b"7"))
    extracted = hmac.digest(b"fedlens", b"k" * 32, hashlib.sha256)
    key = hmac.digest(extracted, info + b"\x01", hashlib.sha256)
    assert expand(b"k" * 32, "mask", 7) == key

    flats = [torch.arange(70_000, dtype=torch.int64), torch.zeros(5, dtype=torch.int16)]
    masking.add_masks(flats, [(key, True)])
    cipher = aes.new(key[:16], aes.MODE_CTR, nonce=b"", initial_value=bytes(16))
    stream = cipher.encrypt(bytes(560_010))
    wide = torch.frombuffer(bytearray(stream[:560_000]), dtype=torch.int64)
    assert torch.equal(flats[0], torch.arange(70_000) + wide)
    assert torch.equal(flats[1], torch.frombuffer(bytearray(stream[560_000:]), dtype=torch.int16))
    few = masking.mask_numbers(key, 2)
    assert few == [int.from_bytes(stream[:16], "little"), int.from_bytes(stream[16:32], "little")]


def test_pairs_agree_and_their_masks_cancel() -> None:
    a, b = (hashlib.sha256(x).digest() for x in (b"a", b"b"))
    key = pair_key(a, public_of(b), "mask", "round 3")
    assert key == pair_key(b, public_of(a), "mask", "round 3")
    assert key != pair_key(b, public_of(a), "mask", "round 4")
    for kind in (torch.int16, torch.int32, torch.int64):
        x = torch.full((100_001,), torch.iinfo(kind).max, dtype=kind)
        y = x.clone()
        masking.add_masks([y], [(key, True)])
        assert not torch.equal(x, y)
        masking.add_masks([y], [(key, False)])
        assert torch.equal(x, y)


def test_a_public_key_that_gives_everybody_the_same_mask_is_refused() -> None:
    """The point of order one: its product with any secret is zero."""
    with pytest.raises(Tampered, match="a public key is none"):
        pair_key(b"s" * 32, bytes(32))
    with pytest.raises(Tampered, match="a public key is none"):
        pair_key(b"s" * 32, b"short")


def test_shares_by_hand() -> None:
    """f(x) = 5 + c x with threshold 2: the shares of clients 0 and 1 are f(1) and f(2), and
    f(0) = 2 f(1) - f(2)."""
    shares = split((5).to_bytes(32, "big"), [0, 1, 2], 2, b"seed" * 8)
    first, second = (int.from_bytes(shares[i], "big") for i in (0, 1))
    assert (2 * first - second) % PRIME == 5
    for pair in ([0, 1], [0, 2], [2, 1]):
        assert rebuild({i: shares[i] for i in pair}) == (5).to_bytes(32, "big")


def test_one_share_too_few_says_nothing() -> None:
    """Whatever two of the shares of a threshold of three are: for every secret there is just one
    polynomial through it and through them, so each secret is as likely as any other. Here that
    polynomial is made for three quite different ones, and its third share gives that secret."""
    ids, secret = [0, 3, 7, 9], b"\x11" * 32
    shares = split(secret, ids, 3, b"seed" * 8)
    two = {i: int.from_bytes(shares[i], "big") for i in (3, 9)}
    for other in (b"\x00" * 32, b"\xff" * 32, secret):
        points = {-1: int.from_bytes(other, "big"), **two}
        at = 8  # of client 7
        value = 0
        for i, y in points.items():
            above = below = 1
            for j in points:
                if j != i:
                    above = above * (at - (j + 1)) % PRIME
                    below = below * (i - j) % PRIME
            value = (value + y * above * pow(below, -1, PRIME)) % PRIME
        third = value.to_bytes(66, "big")
        assert rebuild({3: shares[3], 9: shares[9], 7: third}) == other
    assert value.to_bytes(66, "big") == shares[7]
    wrong = dict(shares) | {0: shares[3]}
    with pytest.raises(Tampered, match="do not belong together"):
        rebuild({i: wrong[i] for i in (0, 3, 7)})


def test_a_box_opens_for_its_holder_and_its_purpose_only() -> None:
    chacha = pytest.importorskip("Crypto.Cipher.ChaCha20_Poly1305")
    key = expand(b"k" * 32, "box")
    box = masking.seal(key, b"shares")
    cipher = chacha.new(key=key, nonce=bytes(12))
    assert cipher.decrypt_and_verify(box[:-16], box[-16:]) == b"shares"
    assert masking.unseal(key, box) == b"shares"
    for wrong in (box[:-1] + bytes([box[-1] ^ 1]), bytes([box[0] ^ 1]) + box[1:], b""):
        with pytest.raises(Tampered):
            masking.unseal(key, wrong)
    with pytest.raises(Tampered):
        masking.unseal(expand(b"k" * 32, "another"), box)
