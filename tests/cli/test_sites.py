"""The operators' commands: what they refuse, in one sentence and before anything is started. Real
runs are in engines/flower/test_sites.py.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("flwr")
from cryptography import x509

from fedlens.cli.main import invoke
from fedlens.cli.sites import bound_keys
from fedlens.config import recipe as recipes
from fedlens.config.recipe import ConfigError
from fedlens.core.files import lock_folder
from fedlens.data.source import DataError
from fedlens.sites import agreement, keys, network, programs, serve, site, submit
from fedlens.sites import join as joining
from fedlens.sites.logs import TOO_FEW

STUDY = """
[task]
name = "Classification"
classes = 2
[data]
name = "ImageFolder"
root = "scans"
[federation]
clients = 2
[[algorithm]]
name = "FedAvg"
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLENS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLWR_HOME", raising=False)
    monkeypatch.setenv("FEDLENS_DEBUG", "")


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert invoke(list(command)) == 2
    said = capsys.readouterr().err.strip().splitlines()
    return said[-1]


def test_keys_are_for_their_owner_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["keys", "0", "clinic", "--host", "127.0.0.1", "--host", "fl.example.org"]) == 0
    folder = Path("keys")
    for secret in ("ca.key", "server.key", "site-0", "clinic"):
        assert (folder / secret).stat().st_mode & 0o077 == 0, secret
    trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    # the key fits the certificate
    trust.load_cert_chain(folder / "server.pem", folder / "server.key")
    before = (folder / "ca.crt").read_bytes(), (folder / "site-0").read_bytes()
    assert invoke(["keys", "1"]) == 0
    assert "never overwritten" in refused(capsys, "keys", "0")
    assert before == ((folder / "ca.crt").read_bytes(), (folder / "site-0").read_bytes())
    assert (folder / "site-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_a_certificate_is_good_at_home_whatever_its_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`serve` reaches its own SuperLink at 127.0.0.1, also when the sites know it by another
    name.
    """
    assert invoke(["keys", "--host", "fl.example.org"]) == 0
    found = x509.load_pem_x509_certificate(Path("keys/server.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1")]
    assert "valid for fl.example.org, 127.0.0.1, localhost" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["../../esc", "/tmp/esc", "a\\b", "..", "", ".hidden", "clinic.pub"]
)
def test_keys_stay_in_their_folder(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "is not a name for a site's key" in refused(capsys, "keys", "0", name)
    assert not Path("keys").exists()


@pytest.mark.parametrize(
    "host", ["m\u00fcnchen.example", "fl.example.org:8000", "https://fl.example.org", "a b", ""]
)
def test_a_host_that_no_certificate_can_name(capsys: pytest.CaptureFixture[str], host: str) -> None:
    assert "is not a host" in refused(capsys, "keys", "0", "--host", host)
    assert not Path("keys").exists()


def test_long_names_and_addresses_of_all_kinds_are_hosts() -> None:
    long = ".".join(["clinic"] * 12)
    assert (
        invoke(
            [
                "keys",
                "--host",
                long,
                "--host",
                "[::1]",
                "--host",
                "xn--mnchen-3ya.example",
                "--host",
                "*.example.org",
            ]
        )
        == 0
    )


def test_without_the_authoritys_key_only_sites_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A hospital that has the server's ca.crt and makes its own key."""
    keys.make_authority(Path("keys"))
    Path("keys/ca.key").unlink()
    assert invoke(["keys", "5"]) == 0
    assert "no server certificate is made" in capsys.readouterr().err
    assert sorted(p.name for p in Path("keys").iterdir()) == ["ca.crt", "site-5", "site-5.pub"]
    assert "no ca.key beside it" in refused(capsys, "keys", "--host", "fl.example.org")
    assert "no ca.key beside it" in refused(capsys, "serve", "--port", str(network.free_port()))


def test_a_site_that_made_its_key_itself_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    """It sends its .pub; the certificate that comes back fits its key and the authority."""
    keys.make_authority(Path("keys"))
    keys.make_site_key(Path("site-5"))
    assert invoke(["keys", "--certify", "site-5.pub"]) == 0
    assert "goes to the site that sent site-5.pub" in capsys.readouterr().err
    network.site_tls(Path("keys/ca.crt"), Path("keys/site-5.crt"), Path("site-5"))
    assert "not a site's public key" in refused(capsys, "keys", "--certify", "site-5")
    issued = x509.load_pem_x509_certificate(Path("keys/site-5.crt").read_bytes())
    usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_key_belongs_to_one_client_and_a_client_has_one_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("site-0", "site-1", "clinic"):
        keys.make_site_key(Path(name))
    serve = ("serve", "--port", str(network.free_port()))
    assert "client 0 has two keys: site-0.pub and clinic.pub" in refused(
        capsys, *serve, "--site", "site-0.pub", "--site", "0=clinic.pub"
    )
    assert "one key cannot belong to two clients" in refused(
        capsys, *serve, "--site", "site-0.pub", "--site", "1=site-0.pub"
    )
    assert "clinic.pub does not say" in refused(capsys, *serve, "--site", "clinic.pub")
    assert bound_keys(["3=clinic.pub", "site-1.pub"]) == {
        3: Path("clinic.pub"),
        1: Path("site-1.pub"),
    }


def test_serve_wants_public_keys(capsys: pytest.CaptureFixture[str]) -> None:
    keys.make_authority(Path("keys"))
    keys.make_site_key(Path("keys/site-0"))
    assert "not a site's public key" in refused(capsys, "serve", "--site", "keys/site-0")
    assert "not a site's public key" in refused(capsys, "serve", "--site", "nothing.pub")


def test_serve_leaves_a_used_port_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our sites' keys would be registered at whoever listens there."""
    monkeypatch.setattr(
        programs.Programs, "start", lambda *_, **__: pytest.fail("something was started")
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"cannot serve at 127.0.0.1:{port}: something listens there already" in refused(
            capsys, "serve", "--port", port
        )
    assert not Path("keys").exists() and not Path("superlink").exists()
    assert "70000" in refused(capsys, "serve", "--port", "70000")


def test_a_superlink_that_ends_by_itself_is_spoken_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = programs.Programs.start
    monkeypatch.setattr(
        programs.Programs,
        "start",
        lambda running, *_: start(running, "python", "-c", "raise SystemExit(3)"),
    )
    monkeypatch.setattr(serve, "wait_for_port", lambda *_: None)
    assert "the SuperLink ended by itself (exit code 3)" in refused(
        capsys, "serve", "--port", str(network.free_port())
    )
    assert (
        Path("superlink").stat().st_mode & 0o077
        == 0
        == Path("superlink/superlink.db").stat().st_mode & 0o077
    )


@pytest.mark.parametrize(("sites", "times"), [(2, 1), (3, 0)])
def test_serve_says_what_two_sites_see_of_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sites: int, times: int
) -> None:
    start = programs.Programs.start
    asleep = ("python", "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(programs.Programs, "start", lambda running, *_: start(running, *asleep))
    monkeypatch.setattr(serve, "wait_for_port", lambda *_: None)
    monkeypatch.setattr(serve, "register_site", lambda *_: None)

    async def closed(*_: object) -> None:
        raise ConfigError("the test ends here")

    monkeypatch.setattr(serve, "run_front", closed)
    known = [keys.make_site_key(Path(f"site-{k}"))[1] for k in range(sites)]
    bound = [part for public in known for part in ("--site", str(public))]
    assert invoke(["serve", "--port", str(network.free_port()), *bound]) == 2
    said = capsys.readouterr().err
    assert "the test ends here" in said and said.count(TOO_FEW) == times


def test_the_superlinks_database_is_its_owners_alone(tmp_path: Path) -> None:
    file = programs.private_file(Path("a/superlink/superlink.db"))
    assert file == tmp_path / "a/superlink/superlink.db"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.write_text("kept")
    file.chmod(0o644)  # of an earlier version
    programs.private_file(file)
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == "kept"


def make_site_files() -> None:
    """What a site has: the CA file, its key, its certificate."""
    keys.make_authority(Path("keys"))
    public = keys.make_site_key(Path("site-0"))[1]
    keys.make_site_certificate(Path("keys"), public).rename("site-0.crt")


def make_study() -> None:
    """A recipe, and twelve scans and one that is none."""
    Path("study.toml").write_text(STUDY.replace("[data]", "size = 8\n[data]\nsize = 8"))
    for name in ("benign", "malignant"):
        Path("scans", name).mkdir(parents=True)
        for k in range(6):
            Image.new("RGB", (8, 8), (40 * k, 0, 0)).save(Path("scans", name, f"{k}.png"))
    Path("scans/benign/broken.png").write_bytes(b"no picture")


def test_join_looks_before_it_leaps(capsys: pytest.CaptureFixture[str]) -> None:
    keys.make_authority(Path("keys"))
    keys.make_site_key(Path("site-0"))
    keys.make_site_key(Path("clinic"))
    Path("study.toml").write_text(STUDY)
    here = ("--key", "site-0")
    assert "no private key nowhere" in refused(capsys, "join", "127.0.0.1:1", "--key", "nowhere")
    assert "no CA certificate other.crt" in refused(
        capsys, "join", "127.0.0.1:1", *here, "--ca", "other.crt"
    )
    Path("junk.crt").write_text("junk")
    assert "there is no certificate site-0.crt for site-0" in refused(
        capsys, "join", "127.0.0.1:1", *here, "--recipe", "study.toml"
    )
    for junk in ("junk.crt", "site-0"):
        assert f"{junk} is not a CA certificate" in refused(
            capsys, "join", "127.0.0.1:1", *here, "--ca", junk, "--recipe", "study.toml"
        )
    assert "write host:port" in refused(capsys, "join", "somewhere", *here)
    assert "there is no data at scans" in refused(
        capsys, "join", "127.0.0.1:1", *here, "--data", "scans"
    )
    assert "add --client N" in refused(capsys, "join", "127.0.0.1:1", "--key", "clinic")
    assert "no recipe" in refused(capsys, "join", "127.0.0.1:1", *here, "--recipe", "stydy.toml")
    assert not Path("sites").exists()


def test_a_site_says_what_it_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a recipe of its own nothing is done, unless the operator trusts the server."""
    keys.make_authority(Path("keys"))
    keys.make_site_key(Path("site-0"))
    Path("study.toml").write_text(STUDY)
    join = ("join", "127.0.0.1:1", "--key", "site-0")
    both = ("--recipe", "study.toml", "--trust-server")
    for options in ((), both):
        said = refused(capsys, *join, *options)
        assert "what may this site do? --recipe FILE" in said and "--trust-server" in said
    assert not Path("sites").exists()


def test_a_site_that_trusts_its_server_is_warned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_site_files()
    nodes = []
    monkeypatch.setattr(joining, "take_part", lambda *args, **_: nodes.append(args[3]))
    join = ["join", "127.0.0.1:1", "generate=no", "--key", "site-0", "--trust-server"]
    assert invoke(join) == 0
    assert "decides what is computed on this site's data" in capsys.readouterr().err
    assert nodes[0]["option-generate"] == "no"
    request = {"text": STUDY, "name": "study"}
    with pytest.raises(ConfigError, match=r"FedAvg takes no site option 'generate'$"):
        site.make_site(nodes[0], request)


def test_a_server_cannot_hand_a_recipe_to_a_site_that_has_none(tmp_path: Path) -> None:
    node = {"client": 0, "folder": str(tmp_path), "recipe": "", "trust-server": False}
    with pytest.raises(ConfigError, match="takes none from a server"):
        site.make_site(node, {"text": STUDY, "name": "study"})


def test_a_site_is_read_in_a_process_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds wrong is one message; where all is well, who cannot be reached is spoken of."""
    make_site_files()
    make_study()
    join = ("join", "127.0.0.1:1", "--key", "site-0", "--data", "scans", "--recipe", "study.toml")
    Path("scans/malignant").rename("elsewhere")
    assert "scans holds 1 class folders: at least two are needed" in refused(capsys, *join)
    Path("elsewhere").rename("scans/malignant")
    assert invoke([*join, "--wait", "0"]) == 2
    read = capsys.readouterr()
    assert "10 rounds among 2 clients each, 1 epoch of training in each" in read.out
    assert "nobody is here to agree: read the page above, then add --yes" in read.err
    Path("policy.toml").write_text("max_epochs = 1\nmin_cohort = 3\n")
    assert "policy.toml does not allow it" in refused(capsys, *join, "--policy", "policy.toml")
    assert not Path("sites/site-0/ledger.jsonl").exists()  # nothing has left so far
    assert invoke([*join, "--yes", "--wait", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("1 file could not be read and was left out: benign/broken.png: ") == 1
    assert "client 0 has 10 examples" in said
    assert said.count(TOO_FEW) == 1  # of two sites, before anything is asked
    assert "the server at 127.0.0.1:1 cannot be reached (" in said
    with lock_folder(Path("sites/site-0")):
        assert "another `fedlens join` is running with" in refused(capsys, *join)


IMPORTED = """
from fedlens.tasks import Classification
open("imported", "w").close()
class Mine(Classification):
    pass
"""


def test_a_log_of_json_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `join` and of the process it starts, from the first line to the error at the end: each
    line of standard error is one object. The page for people is on standard output."""
    monkeypatch.setenv("FEDLENS_LOG", "")  # what --json-log sets stays in this test
    make_site_files()
    make_study()
    options = ["--key", "site-0", "--recipe", "study.toml", "--data", "scans", "--yes"]
    wrong = f"127.0.0.1:{network.free_port()}"
    assert invoke(["join", wrong, *options, "--wait", "0", "--json-log"]) == 2
    said = capfd.readouterr()
    assert "leaves each round" in said.out
    lines = [json.loads(line) for line in said.err.splitlines()]
    assert all(set(line) == {"time", "process", "message"} for line in lines)
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    words = [line["message"] for line in lines]
    assert "client 0 has 10 examples" in words
    assert any("broken.png" in text for text in words)
    assert any(text.startswith("no --policy") for text in words)
    assert words[-1].startswith(f"the server at {wrong} cannot be reached")


def test_only_modules_that_the_operator_listed_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the site's own recipe: it may have been copied from somewhere."""
    Path("mine_tasks.py").write_text(IMPORTED)
    Path("study.toml").write_text(STUDY.replace("Classification", "mine_tasks:Mine"))
    node = {"client": 0, "folder": str(tmp_path), "data": "scans", "recipe": "study.toml"}
    with pytest.raises(ConfigError, match="has not listed the module mine_tasks"):
        site.make_site(node, {})
    trusting = {**node, "recipe": "", "trust-server": True, "modules": ["another"]}
    with pytest.raises(ConfigError, match="has not listed the module mine_tasks"):
        site.make_site(trusting, {"text": Path("study.toml").read_text()})
    assert not Path("imported").exists()
    with pytest.raises(ConfigError, match="there is no data at scans"):
        site.make_site({**node, "modules": ["mine_tasks"]}, {})
    assert Path("imported").exists()


def test_a_site_decides_whether_it_generates(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe is everybody's; generate=no is this site's own choice, and it reaches the
    layer.
    """
    for name in ("benign", "malignant"):
        Path("scans", name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(Path("scans", name, "0.png"))
    balance = (
        '[[algorithm]]\nname = "Balance"\n[algorithm.generator]\nname = "ReadyImages"\nroot ='
        ' "nowhere"\n'
    )
    Path("study.toml").write_text(STUDY.replace("[data]", "size = 8\n[data]") + balance)
    node = {"client": 0, "folder": str(tmp_path / "site"), "data": "scans", "recipe": "study.toml"}
    made = site.make_site({**node, "option-generate": "no"}, {})
    assert made.algorithm.role(made.algorithm.init(), 0) == "no"  # type: ignore[attr-defined]
    with pytest.raises(
        DataError, match="no folder of images for ReadyImages"
    ):  # who generates needs what it generates from
        site.make_site({**node, "option-generate": "constrained"}, {})
    for name, value, words in (
        ("generate", "perhaps", "generate is one of constrained, unconstrained, no, not 'perhaps'"),
        ("generat", "no", "FedAvg .* takes no site option 'generat': did you mean generate?"),
    ):
        with pytest.raises(ValueError, match=words):
            site.make_site({**node, f"option-{name}": value}, {})
    keys.make_authority(Path("keys"))
    keys.make_site_key(Path("site-0"))
    join = ("join", "127.0.0.1:9", "--key", "site-0", "--data", "scans", "--recipe", "study.toml")
    for options, words in {
        "generate": "'generate' is not an override: write key=value",
        "generate=": "generate= is no site option: write NAME=VALUE",
        "a b=no": "a b=no is no site option: write NAME=VALUE",
    }.items():
        assert words in refused(capsys, *join, options)
    assert not Path("sites").exists()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:\u00b2",
        "127.0.0.1:65536",
        "127.0.0.1:0",
        "http://127.0.0.1:8000",
        "127.0.0.1:-1",
        ":8000",
        "a b:1",
        "me@h:1",
    ],
)
def test_what_is_no_address_is_refused_by_all(
    capsys: pytest.CaptureFixture[str], address: str
) -> None:
    keys.make_authority(Path("keys"))
    Path("study.toml").write_text(STUDY)
    assert "write host:port" in refused(capsys, "join", address, "--key", "site-0")
    assert "write host:port" in refused(
        capsys, "run", "study.toml", "--engine", "flower", "--superlink", address, "--unbound"
    )
    assert not Path("home/flwr/config.toml").exists()


def test_addresses() -> None:
    assert network.split_address("fl.example.org:65535") == ("fl.example.org", 65535)
    assert network.split_address("[::1]:8000") == ("::1", 8000)


def test_run_on_flower_needs_a_superlink(capsys: pytest.CaptureFixture[str]) -> None:
    Path("study.toml").write_text(STUDY)
    run = ("run", "study.toml", "--engine", "flower", "--wait", "0")
    said = refused(capsys, *run)
    assert "superlink/server.json does not say where the server is" in said
    assert "fedlens serve --state superlink" in said
    flower = (*run, "--superlink", "127.0.0.1:1", "--unbound")
    assert "no CA certificate" in refused(capsys, *flower)
    assert "study.toml is not a CA certificate" in refused(capsys, *flower, "--ca", "study.toml")
    # keys are bound to clients unless somebody says otherwise
    assert "does not say where the server is" in refused(capsys, *flower[:-1])


def test_where_the_server_is_survives_being_written_down(tmp_path: Path) -> None:
    served = serve.Served("127.0.0.1:9", Path("/keys/ca.crt"), {0: "a", 12: "b"})
    served.save(tmp_path)
    assert serve.read_served(tmp_path) == served
    for junk in ("", "[]", "{}", '{"address": 1, "ca": 2, "sites": []}'):
        (tmp_path / "server.json").write_text(junk)
        with pytest.raises(ConfigError, match=r"server.json does not say where the server is"):
            serve.read_served(tmp_path)


def test_the_line_that_ends_a_run_works_as_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The connection it names is in FedLens' own Flower home, so every printed flwr line says where
    that is.
    """

    def start(running: programs.Programs, *command: str) -> None:
        raise KeyboardInterrupt  # in place of following the log

    class Done:
        returncode, stdout, stderr = 0, '{"success": true, "run-id": 7}', ""

    Path("study.toml").write_text(STUDY)
    keys.make_authority(Path("keys"))
    Path("superlink").mkdir()
    monkeypatch.setenv("FEDLENS_HOME", str(tmp_path / "my home"))
    monkeypatch.setattr(submit, "wait_for_port", lambda *_: None)
    monkeypatch.setattr(programs.Programs, "start", start)
    monkeypatch.setattr(programs.subprocess, "run", lambda *_, **__: Done)
    serve.Served("127.0.0.1:9", Path("keys/ca.crt"), {}).save(Path("superlink"))
    assert invoke(["run", "study.toml", "--engine", "flower"]) == 130
    ran, said = capsys.readouterr().err.strip().splitlines()
    home = f"FLWR_HOME='{tmp_path / 'my home' / 'flwr'}'"
    assert ran.startswith(f"$ {home} flwr run ")
    assert said.endswith(f"to end it: {home} flwr stop 7 fedlens-127-0-0-1-9")


def test_what_server_and_site_must_agree_on(tmp_path: Path) -> None:
    """Everything but [data]; and a site's data goes where its source looks for it."""
    Path("study.toml").write_text(STUDY)
    study = recipes.read("study.toml")
    assert agreement.recipe_hash(study) == agreement.recipe_hash(
        recipes.read("study.toml", ["data.root=elsewhere", "data.size=8"])
    )
    for change in ("rounds=3", "task.classes=3", "FedAvg.lr=0.5", "seed=1"):
        assert agreement.recipe_hash(study) != agreement.recipe_hash(
            recipes.read("study.toml", [change])
        )
    Path("mine").mkdir()
    assert site.with_data_at(study, "mine").data.given["root"] == "mine"
    with pytest.raises(ConfigError, match="there is no data at yours"):
        site.with_data_at(study, "yours")


@contextmanager
def listening(folder: Path) -> Iterator[int]:
    """A TLS server with the certificate in this folder; its port."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "server.pem", folder / "server.key")

    def greet(door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                line, _ = door.accept()
                with suppress(OSError), tls.wrap_socket(line, server_side=True):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=greet, args=(door,), daemon=True)
        thread.start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_certificate_that_does_not_hold_ends_the_waiting(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        keys.make_authority(tmp_path / name)
        keys.make_server_certificate(tmp_path / name, [])
    with listening(tmp_path / "theirs") as port:
        network.wait_for_port("127.0.0.1", port, tmp_path / "theirs" / "ca.crt", seconds=5)
        with pytest.raises(
            ConfigError,
            match=(
                r"cannot prove that it is the one of .*ours/ca.crt .*certificate.*--host 127.0.0.1"
            ),
        ):
            network.wait_for_port("127.0.0.1", port, tmp_path / "ours" / "ca.crt", seconds=5)
    with pytest.raises(
        ConfigError, match=r"did not answer at .* within 0.2 s \(Connection refused\)"
    ):
        network.wait_for_port(
            "127.0.0.1", network.free_port(), tmp_path / "ours" / "ca.crt", seconds=0.2
        )


def test_the_connection_is_written_once_and_nothing_else_is_touched(tmp_path: Path) -> None:
    ca = keys.make_authority(tmp_path / "keys")
    home = programs.flower_home()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "mine"\n\n[superlink.mine]\naddress = "10.0.0.1:1"\n'
    )
    name = programs.write_connection(home, "127.0.0.1:9", ca)
    again = programs.write_connection(home, "127.0.0.1:9", ca)
    text = (home / "config.toml").read_text()
    assert name == again and text.count(f"[superlink.{name}]") == 1 and "10.0.0.1:1" in text
    other = keys.make_authority(tmp_path / "other")
    programs.write_connection(home, "127.0.0.1:9", other)
    text = (home / "config.toml").read_text()
    assert (
        text.count(f"[superlink.{name}]") == 1
        and str(other) in text
        and str(ca) not in text
        and "10.0.0.1:1" in text
    )
