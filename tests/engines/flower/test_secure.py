"""SecureSum at real sites: answers are stored before they leave, and whoever is killed between two
trips costs nothing. The last test is a real deployment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from deployment import Deployment, deployment
from toy import Toy, drawing_as, flat, same_bits, toy_federation
from vaults import make_vaults

from fedlens import Client, Message, Progress, Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.config import recipe as recipes
from fedlens.core.memory import NEVER
from fedlens.core.replies import Arrival
from fedlens.core.rounds import sample
from fedlens.engines.flower.site import Site, SiteError, answer_from_disk, federation_of_one
from fedlens.engines.simulator import Simulator
from fedlens.layers import Scaffold
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.folder import read_records
from fedlens.runs.job import run_job
from fedlens.sites.agreement import recipe_hash, secured, with_secure
from fedlens.trust import SecureSum
from fedlens.trust.secure_sum import OPEN_SUM, WORK
from fedlens.trust.vault import Declined, SiteVault

N = 4


class Counted(FedAvg):
    """Counts how often a client trains."""

    def client_step(self, message: Message, client: Client) -> Message:
        trained.append((message.round, client.id))
        return super().client_step(message, client)


trained: list[tuple[int, int]] = []


class Killed(Exception):
    pass


class Disks:
    """Every client at its own place, in a process that is new for every message: nothing lives on
    but what is on disk. kill: (round, trip, position) after whose answer the server dies."""

    def __init__(self, folder: Path, vaults: Sequence[SiteVault]) -> None:
        self.folder, self.vaults = folder, vaults
        self.kill: tuple[int, int, int] | None = None
        self.answers: dict[tuple[int, int, int], list[bytes]] = {}

    def ids(self) -> Sequence[int]:
        return range(N)

    def site(self, i: int) -> Site:
        old = self.vaults[i]
        vault = SiteVault(old.folder, old.key, old.peers)
        whole = toy_federation(N)
        data = federation_of_one(i, whole.holdings[i], whole.held_out_of(i))
        return Site(i, make().with_vault(vault), data, self.folder / str(i))

    def exchange(
        self, message: Message, ids: Sequence[int], heard: Mapping[int, int]
    ) -> Iterator[Arrival]:
        for position, i in enumerate(sorted(ids)):
            sent = Message.from_bytes(bytes(message.to_bytes()), copy=True)
            reply = answer_from_disk(self.site(i), sent, "job", heard.get(i, NEVER))
            key = message.round, message.header.trip, i
            self.answers.setdefault(key, []).append(bytes(reply.to_bytes()))
            if self.kill == (message.round, message.header.trip, position):
                self.kill = None
                raise Killed
            yield reply

    def snapshot(self) -> Mapping[int, Path]:
        return {}

    def restore(self, records: Any) -> None:
        pass

    def close(self) -> None:
        pass


def make() -> SecureSum:
    made = stack(Counted(Toy(), batch=8), Scaffold(), SecureSum("recover"))
    assert isinstance(made, SecureSum)
    return made


def run_with_restarts(engine: Disks, folder: Path, rounds: int) -> tuple[Message, int]:
    """A server that goes on from its last checkpoint when it was killed."""
    restarts = 0
    while True:
        checkpoint = Checkpoint(folder)
        found = checkpoint.load()
        algorithm = make()

        def save(here: Progress, _: Round, checkpoint: Checkpoint = checkpoint) -> None:
            checkpoint.save(here, {})

        try:
            progress = found[0] if found else None
            return run(algorithm, engine, rounds, progress=progress, after_round=save), restarts
        except Killed:
            restarts += 1


@pytest.mark.parametrize("trip", [WORK, OPEN_SUM])
@pytest.mark.parametrize("position", [1, N - 1])
def test_a_server_killed_between_trips(tmp_path: Path, trip: int, position: int) -> None:
    """Round 1 is asked again with the same bytes: who had answered sends what it had stored and
    does not train again, and the end is that of a run that nobody killed."""
    trained.clear()
    algorithm = make()
    with Simulator(algorithm, toy_federation(N), workers=0) as simulator:
        expected = run(algorithm, simulator, 3)
    trained.clear()
    engine = Disks(tmp_path / "sites", make_vaults(tmp_path, N))
    engine.kill = (1, trip, position)
    state, restarts = run_with_restarts(engine, tmp_path / "checkpoint", 3)
    assert restarts == 1
    assert all(torch.equal(t, flat(state)[n]) for n, t in flat(expected).items())
    assert sorted(trained) == [(r, i) for r in range(3) for i in range(N)]
    again = {key: sent for key, sent in engine.answers.items() if len(sent) > 1}
    assert {key[:2] for key in again} == {(1, WORK)} | (
        {(1, OPEN_SUM)} if trip == OPEN_SUM else set()
    )
    assert all(len(set(sent)) == 1 for sent in again.values())
    # of what was sent, the last two rounds are kept
    kept = {p.name[:6] for p in (tmp_path / "sites" / "0" / "job" / "answers").iterdir()}
    assert kept == {"000001", "000002"}


@pytest.mark.parametrize("name", [".000000-ab.part7", "-00005-ab", "notes", "--ab"])
def test_odd_files_among_the_stored_answers_are_in_nobodys_way(tmp_path: Path, name: str) -> None:
    """What a kill in the middle of a write left, an answer to a negative round, or anything else:
    later answers do not trip over it."""
    engine = Disks(tmp_path / "sites", make_vaults(tmp_path, N))
    answers = tmp_path / "sites" / "0" / "job" / "answers"
    answers.mkdir(parents=True)
    (answers / name).write_bytes(b"")
    run(make(), engine, 3)
    kept = {p.name.split("-")[0] for p in answers.iterdir() if p.name != name}
    assert kept == {"000001", "000002"}
    assert (answers / name).exists() is (name != "-00005-ab")


def test_the_same_keys_under_another_request_are_refused(tmp_path: Path) -> None:
    """Also after a restart of the site: what it has answered is on disk."""
    engine = Disks(tmp_path / "sites", make_vaults(tmp_path, N))
    asked: list[Message] = []
    exchange = engine.exchange

    def listen(message: Message, ids: Any, heard: Any) -> Iterator[Arrival]:
        asked.append(message)
        return exchange(message, ids, heard)

    engine.exchange = listen  # type: ignore[method-assign]
    run(make(), engine, 1)
    work = next(m for m in asked if m.header.trip == WORK)
    model = {n: t * 2 for n, t in work.trees["model"].items()}
    other = work.put(model=model)
    with pytest.raises(Declined, match="answered another request with the same key"):
        answer_from_disk(engine.site(0), other, "job", NEVER)
    again = answer_from_disk(engine.site(0), work, "job", NEVER)
    assert again.trees["masked"].keys() == {"few", "ring64"}


def test_a_site_without_a_vault_does_not_answer(tmp_path: Path) -> None:
    whole = toy_federation(N)
    site = Site(0, make(), federation_of_one(0, whole.holdings[0]), tmp_path)
    with pytest.raises(SiteError, match="no vault"):
        answer_from_disk(site, Message(), "job", NEVER)
    with pytest.raises(Declined, match="masks = false is for simulations"):
        SecureSum(masks=False).with_vault(make_vaults(tmp_path, 1)[0])


# -- recipes ---------------------------------------------------------------------------------------


def test_real_sites_use_it_from_three_on() -> None:
    three, why = secured(recipes.read("demo", ["clients=3", "cohort=3"]))
    assert [p.name for p in three.algorithm][-1] == "SecureSum" and "is on" in why
    assert secured(three)[0].digest() == three.digest()
    two, why = secured(recipes.read("demo", ["clients=2", "cohort=2"]))
    assert "SecureSum" not in [p.name for p in two.algorithm]
    assert "subtract its own update" in why
    off, why = secured(recipes.read("demo", ["clients=3", "cohort=3", "secure=false"]))
    assert "as the recipe says" in why and off.settings.secure is False
    median, why = secured(recipes.read("demo", ["clients=3", "cohort=3"], "Median"))
    assert "hides single replies, but Median needs them" in why
    assert median.settings.secure is False
    _, why = secured(recipes.read("demo", ["clients=3", "cohort=3", "late=1"]))
    assert "late replies" in why


def test_the_run_folder_says_why_there_is_no_table_of_clients(tmp_path: Path) -> None:
    config = recipes.read("deblur", ["secure=true", "rounds=1", "data.size=32", "clients=3"])
    outcome = run_job(config, tmp_path / "run")
    told = (tmp_path / "run" / "federation.json").read_text()
    assert "no worst client" in told and outcome.rounds[0]["clients"] == {}


def test_secure_is_a_key_like_any_other() -> None:
    on = recipes.read("demo", ["secure=true", "SecureSum.ring=16"])
    assert [p.name for p in on.algorithm][-1] == "SecureSum"
    assert on.algorithm[-1].table()["ring"] == 16
    again = recipes.from_tables(on.tables())
    assert again.tables() == on.tables()
    off = recipes.from_tables(on.tables(), overrides=["secure=false"])
    assert "SecureSum" not in [p.name for p in off.algorithm]
    assert recipe_hash(with_secure(off, True)) != recipe_hash(off)


# -- for real --------------------------------------------------------------------------------------


@pytest.mark.trust
@pytest.mark.timeout(600)
def test_three_real_sites_add_up_under_masks(tmp_path: Path) -> None:
    """A server and three sites over TLS, keys of their own: the simulator's bits at the end."""
    overrides = ["clients=3", "rounds=6", "evaluate_every=3", "data.size=48"]
    config, why = secured(recipes.read("deblur", overrides))
    assert "is on" in why
    out = tmp_path / "out"
    with deployment(tmp_path, 3) as here:
        here.serve()
        join(here, config)
        here.study(config.to_toml(), out)
        here.wait_for(lambda: (out / "summary.json").exists(), 600.0, "the end")
    rounds = read_records(out / "metrics.jsonl")
    assert [r["heard"] for r in rounds] == [3] * 6 and not any(r["clients"] for r in rounds)
    assert ended_as_simulated(config, out, tmp_path)


@pytest.fixture(scope="module")
def four_sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server that is started once; sites join it with the recipe of each test."""
    with deployment(tmp_path_factory.mktemp("four"), 4) as here:
        here.serve()
        yield here


# Three of four are asked. Masks that are never opened, with the 16-bit ring; and masks that are
# opened, where the trip that opens a sum also asks the next cohort for its keys.
SECRET = 1 << 127
THREE_OF_FOUR = {
    "demo": ["data.images=240", "data.test_images=60", "SecureSum.ring=16"],
    "deblur": ["data.size=48", "SecureSum.dropouts=recover"],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", THREE_OF_FOUR)
def test_a_part_of_four_real_sites_adds_up_under_masks(four_sites: Deployment, name: str) -> None:
    """The simulator is handed the server's secret and ends in the same bits; what metrics.jsonl
    says of every round is equal too, up to seconds and the bytes of signatures, which no simulated
    key has. The sites' own ledgers say who took part."""
    here = four_sites
    overrides = ["clients=4", "cohort=3", "rounds=4", "evaluate_every=4", "workers=0"]
    config, _ = secured(recipes.read(name, [*overrides, "secure=true", *THREE_OF_FOUR[name]]))
    out = here.folder / name
    out.mkdir()
    # as a server that is started again finds it; a secret that asks each site and leaves each out
    (out / "flower.json").write_text(json.dumps({"job": name, "cohort_seed": SECRET}))
    join(here, config, memory=name)
    try:
        here.study(config.to_toml(), out, name)
        here.wait_for(lambda: (out / "summary.json").exists(), 600.0, "the end")
    finally:
        for i in range(4):
            here.stop(f"site-{i}")
    assert ended_as_simulated(config, out, here.folder / f"as-{name}")
    real, simulated = map(records, (out, here.folder / f"as-{name}" / "simulated"))
    assert real == simulated and [r["heard"] for r in real] == [3] * 4
    worked = [rounds_in_ledger(here.folder / f"{name}-{i}") for i in range(4)]
    cohorts = [[i for i in range(4) if number in worked[i]] for number in range(4)]
    assert cohorts == [sample(range(4), 3, SECRET, number) for number in range(4)]
    assert len({*map(tuple, cohorts)}) == 4
    if name == "demo":
        sent = [r["bytes_up"] / r["asked"] for r in read_records(out / "metrics.jsonl")]
        shares = [size / float32_bytes(config) for size in sent]
        print("bytes of a reply in the 16-bit ring, of float32:", [f"{s:.3f}" for s in shares])
        assert max(shares[1:]) < 0.52  # the first round, without bounds, has 64 bits


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_superlink_a_serverapp_and_a_site_are_killed_between_trips(tmp_path: Path) -> None:
    """Four real sites, FedDeblur, masks that are opened (two trips a round). Each time the masked
    replies of a round have arrived and the trip that opens them has begun: first the SuperLink is
    killed and comes back from its database, then the ServerApp is killed and resumed from its last
    checkpoint, which asks for the round again, then a site is killed and joins again, which the
    shares of the others make up for. Everybody counts in every round all the same, and the bits
    are those of an undisturbed run."""
    overrides = ["clients=4", "rounds=8", "evaluate_every=8", "data.size=48"]
    config, _ = secured(recipes.read("deblur", [*overrides, "secure=true", RECOVER]))
    out = tmp_path / "out"
    with deployment(tmp_path, 4) as here:
        here.serve()
        join(here, config, "secure_app")
        here.study(config.to_toml(), out)

        def opening(number: int, client: int = 0) -> bool:
            return any(here.jobs.glob(f"working-{client}-{number}-{OPEN_SUM}-*"))

        def rounds() -> int:
            path = out / "metrics.jsonl"
            return len(read_records(path)) if path.exists() else 0

        here.wait_for(lambda: opening(1), 300, "the opening of round 1")
        assert rounds() == 1
        here.stop("server")
        here.serve()
        with contextlib.suppress(AssertionError):  # Flower may give a run up with its SuperLink
            here.wait_for(lambda: opening(3), 90, "the opening of round 3")
        before = rounds()
        kill_server_app(here)
        here.study(config.to_toml(), out, "again", resume=True)
        here.wait_for(lambda: rounds() > before, 300, "another round")
        number = rounds() + 1
        here.wait_for(lambda: opening(number, 2), 300, f"the opening of round {number}")
        here.stop("site-2")
        join(here, config, "secure_app", [2])
        here.wait_for(lambda: (out / "summary.json").exists(), 600.0, "the end")
        print("rounds done when the ServerApp was killed:", before)
    heard = [r["heard"] for r in read_records(out / "metrics.jsonl")]
    assert heard == [4] * 8
    assert ended_as_simulated(config, out, tmp_path)


RECOVER = "SecureSum.dropouts=recover"


def join(
    here: Deployment,
    config: recipes.Config,
    module: str = "fedlens.sites.site",
    ids: Sequence[int] | None = None,
    memory: str = "memory",
) -> None:
    """Sites with this recipe, their own keys and everybody's public ones. memory: how their folders
    are called, before the number."""
    pytest.importorskip("flwr")
    recipe = here.folder / "study.toml"
    recipe.write_text(config.to_toml())
    here.jobs.mkdir(exist_ok=True)
    for i in ids if ids is not None else range(len(here.known)):
        own = {"key": str(here.keys / f"site-{i}"), "peers": str(here.keys)}
        own["folder"] = str(here.folder / f"{memory}-{i}")
        here.site(i, module, recipe=str(recipe), **own)


def kill_server_app(here: Deployment) -> None:
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "flwr-serverapp" in command and f":{here.inner}" in command:
            process.kill()


def ended_as_simulated(config: recipes.Config, out: Path, folder: Path) -> bool:
    """The simulator asks whom the server asked: it gets its secret."""
    wanted = run_job(config, folder / "simulated", engine=drawing_as(out))
    found = Checkpoint(out / "checkpoint").load()
    assert found
    return same_bits(found[0].state, wanted.state)


def records(folder: Path) -> list[dict[str, Any]]:
    """Of a run's rounds, without what differs between real sites and simulated ones."""
    apart = ("seconds", "bytes_up", "bytes_down")
    found = read_records(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in apart} for r in found]


def rounds_in_ledger(site: Path) -> list[int]:
    """Those in which something under masks has left a site."""
    lines = map(json.loads, (site / "ledger.jsonl").read_text().splitlines())
    return [line["round"] for line in lines if "masked" in line.get("trees", ())]


def float32_bytes(config: recipes.Config) -> int:
    """Of a model's update without SecureSum."""
    model = config.build_task().model()
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())
