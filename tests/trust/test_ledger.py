"""The ledger finds every way in which somebody could touch it, and says where."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedlens.core.message import Header, Message
from fedlens.trust.ledger import Head, Leaving, Ledger, LedgerError
from fedlens.trust.receipts import make_receipt, receipt_fits
from fedlens.trust.signing import (
    KeyFileError,
    canonical,
    make_signing_key,
    parse_public_key,
    read_signing_key,
    sign,
    signature_fits,
)
from fedlens.trust.verify import verify

REPLY = Message(
    {"delta": {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7)}},
    {"loss": 0.25, "examples": 12.0},
    {"delta": {"mean": 12.0}},
    3,
    Header(round=4),
)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def written(path: Path, lines: int = 6, key: ec.EllipticCurvePrivateKey | None = None) -> Path:
    """A ledger of so many lines, the first of which names the key."""
    ledger = Ledger(path, key or new_key(), sync=False)
    for k in range(lines - 1):
        payload = [bytes(REPLY.to_bytes())]
        ledger.append(Leaving("reply", 3, payload, "job", "hash", k, REPLY))
    return path


def edited(path: Path, change: Callable[[list[bytes]], None]) -> tuple[str, ...]:
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))
    return verify(path).faults


def test_a_line_says_what_left(tmp_path: Path) -> None:
    """The message holds six float32 and one int64: 6 * 4 + 8 = 32 bytes of arrays. Everything else
    is read back from the line without the code that wrote it."""
    payload = bytes(REPLY.to_bytes())
    ledger = Ledger(tmp_path / "ledger.jsonl", new_key())
    pieces = [payload[:7], memoryview(payload)[7:]]
    head = ledger.append(
        Leaving("reply", 3, pieces, "job", "abc", 4, REPLY, {"client": 3}, ("SecureSum",))
    )
    first, second = (tmp_path / "ledger.jsonl").read_bytes().splitlines()
    line = json.loads(second)
    assert line["trees"] == {"delta": {"bytes": 32, "arrays": {"w": "float32 2x3", "n": "int64"}}}
    assert line["scalars"] == {"loss": 0.25, "examples": 12.0}
    assert line["weights"] == {"delta": {"mean": 12.0}}
    assert (line["job"], line["recipe"], line["round"]) == ("job", "abc", 4)
    assert (line["said"], line["protection"]) == ({"client": 3}, ["SecureSum"])
    assert (line["bytes"], line["sha256"]) == (len(payload), hashlib.sha256(payload).hexdigest())
    assert line["previous"] == hashlib.sha256(first).hexdigest()
    assert head == (2, hashlib.sha256(second).hexdigest())
    assert (tmp_path / "ledger.jsonl").stat().st_mode & 0o777 == 0o600


def test_openssl_agrees_with_the_signature(tmp_path: Path) -> None:
    """Somebody who does not have FedLens can check a line: with OpenSSL's own command."""
    import base64

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = new_key()
    path = written(tmp_path / "ledger.jsonl", 2, key)
    line = json.loads(path.read_bytes().splitlines()[1])
    (tmp_path / "signature").write_bytes(base64.b64decode(line.pop("signature")))
    text = json.dumps(line, sort_keys=True, separators=(",", ":"))
    (tmp_path / "text").write_text(text)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(pem)
    command = [
        "openssl",
        "dgst",
        "-sha384",
        "-verify",
        "public.pem",
        "-signature",
        "signature",
        "text",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "Verified OK"


def test_an_untouched_ledger_is_intact(tmp_path: Path) -> None:
    key = new_key()
    path = written(tmp_path / "ledger.jsonl", 6, key)
    found = verify(path, key.public_key())
    assert found.intact and found.lines == 6
    assert found.head == hashlib.sha256(path.read_bytes().splitlines()[-1]).hexdigest()


def test_any_changed_byte_is_found_and_its_place_named(tmp_path: Path) -> None:
    """Every byte of a line in the middle, one after the other. A changed line break joins or tears
    lines, so it is left to the test of unfinished lines."""
    path = written(tmp_path / "ledger.jsonl", 4)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    start = len(lines[0]) + len(lines[1])
    for k in range(start, start + len(lines[2]) - 1, 7):
        changed = bytearray(whole)
        changed[k] ^= 1
        if changed[k] in b"\r\n":
            continue
        path.write_bytes(changed)
        assert verify(path).faults == ("place 3: line 3 was changed after signing",), k


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (lambda x: x.pop(2), ["place 3: line 3 is missing before line 4"]),
        (lambda x: x.__delitem__(slice(1, 4)), ["place 2: lines 2 to 4 are missing before line 5"]),
        (
            lambda x: x.insert(3, x[2].replace(b'"loss":0.25', b'"loss":0.26')),
            ["place 4: inserted; the lines around it fit together without it"],
        ),
        (
            lambda x: x.insert(3, b"nonsense\n"),
            ["place 4: inserted; the lines around it fit together without it"],
        ),
        (
            lambda x: x.insert(4, x[1]),
            ["place 5: line 2 again, or moved here from its own place"],
        ),
        (
            lambda x: x.__setitem__(slice(2, 4), [x[3], x[2]]),
            [
                "place 3: line 3 is missing before line 4",
                "place 4: line 3 again, or moved here from its own place",
            ],
        ),
        (
            lambda x: x.__setitem__(5, x[5][:50]),
            ["place 6: an unfinished line"],
        ),
        (
            lambda x: x.__setitem__(slice(2, 4), [b"{}\n", b"[1]\n"]),
            ["place 3 to 4: lines 3 to 4 were changed after signing"],
        ),
        (
            lambda x: x.__setitem__(5, b'{"line": 6}\n'),
            ["place 6: line 6 was changed after signing"],
        ),
    ],
)
def test_what_was_done_to_a_ledger(
    tmp_path: Path, change: Callable[[list[bytes]], None], faults: list[str]
) -> None:
    assert list(edited(written(tmp_path / "ledger.jsonl"), change)) == faults


def test_without_its_first_line_nothing_can_be_believed(tmp_path: Path) -> None:
    """Unless whoever asks brings the key: then only the first line is missing."""
    key = new_key()
    path = written(tmp_path / "ledger.jsonl", 4, key)
    faults = edited(path, lambda x: x.pop(0))
    assert faults == ("there is no line that a site has signed",)
    assert verify(path, key.public_key()).faults == ("place 1: line 1 is missing before line 2",)


def test_a_ledger_that_somebody_else_signed_anew(tmp_path: Path) -> None:
    """It is consistent in itself: only the site's key, or a head that the server kept, tells."""
    key = new_key()
    true = written(tmp_path / "true.jsonl", 5, key)
    false = written(tmp_path / "false.jsonl", 5)
    assert verify(false).intact
    assert not verify(false, key.public_key()).intact
    mine = written(tmp_path / "mine.jsonl", 5, key)  # the site itself, writing history again
    head = Head(5, verify(true).head)
    assert verify(true, known=head).intact
    assert verify(mine, known=head).faults == (
        "line 5, which the server has seen, is another one here",
    )
    edited(true, lambda x: x.pop())
    assert verify(true).intact  # a chain alone does not know its end
    assert verify(true, known=head).faults == (
        "line 5, which the server has seen, is missing, and so may be others",
    )


def test_a_receipt_is_kept_and_checked(tmp_path: Path) -> None:
    server, site = new_key(), new_key()
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, site, sync=False)
    head = ledger.append(Leaving("greeting", 0, said={"examples": 10}))
    receipt = make_receipt(server, 0, "job", head)
    assert receipt_fits(server.public_key(), receipt)
    assert not receipt_fits(server.public_key(), {**receipt, "line": 1})
    ledger.append(Leaving("reply", 0, receipt=receipt))
    assert verify(path, server=server.public_key()).countersigned == 2
    other = verify(path, server=new_key().public_key())
    assert other.faults == ("line 3: the countersignature of line 2 is not the server's",)
    ledger.append(Leaving("reply", 0, receipt={**receipt, "head": "0" * 64}))
    assert verify(path).faults == ("line 4: the server has countersigned another line 2",)


def test_a_key_is_rotated_inside_the_ledger(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, old, sync=False)
    ledger.append(Leaving("reply", 0))
    ledger.rotate(new)
    ledger.append(Leaving("reply", 0))
    Ledger(path, new, sync=False).append(Leaving("reply", 0))
    for key in (old, new, None):
        assert verify(path, key.public_key() if key else None).intact
    Ledger(path, old, sync=False).append(Leaving("reply", 0))  # the old key is void
    assert verify(path).faults == ("place 6: line 6 was changed after signing",)


def test_a_torn_line_is_removed_and_said(tmp_path: Path) -> None:
    """A crash in the middle of a line: its bytes never left, the next line says how many of the
    ledger's own were cut away."""
    key = new_key()
    path = written(tmp_path / "ledger.jsonl", 3, key)
    with path.open("ab") as file:
        file.write(b'{"bytes":12,')
    Ledger(path, key).append(Leaving("reply", 0))
    assert verify(path).intact
    assert json.loads(path.read_bytes().splitlines()[-1])["torn"] == 12


def test_a_damaged_end_stops_the_site(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl", 3)
    path.write_bytes(path.read_bytes() + b"null\n")
    with pytest.raises(LedgerError, match=r"ledger\.jsonl"):
        Ledger(path, new_key()).append(Leaving("reply", 0))


def test_numbers_that_json_cannot_hold_are_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    odd = Message(scalars={"loss": float("nan"), "a": float("-inf")})
    Ledger(path, new_key()).append(Leaving("reply", 0, message=odd))
    assert json.loads(path.read_bytes().splitlines()[1])["scalars"] == {"loss": "nan", "a": "-inf"}
    assert verify(path).intact


def write_thirty(path: Path, key: Path) -> None:
    ledger = Ledger(path, key, sync=False)
    for k in range(30):
        ledger.append(Leaving("reply", 0, round=k))


def test_two_processes_write_one_ledger(tmp_path: Path) -> None:
    path, key = tmp_path / "ledger.jsonl", tmp_path / "key"
    make_signing_key(key)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_thirty, args=(path, key)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert verify(path).intact and verify(path).lines == 61


def test_keys(tmp_path: Path) -> None:
    key = make_signing_key(tmp_path / "site")
    assert (tmp_path / "site").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        make_signing_key(tmp_path / "site")
    public = parse_public_key((tmp_path / "site.pub").read_text())
    signature = sign(read_signing_key(tmp_path / "site"), canonical({"a": 1}))
    assert signature_fits(public, b'{"a":1}', signature)
    for wrong in (None, "", "?", signature[:-4], "AAAA"):
        assert not signature_fits(public, b'{"a":1}', wrong)
    assert not signature_fits(public, b'{"a":2}', signature)
    assert not signature_fits(key.public_key(), b"", signature)
    (tmp_path / "none").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    with pytest.raises(KeyFileError, match="none"):
        read_signing_key(tmp_path / "none")
    with pytest.raises(KeyFileError, match="other"):
        parse_public_key("ssh-rsa AAAA", "other")
