"""A key is replaced, a site forgets and leaves; what is deleted is overwritten first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fedlens.cli.main import invoke
from fedlens.config.convert import ConfigError
from fedlens.core.files import lock_folder
from fedlens.sites.keys import make_site_key, public_pem, site_public_key
from fedlens.sites.serve import KnownSites, Served, read_served
from fedlens.trust.ledger import LEDGER_FILE, Leaving, Ledger
from fedlens.trust.retention import delete_for_good, kept_in
from fedlens.trust.signing import make_signing_key, parse_public_key, public_text
from fedlens.trust.vault import read_peers
from fedlens.trust.verify import verify


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def a_site() -> Path:
    """site-0 with a ledger of two lines and the memory of two jobs."""
    make_signing_key(Path("site-0"))
    folder = Path("sites/site-0")
    Ledger(folder / LEDGER_FILE, Path("site-0"), sync=False).append(Leaving("reply", 0))
    for job, age in (("old", 400), ("new", 2)):
        (folder / job).mkdir()
        for name in ("0.safetensors", "0.json"):
            (folder / job / name).write_bytes(b"secret" * 100)
            then = time.time() - age * 86_400
            os.utime(folder / job / name, (then, then))
        os.utime(folder / job, (then, then))
    return folder


def test_a_key_is_rotated(capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_site()
    before = Path("site-0.pub").read_text()
    assert invoke(["rotate", "site-0"]) == 0
    assert "send site-0.pub to the server's operator" in capsys.readouterr().out
    after = Path("site-0.pub").read_text()
    assert after != before and Path("site-0.old.pub").read_text() == before
    for secret in ("site-0", "site-0.old"):
        assert Path(secret).stat().st_mode & 0o777 == 0o600
    assert not list(Path().glob("*.new*"))
    Ledger(folder / LEDGER_FILE, Path("site-0"), sync=False).append(Leaving("reply", 0))
    for public in (before, after):
        assert verify(folder / LEDGER_FILE, parse_public_key(public)).intact
    Ledger(folder / LEDGER_FILE, Path("site-0.old"), sync=False).append(Leaving("reply", 0))
    assert not verify(folder / LEDGER_FILE).intact  # the old key is void
    assert invoke(["rotate", "site-0"]) == 2
    assert "site-0.old exists" in capsys.readouterr().err
    assert invoke(["forget", "site-0.old", "--yes"]) == 0
    assert not Path("site-0.old").exists()


def test_a_rotated_key_is_the_only_one_of_its_client(capsys: pytest.CaptureFixture[str]) -> None:
    """The old public key stays beside the new one, for the ledger. A folder of peers holds both,
    and the new one counts; the operator hears that the other sites need it too."""
    a_site()
    make_signing_key(Path("site-1"))
    assert invoke(["rotate", "site-0"]) == 0
    assert "and to the other sites" in " ".join(capsys.readouterr().out.split())
    peers = read_peers(Path())
    assert sorted(peers) == [0, 1] and Path("site-0.old.pub").exists()
    assert public_text(peers[0]).split()[1] == Path("site-0.pub").read_text().split()[1]


def test_not_while_the_site_takes_part(capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_site()
    with lock_folder(folder):
        for command in (["rotate", "site-0"], ["forget", str(folder), "--everything", "--yes"]):
            assert invoke(command) == 2
            assert "`fedlens join` is running" in capsys.readouterr().err
    assert (folder / "old").exists() and not Path("site-0.old").exists()


def test_what_is_kept_and_what_goes(capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_site()
    assert [(k.kind, k.path.name) for k in kept_in(folder)] == [
        ("memory", "new"),
        ("memory", "old"),
        ("ledger", LEDGER_FILE),
    ]
    assert invoke(["forget", str(folder)]) == 0
    assert "nothing was deleted" in capsys.readouterr().out
    Path("policy.toml").write_text("keep_days = 30")
    assert invoke(["forget", str(folder), "--expired", "--yes"]) == 0
    assert "overwrote and deleted 1.2 kB" in capsys.readouterr().out
    assert not (folder / "old").exists() and (folder / "new").exists()
    assert invoke(["forget", str(folder), "--job", "older"]) == 2
    assert "no memory of a job older" in capsys.readouterr().err
    assert invoke(["forget", str(folder), "--job", "new", "--yes"]) == 0
    assert not (folder / "new").exists() and (folder / LEDGER_FILE).exists()
    assert invoke(["forget", str(folder), "--everything", "--yes"]) == 0
    assert not (folder / LEDGER_FILE).exists()
    Path("policy.toml").write_text("")
    assert invoke(["forget", str(folder), "--expired"]) == 2
    assert "does not say how long" in capsys.readouterr().err


def test_deleted_is_overwritten_and_links_are_not_followed(tmp_path: Path) -> None:
    """A second name of the same file shows what became of its bytes; what a link points at is
    somebody else's."""
    folder = tmp_path / "job"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "memory").write_bytes(b"patient" * 300_000)
    os.link(folder / "deep" / "memory", tmp_path / "witness")
    (tmp_path / "theirs").write_text("untouched")
    (folder / "link").symlink_to(tmp_path / "theirs")
    (folder / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert delete_for_good(folder) == 2_100_000
    assert not folder.exists()
    assert (tmp_path / "witness").read_bytes() == bytes(2_100_000)
    assert (tmp_path / "theirs").read_text() == "untouched"


def test_a_revoked_key_opens_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Looked at for every connection: `serve` need not be started again."""
    keys = {i: make_site_key(Path(f"site-{i}"))[1] for i in (0, 1)}
    pem = {i: public_pem(site_public_key(path)) for i, path in keys.items()}
    state = Path("superlink")
    assert invoke(["revoke", "site-0.pub"]) == 2
    assert "--state is the folder of `fedlens serve`" in capsys.readouterr().err
    state.mkdir()
    said: list[str] = []
    known = KnownSites({key: i for i, key in pem.items()}, state, said.append)
    Served("127.0.0.1:1", Path("ca.crt"), {i: key.decode() for i, key in pem.items()}).save(state)
    assert known.get(pem[0]) == 0 and len(known) == 2
    assert invoke(["revoke", "site-0.pub"]) == 0
    assert pem[0] not in known and known.get(pem[0]) is None and known[pem[1]] == 1
    assert list(known) == [pem[1]]
    assert list(read_served(state).bindings) == [1]  # a run believes nobody with that key
    assert invoke(["revoke", "sites"]) == 2
    assert not said


@pytest.mark.parametrize("text", ["broken", "", '"a"', "{}", "[1]", "\xff", "[" * 100_000])
def test_a_damaged_list_of_revoked_keys_lets_nobody_in(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list may have named anybody. It is said once, and not for every connection; commands that
    need the list end with one message that names it."""
    public = make_site_key(Path("site-1"))[1]
    pem = public_pem(site_public_key(public))
    state, said = Path("superlink"), list[str]()
    state.mkdir()
    Served("127.0.0.1:1", Path("ca.crt"), {1: pem.decode()}).save(state)
    known = KnownSites({pem: 1}, state, said.append)
    assert known.get(pem) == 1
    (state / "revoked.json").write_text(text, encoding="latin-1")
    assert known.get(pem) is None and pem not in known and len(known) == 0
    assert len(said) == 1 and "superlink/revoked.json cannot be read" in said[0]
    del said[:]
    with pytest.raises(ConfigError, match=r"revoked\.json cannot be read"):
        read_served(state)
    for command in (["revoke", "site-1.pub"], ["serve", "--port", "1", "--site", "site-1.pub"]):
        assert invoke(command) == 2
        assert "revoked.json cannot be read" in capsys.readouterr().err
    (state / "revoked.json").write_text("[]")
    assert known.get(pem) == 1 and said == ["superlink/revoked.json can be read again"]
