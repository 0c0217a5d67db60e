"""The Flower engine over a grid without a network: who is asked, who is waited for, what late
replies may do. ClientApps are real.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bombs import named_often
from losing import LOST, Losing
from PIL import Image
from stacks import STACKS
from toy import Toy, drawing_as, flat, same_bits, toy_federation
from toy_job import RECIPE, write_recipe
from vaults import make_vaults

from fedlens import Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.config import recipe as recipes
from fedlens.config.convert import ConfigError
from fedlens.core.message import BadMessage
from fedlens.core.privacy import Mechanism
from fedlens.core.rounds import Stalled
from fedlens.data.images.folders import ImageFolder
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import Scaffold
from fedlens.runs.checkpoint import Checkpoint
from fedlens.runs.folder import read_records
from fedlens.runs.job import run_job
from fedlens.sites import server
from fedlens.sites import site as recipe_site
from fedlens.sites.server import run_server
from fedlens.trust import SecureSum
from fedlens.trust.accounting import epsilon_of

pytest.importorskip("flwr")
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from fedlens.engines.flower import engine as flower
from fedlens.engines.flower.site import Site, federation_of_one

EVERYONE = toy_federation(3)
ASKED = SimpleNamespace(object_id="x")


class Grid:
    """Three nodes in this process. `slow[round]`: clients whose reply to that round takes until the
    next round's messages are out. `broken`: clients whose process dies. Nodes 21, 22, ... are
    `clients`. `site`: makes other sites than those of the stack."""

    def __init__(
        self,
        folder: Path,
        stack: str,
        slow: dict[int, set[int]] | None = None,
        broken: set[int] | None = None,
        run: Any = None,
        clients: Sequence[int] = (2, 0, 1),
        site: Callable[[Any, Any], Site] | None = None,
    ) -> None:
        self.folder, self.run = folder, run or {}
        self.clients = {21 + k: client for k, client in enumerate(clients)}
        self.online, self.slow, self.broken = set(self.clients), slow or {}, broken or set()
        self.replies: dict[str, Message] = {}
        self.waiting: dict[str, int] = {}  # message id -> round
        self.round, self.sent = 0, 0

        def make_site(node: Any, config: Any) -> Site:
            id = int(node["client"])
            return Site(
                id,
                STACKS[stack].make(),
                federation_of_one(id, EVERYONE.holdings[id], EVERYONE.held_out_of(id)),
                folder / str(id),
                "recipe",
            )

        self.app = flower.make_client_app(site or (recipe_site.make_site if run else make_site))

    def get_nodes(self) -> list[Any]:
        return [NodeInfo(node_id=n, public_key=f"key {n}".encode()) for n in sorted(self.online)]

    def push_messages(self, messages: list[Message]) -> list[str]:
        return [self.push(m) for m in messages]

    def push(self, message: Message) -> str:
        self.sent += 1
        name = f"m{self.sent}"
        message.metadata.__dict__["_message_id"] = name
        client = self.clients[message.metadata.dst_node_id]
        context = Context(
            1,
            1,
            {"client": client, "folder": str(self.folder / str(client))},
            RecordDict(),
            self.run,
        )
        train = message.metadata.message_type == "train"
        if train and client in self.broken:
            self.replies[name] = Message(Error(8, "crashed"), reply_to=message)
            return name
        number = int(message.metadata.group_id) if train else -1
        self.round = max(self.round, number)
        self.replies[name] = self.app(message=copy.deepcopy(message), context=context)
        if client in self.slow.get(number, set()):
            self.waiting[name] = number
        return name

    def pull_messages(self, names: list[str]) -> list[Message]:
        ready = [n for n in names if self.waiting.get(n, -1) < self.round or n not in self.waiting]
        return [self.replies.pop(n) for n in ready]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    yield


def engine(grid: Grid, stack: str, **options: Any) -> Any:
    return flower.Flower(
        grid, STACKS[stack].make(), 3, recipe="recipe", poll=0.01, wait=1.0, **options
    )


def go(
    grid: Grid, stack: str, number: int = 3, late: int = 0, **options: Any
) -> tuple[Any, list[Round]]:
    rounds: list[Round] = []
    here = engine(grid, stack, late=late, **options)
    state = run(
        here.algorithm,
        here,
        number,
        seed=3,
        late=late,
        test=EVERYONE.test,
        evaluate_every=1,
        personal=True,
        after_round=lambda p, r: rounds.append(r),
    )
    return state, rounds


@pytest.mark.parametrize("stack", ["scaffold", "median", "loss-aware"])
def test_the_loopbacks_bits_metrics_and_bytes(tmp_path: Path, stack: str) -> None:
    algorithm, wanted = STACKS[stack].make(), list[Round]()
    state = run(
        algorithm,
        Loopback(algorithm, EVERYONE),
        3,
        seed=3,
        test=EVERYONE.test,
        evaluate_every=1,
        personal=True,
        after_round=lambda p, r: wanted.append(r),
    )
    got, rounds = go(Grid(tmp_path, stack), stack)
    assert same_bits(got, state)
    for a, b in zip(rounds, wanted, strict=True):
        assert (a.bytes_down, a.bytes_up, dict(a.metrics), a.scalars) == (
            b.bytes_down,
            b.bytes_up,
            dict(b.metrics),
            b.scalars,
        )


def test_a_client_that_misses_the_deadline_is_not_asked_until_it_has_answered(
    tmp_path: Path,
) -> None:
    """Client 1 answers round 0 during round 1. Without `late` that is too late; with it, it
    counts.
    """
    for late in (0, 1):
        grid = Grid(tmp_path / str(late), "fedavg", slow={0: {1}})
        _, rounds = go(grid, "fedavg", late=late, timeout=0.5)
        assert [(x.sender, x.reason) for x in rounds[0].lost] == [(1, "no answer within 0.5 s")]
        reasons = [x.reason for x in rounds[1].lost if x.sender == 1]
        assert "still busy with round 0" in reasons
        assert ("too late: answers round 0" in reasons) is (late == 0) and (
            1 in rounds[1].scalars
        ) is (late == 1)
        assert list(rounds[2].scalars) == [0, 1, 2]


def test_rounds_do_not_run_away_while_everybody_is_busy(tmp_path: Path) -> None:
    """All three answer round 0 after its deadline. Round 1 can ask nobody, waits for them, and ends
    as soon as they are heard.
    """
    grid = Grid(tmp_path, "fedavg", slow={0: {0, 1, 2}})
    here = engine(grid, "fedavg", timeout=0.5, late=1)
    rounds: list[Round] = []

    def after(p: Any, r: Round) -> None:
        rounds.append(r)
        grid.round = r.number + 1  # time passes

    run(here.algorithm, here, 3, seed=3, late=1, after_round=after)
    assert [list(r.scalars) for r in rounds] == [[], [0, 1, 2], [0, 1, 2]]
    assert {h.round for h in rounds[1].heard.values()} == {0}


def test_a_process_that_dies_costs_one_reply(tmp_path: Path) -> None:
    _, rounds = go(Grid(tmp_path, "scaffold", broken={0}), "scaffold", number=1)
    assert [(x.sender, x.reason) for x in rounds[0].lost] == [
        (0, "its process died while it worked")
    ]
    assert list(rounds[0].scalars) == [1, 2]


def test_without_anybody_a_run_ends_in_words(tmp_path: Path) -> None:
    grid = Grid(tmp_path, "fedavg")
    grid.online = set()
    with pytest.raises(flower.NoSites, match="0 of 3 sites joined within 1 s"):
        go(grid, "fedavg")


def test_who_is_away_is_said(tmp_path: Path) -> None:
    """Client 2 (node 21) never came; clients 0 and 1 did."""
    grid = Grid(tmp_path, "fedavg")
    grid.online = {22, 23}
    _, rounds = go(grid, "fedavg", number=1)
    assert [(x.sender, x.reason) for x in rounds[0].lost] == [(2, "has not joined")]


def test_a_number_out_of_range_and_a_double_are_not_let_in(tmp_path: Path) -> None:
    said: list[str] = []
    grid = Grid(tmp_path, "fedavg")
    grid.clients |= {24: 1, 25: 2}
    grid.online |= {24, 25}
    here = flower.Flower(
        grid, STACKS["fedavg"].make(), 2, recipe="recipe", poll=0.01, wait=1.0, log=said.append
    )
    run(here.algorithm, here, 1)
    text = "\n".join(said)
    assert "calls itself client 1, which is somebody else already" in text
    assert "calls itself client 2, but there are 2 (0 to 1)" in text


def test_a_number_belongs_to_its_key(tmp_path: Path) -> None:
    """Nodes 21 to 23 are clients 2, 0, 1. Node 23's key is bound to client 0, so it may not come as
    client 1; nobody bound node 22's key, so it may not come at all."""
    said: list[str] = []
    bindings = {2: b"key 21", 0: b"key 23", 1: b"key of somebody who is not here"}
    here = engine(Grid(tmp_path, "fedavg"), "fedavg", log=said.append, bindings=bindings)
    here._await_sites()
    assert here.nodes == {2: 21}
    text = "\n".join(said)
    assert (
        "the site of client 0 was not let in: calls itself client 1, but its key belongs to client"
        " 0" in text
    )
    assert "node 22 was not let in: calls itself client 0, but its key belongs to no client" in text


NOISE = "\x1b]0;owned\x07\x1b[2J\u202e/data/scans/Mustermann.png"
HOSTILE_WORDS: dict[str, Any] = {
    "a reason of its own": {"lost": NOISE},
    "a detail": {"lost": "recipe", "detail": NOISE},
    "no text": {"lost": 7, "detail": [1.0]},
    "a long detail": {"lost": "disk", "detail": "x" * 100_000},
    "classes": {"client": 0, "examples": 1, "classes": NOISE},
}


@pytest.mark.parametrize("words", HOSTILE_WORDS)
def test_what_a_site_says_is_never_printed_as_it_came(tmp_path: Path, words: str) -> None:
    """Neither control characters nor any text that is not from our own list of reasons."""
    said: list[str] = []
    content = {"fedlens": ConfigRecord(HOSTILE_WORDS[words])}
    here = engine(Rude(tmp_path, "query", content), "fedavg", log=said.append)
    here._await_sites()
    assert sorted(here.nodes) == [1, 2]
    text = "\n".join([*said, *(why for why, _ in here.refused.values())])
    assert "node 22 was not let in" in text
    assert "Mustermann" not in text and all(line.isprintable() and len(line) < 400 for line in said)


def test_errors_of_a_stock_supernode_are_not_quoted(tmp_path: Path) -> None:
    """Flower puts the text of an exception into them."""
    grid = Grid(tmp_path, "fedavg")
    push = grid.push

    def fail(message: Message) -> str:
        name = push(message)
        if message.metadata.dst_node_id == 22:
            error = Error(2, "FileNotFoundError: /data/scans/Mustermann.png")
            grid.replies[name] = Message(error, reply_to=message)
        return name

    grid.push = fail  # type: ignore[method-assign]
    here = engine(grid, "fedavg")
    here._await_sites()
    assert [why for why, _ in here.refused.values()] == ["node 22 was not let in: Flower error 2"]


GREETINGS: dict[str, Any] = {
    "an array": Array("uint8", (1,), "x", b"x"),
    "a record alone": ConfigRecord({"client": 0, "examples": 1}),
    "no record": {},
    "empty": {"fedlens": ConfigRecord()},
    "another kind of record": {"fedlens": MetricRecord({"client": 0, "examples": 1})},
    "no examples": {"fedlens": ConfigRecord({"client": 0})},
    "a word for a number": {"fedlens": ConfigRecord({"client": "x", "examples": 1})},
    "a list for a number": {"fedlens": ConfigRecord({"client": [0], "examples": 1})},
    "nothing to learn from": {"fedlens": ConfigRecord({"client": 0, "examples": 0})},
    "less than nothing": {"fedlens": ConfigRecord({"client": 0, "examples": -5})},
    "more than there is": {"fedlens": ConfigRecord({"client": 0, "examples": 1 << 60})},
}


class Rude(Grid):
    """Client 0 (node 22) answers one kind of message with content of its own."""

    def __init__(self, folder: Path, kind: str, content: Any) -> None:
        super().__init__(folder, "fedavg")
        self.kind, self.content = kind, content

    def push(self, message: Message) -> str:
        name = super().push(message)
        if message.metadata.dst_node_id == 22 and message.metadata.message_type == self.kind:
            whole = isinstance(self.content, dict)
            reply = Message(RecordDict(self.content if whole else {}), reply_to=message)
            if not whole:  # as Flower hands over what a sender calls a message's content
                reply.__dict__["_content"] = self.content
            self.replies[name] = reply
        return name


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_greeting_that_makes_no_sense_costs_only_that_site(tmp_path: Path, greeting: str) -> None:
    said: list[str] = []
    here = engine(Rude(tmp_path, "query", GREETINGS[greeting]), "fedavg", log=said.append)
    here._await_sites()
    assert sorted(here.nodes) == [1, 2] and list(here.refused) == [22]
    assert sum("node 22 was not let in: " in line for line in said) == 1


REPLIES: dict[str, Any] = {
    "an array": Array("uint8", (1,), "x", b"x"),
    "a record alone": ConfigRecord({"client": 0}),
    "no record": {},
    "another kind of record": {"fedlens": MetricRecord({"client": 0})},
    "no message": {"fedlens": ConfigRecord({"client": 0})},
    "no arrays": {"fedlens": ConfigRecord({"client": 0}), "message": ConfigRecord({"a": 1})},
    "words for bytes": {"fedlens": ConfigRecord({"client": 0, "message": "words"})},
    "numbers for bytes": {"fedlens": ConfigRecord({"client": 0, "message": [1, 2]})},
    "small noise": {"fedlens": ConfigRecord({"client": 0, "message": [bytes(range(64))]})},
    "noise": {
        "fedlens": ConfigRecord({"client": 0}),
        "message": ArrayRecord({"0": Array("uint8", (64,), "x", bytes(range(64)))}),
    },
}


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_that_makes_no_sense_costs_only_that_site(tmp_path: Path, reply: str) -> None:
    here = engine(Rude(tmp_path, "train", REPLIES[reply]), "fedavg")
    rounds: list[Round] = []
    run(here.algorithm, here, 1, after_round=lambda p, r: rounds.append(r))
    assert [x.sender for x in rounds[0].lost] == [0] and rounds[0].lost[0].reason
    assert list(rounds[0].scalars) == [1, 2]


def test_a_site_whose_classes_differ_is_not_let_in(tmp_path: Path) -> None:
    """Client 0 knows benign and malignant, client 1 benign and other: its label 1 means something
    else. Client 2 has never seen a malignant case, and says with `names` that it knows of them."""
    folders = {0: ("benign", "malignant"), 1: ("benign", "other"), 2: ("benign",)}
    said: list[str] = []
    grid = Grid(tmp_path, "fedavg")

    def make_site(node: Any, config: Any) -> Site:
        id = int(node["client"])
        for name in folders[id]:
            (tmp_path / f"scans-{id}" / name).mkdir(parents=True)
            for k in range(4):
                Image.new("L", (8, 8), 60 * k).save(tmp_path / f"scans-{id}" / name / f"{k}.png")
        names = ("benign", "malignant") if id == 2 else ()
        federation = ImageFolder(
            root=str(tmp_path / f"scans-{id}"), names=names, least=1
        ).federation(1, 0)
        here = federation_of_one(id, EVERYONE.holdings[id])
        return Site(
            id,
            STACKS["fedavg"].make(),
            here,
            tmp_path / str(id),
            "recipe",
            classes=tuple(federation.facts.classes),
        )

    grid.app = flower.make_client_app(make_site)
    here = engine(grid, "fedavg", log=said.append, classes="benign, malignant")
    here._await_sites()
    assert sorted(here.nodes) == [0, 2]
    assert "client 1 has the classes benign, other, not benign, malignant" in "\n".join(said)


class Voices(Grid):
    """Sites whose classes are `said`, by client; nodes 21, 22, 23 are clients 2, 0, 1, and are met
    in that order."""

    def __init__(self, folder: Path, said: dict[int, str], clients: Sequence[int]) -> None:
        super().__init__(folder, "fedavg", clients=clients)
        self.said = said

    def push(self, message: Message) -> str:
        name = super().push(message)
        if message.metadata.message_type == "query":
            client = self.clients[message.metadata.dst_node_id]
            self.replies[name].content["fedlens"]["classes"] = self.said[client]
        return name


def test_what_labels_mean_is_not_up_to_the_first_that_comes(tmp_path: Path) -> None:
    """Client 2 comes first and has other classes than the two after it: it is the one that is not
    let in, also when it comes again, and a later one is held against what was decided."""
    said: list[str] = []
    grid = Voices(tmp_path, {2: "owned", 0: "cat, dog", 1: "cat, dog"}, (2, 0, 1))
    here = engine(grid, "fedavg", log=said.append)
    here._await_sites()
    assert sorted(here.nodes) == [0, 1] == sorted(here.sizes()) and here.classes == "cat, dog"
    assert "client 2 has the classes owned, not cat, dog" in said[-1]
    here.refused.clear()
    here._await_sites()
    assert sorted(here.nodes) == [0, 1]


def test_as_many_that_say_one_thing_as_another_are_the_operators_to_judge(tmp_path: Path) -> None:
    grid = Voices(tmp_path, {0: "dog, cat", 1: "cat, dog"}, (0, 1))
    grid.online = {21, 22}
    here = engine(grid, "fedavg")
    words = "client 0 has the classes dog, cat; client 1 has the classes cat, dog: let the server's"
    with pytest.raises(flower.NoSites, match=words):
        here._await_sites()
    known = engine(grid, "fedavg", classes="cat, dog")
    known._await_sites()
    assert sorted(known.nodes) == [1]


def test_the_recipe_says_what_labels_mean_where_it_names_them(tmp_path: Path) -> None:
    """The server has no data of its own; the [data] of its recipe lists the classes."""
    data = ["data.name=ImageFolder", f"data.root={tmp_path}", "data.names=['cat', 'dog']"]
    config = recipes.read("demo", [*data, "clients=3", "cohort=3", "task.classes=2"])
    setup = server._prepare(config, print)
    assert not setup.federation.facts.classes and server._class_names(setup) == ("cat", "dog")
    bare = recipes.read("demo", [*data[:2], "clients=3", "cohort=3", "task.classes=2"])
    assert server._class_names(server._prepare(bare, print)) == ()


def test_a_full_disk_at_a_site_is_that_sites_alone(tmp_path: Path) -> None:
    """What client 1 would write in round 0 goes to /dev/full. It is lost, in words; the others, and
    it too in round 1, go on.
    """
    config = recipes.read(
        "deblur-partial", ["clients=3", "rounds=2", "data.size=48", "secure=false"]
    )
    facts = {
        "name": "deblur-partial",
        "text": config.to_toml(),
        "out": str(tmp_path / "real"),
        "resume": False,
        "fresh": False,
        "wait": 5.0,
        "least": 3,
        "forgive": False,
    }
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "flower.json").write_text('{"job": "j"}')
    (tmp_path / "1" / "j").mkdir(parents=True)
    (tmp_path / "1" / "j" / f".1.part{os.getpid()}.safetensors").symlink_to("/dev/full")
    run_server(Grid(tmp_path, "", run=facts), facts)
    lines = read_records(tmp_path / "real" / "metrics.jsonl")
    assert [line["heard"] for line in lines] == [2, 3]
    why = "cannot write its memory: No space left on device"
    assert [(x["client"], x["reason"]) for x in lines[0]["lost"]] == [(1, why)]


# LossAware's linear decay depends on how many rounds are planned: then none can be added.
CLIPS = ["data.clips=3", "data.groups=3", "data.height=64", "data.width=64", "data.crop=32"]
METHODS = {
    "fedvsr": [
        "clients=3",
        "cohort=2",
        "rounds=2",
        "LossAware.decay=paper",
        "secure=false",
        *CLIPS,
    ],
    "deblur": ["clients=3", "cohort=2", "rounds=6", "data.size=48", "secure=false"],
    "deblur-partial": ["clients=3", "rounds=4", "evaluate_every=2", "data.size=48", "secure=false"],
}


@pytest.mark.parametrize("name", METHODS)
def test_recipes_end_in_the_simulators_bits_also_when_resumed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the ServerApp and the sites of `fedlens run --engine flower` do, stopped after half the
    rounds and resumed by a new server: networks, and a scene whose images, kernels and multipliers
    live at the sites. Who is asked in which round is drawn from the server's secret; handed that
    afterwards, the simulator asks the same clients."""
    config = recipes.read(name, [*METHODS[name], "workers=0"])
    half = recipes.read(
        name, [*METHODS[name], "workers=0", f"rounds={config.settings.rounds // 2}"]
    )
    for part, resume in ((half, False), (config, True)):
        facts = {
            "name": name,
            "text": part.to_toml(),
            "out": str(tmp_path / "real"),
            "resume": resume,
            "fresh": False,
            "wait": 5.0,
            "least": 3,
            "forgive": False,
        }
        run_server(Grid(tmp_path, "", run=facts), facts)
    wanted = run_job(config, tmp_path / "simulated", engine=drawing_as(tmp_path / "real"))
    found = Checkpoint(tmp_path / "real" / "checkpoint").load()
    lines = [
        read_records(folder / "metrics.jsonl") for folder in (tmp_path / "real", wanted.folder)
    ]
    assert found and same_bits(found[0].state, wanted.state)
    for a, b in zip(*lines, strict=True):
        assert {k: v for k, v in a.items() if k not in ("seconds", "metrics")} == {
            k: v for k, v in b.items() if k not in ("seconds", "metrics")
        }
    assert "client 1 has joined" in capsys.readouterr().out


def test_a_recipe_under_masks_ends_in_the_simulators_bits(tmp_path: Path) -> None:
    """Sites with keys and vaults of their own, made from the recipe, which hold every message to
    it: its rounds, its evaluations, the last one after the algorithm has ended the run."""
    overrides = ["clients=3", "rounds=9", "FedDeblur.tol=0.5", "data.size=48", "workers=0"]
    more = ["secure=true", "personal=true", "evaluate_every=1", "max_weight=5e4", "seed=3"]
    config = recipes.read("deblur", [*overrides, *more])
    make_vaults(tmp_path / "keys", 3)
    facts = {
        "name": "deblur", "text": config.to_toml(), "out": str(tmp_path / "real"),
        "resume": False, "fresh": False, "wait": 5.0, "least": 3, "forgive": False,
    }  # fmt: skip
    grid = Grid(tmp_path, "", run=facts)
    app, keys = grid.app, tmp_path / "keys"

    def keyed(message: Message, context: Context) -> Message:
        own = {"key": str(keys / f"site-{context.node_config['client']}"), "peers": str(keys)}
        context.node_config.update(own)
        return app(message=message, context=context)

    grid.app = keyed  # type: ignore[assignment]
    run_server(grid, facts)
    wanted = run_job(config, tmp_path / "simulated")
    found = Checkpoint(tmp_path / "real" / "checkpoint").load()
    lines = read_records(tmp_path / "real" / "metrics.jsonl")
    assert found and same_bits(found[0].state, wanted.state)
    assert all(x["heard"] == 3 and not x["lost"] and not x["unevaluated"] for x in lines)
    assert len(lines) < config.settings.rounds


class Boaster(Grid):
    """Client 1 says that it has one example, the others have twenty."""

    def push(self, message: Message) -> str:
        name = super().push(message)
        if message.metadata.message_type == "query":
            client = self.clients[message.metadata.dst_node_id]
            fields = {"client": client, "examples": 1 if client == 1 else 20, "classes": ""}
            content = RecordDict({"fedlens": ConfigRecord(fields)})
            self.replies[name] = Message(content, reply_to=message)
        return name


def test_a_site_whose_word_makes_it_too_dear_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DPSGD with a budget for two rounds of the smallest of three sites (20 examples). One that
    calls its data a single example would pay in one round more than that: it is not asked, and the
    others have their two rounds. Under SecureSum two are too few: the run ends, and it is named all
    the same."""
    pytest.importorskip("dp_accounting")
    smallest = Mechanism("example", 1.0, 2 / 20, "poisson", 10, 1e-5)  # batches of 2
    limit = epsilon_of([(smallest, 2)], 1e-5) + 1e-6
    recipe = write_recipe(
        tmp_path, RECIPE.replace("toy_job:Slow", "toy_job:Noisy").replace("Scaffold", "DPSGD")
    )
    more = ["clients=3", "rounds=4", "batch=2", f"DPSGD.max_epsilon={limit!r}"]

    def start(secure: str, out: Path) -> None:
        text = recipes.read(recipe, [*more, f"secure={secure}"]).to_toml()
        facts = {
            "name": "toy", "text": text, "out": str(out), "resume": False, "fresh": False,
            "wait": 5.0, "least": 3, "forgive": False,
        }  # fmt: skip
        run_server(Boaster(tmp_path, "", run=facts), facts)

    start("false", tmp_path / "out")
    lines = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [line["heard"] for line in lines] == [2, 2]
    why = "is left out: by the 1 examples that it says it has, another round would cost it"
    assert all(why in line["lost"][0]["reason"] for line in lines)
    assert [line["lost"][0]["client"] for line in lines] == [1, 1]
    said = capsys.readouterr().out
    assert f"client 1: {why}" in said and "stopped after round 2" in said
    kept = (tmp_path / "out" / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["asked"] for line in kept if line] == [[0, 2], [0, 2]]
    with pytest.raises(ConfigError, match="not even one round can be run"):
        start("true", tmp_path / "masked")
    assert f"client 1 {why}" in (said := capsys.readouterr().out) and "2 others are too few" in said


class Loud(Grid):
    """Client 1's reply comes with 40 MB of its own, as the pieces of a message or as something that
    Flower cannot put together."""

    def __init__(self, folder: Path, stack: str, junk: bool) -> None:
        super().__init__(folder, stack)
        self.junk = junk

    def pull_messages(self, names: list[str]) -> list[Message]:
        out = super().pull_messages(names)
        for reply in out:
            fields = reply.content["fedlens"]
            if fields.get("client") == 1 and "message" in fields:
                if self.junk:
                    raise KeyError("an object that nobody sent")
                fields["message"] = [*fields["message"], bytes(40 << 20)]
        return out


@pytest.mark.parametrize(
    ("junk", "why"),
    [
        (False, "is larger than 1.1 MB, the most that it could be"),
        (True, "cannot be put together: KeyError"),
    ],
)
def test_what_is_too_large_or_no_reply_at_all_costs_that_reply(
    tmp_path: Path, junk: bool, why: str
) -> None:
    _, rounds = go(Loud(tmp_path, "fedavg", junk), "fedavg", 2)
    for r in rounds:
        assert list(r.heard) == [0, 2]
        assert [(x.sender, x.reason, x.refused) for x in r.lost] == [(1, why, True)]


def test_a_reply_that_was_announced_and_does_not_come_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own grid looks for its objects for up to two hours, and for nobody else's."""

    class Response:
        object_content = b""  # not there yet

    class Client:
        looks = 0

        def PullObject(self, request: Any) -> Response:
            self.looks += 1
            clock[0] += 10.0
            return Response()

    clock = [1000.0]
    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    grid = Grid(tmp_path, "fedavg")
    grid._runtime_client = client = Client()  # type: ignore[attr-defined]

    def pull_messages(names: list[str]) -> list[Message]:
        for _ in range(720):
            grid._runtime_client.PullObject(ASKED)  # type: ignore[attr-defined]
        return []

    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    built = engine(grid, "fedavg")
    with pytest.raises(BadMessage, match="was announced, and then came too slowly"):
        built._fetch("m1", 1_200_000)
    assert client.looks == 11  # 30 s, and 73 s for as many bytes at 16 kB a second


def test_a_reply_is_not_fetched_beyond_what_it_can_be(tmp_path: Path) -> None:
    """Flower's own grid fetches an object at a time: of a reply of 100 pieces of 1 MB, where 1.2 MB
    are expected, the second piece is the last."""

    class Response:
        object_content = b"ConfigRecord  1048576\0" + bytes(1 << 20)

    class Client:
        fetched = 0

        def PullObject(self, request: Any) -> Response:
            self.fetched += 1
            return Response()

    grid = Grid(tmp_path, "fedavg")
    grid._runtime_client = client = Client()  # type: ignore[attr-defined]

    def pull_messages(names: list[str]) -> list[Message]:
        for _ in range(100):
            grid._runtime_client.PullObject(ASKED)  # type: ignore[attr-defined]
        return []

    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    built = engine(grid, "fedavg")
    with pytest.raises(BadMessage, match=r"larger than 1\.2 MB"):
        built._fetch("m1", 1_200_000)
    assert client.fetched == 2


def test_a_chunk_that_is_named_again_and_again_counts_every_time(tmp_path: Path) -> None:
    """Flower repeats a chunk as often as arrays name it: 300 kB that are fetched would become 75 MB
    when they are put together, and a few bytes more any number of times that. The same whichever
    comes first, and whether one array names it or many do."""
    one = named_often(bytes(250_000), [300])
    many = named_often(bytes(250_000), [1] * 300)
    honest = named_often(bytes(range(250)) * 1000, [1])
    for objects in (one, many, one[::-1], many[::-1]):
        assert sum(len(content) for _, content in objects) < 400_000
        with pytest.raises(BadMessage, match=r"larger than 1\.2 MB"):
            fetching(tmp_path, objects)._fetch("m1", 1_200_000)
    fetching(tmp_path, honest)._fetch("m1", 1_200_000)


def fetching(folder: Path, objects: Sequence[tuple[str, bytes]]) -> Any:
    """An engine whose grid fetches these objects."""
    found, grid = dict(objects), Grid(folder, "fedavg")

    class Client:
        def PullObject(self, request: Any) -> Any:
            return SimpleNamespace(object_content=found[request.object_id])

    def pull_messages(names: list[str]) -> list[Message]:
        for name in found:
            grid._runtime_client.PullObject(SimpleNamespace(object_id=name))  # type: ignore[attr-defined]
        return []

    grid._runtime_client = Client()  # type: ignore[attr-defined]
    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    return engine(grid, "fedavg")


@pytest.mark.parametrize("when", LOST)
def test_secure_sum_has_the_simulators_bits_whoever_is_lost(tmp_path: Path, when: str) -> None:
    """Seven sites with keys and vaults of their own behind Flower's messages, lost before, during
    and after masking."""
    everyone, vaults = toy_federation(7), make_vaults(tmp_path, 7)

    def make() -> SecureSum:
        made = stack(FedAvg(Toy(), batch=8, lr=0.05), Scaffold(), SecureSum("recover"))
        assert isinstance(made, SecureSum)
        return made

    def site(node: Any, request: Any) -> Site:
        i = int(node["client"])
        one = federation_of_one(i, everyone.holdings[i], everyone.held_out_of(i))
        return Site(i, make().with_vault(vaults[i]), one, tmp_path / str(i), "recipe")

    grid = Grid(tmp_path, "", clients=(6, 2, 4, 0, 1, 5, 3), site=site)
    flwr = flower.Flower(grid, make(), 7, recipe="recipe", poll=0.01, wait=1.0)
    losings = [Losing(e, LOST[when]) for e in (Simulator(make(), everyone, workers=0), flwr)]
    app = grid.app

    def lossy(message: Message, context: Context) -> Message:
        """Flower's engine sums what arrives: a reply that gets lost does so on its way there."""
        reply = app(message=message, context=context)
        gone = losings[1].fate.get(int(context.node_config["client"])) == "after"
        return Message(Error(8, "lost"), reply_to=message) if gone else reply

    grid.app = lossy  # type: ignore[assignment]
    ends, heard = [], []
    for losing in losings:
        seen: list[Round] = []
        used = losing.engine
        state = run(used.algorithm, losing, 4, seed=3, after_round=lambda _, r, s=seen: s.append(r))
        used.close()
        ends.append(flat(state))
        heard.append([sorted(r.heard) for r in seen])
    assert heard[0] == heard[1]
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])


class Rebooting(Grid):
    """Client 1 is gone once round 1 is over, and comes back, or does not."""

    def __init__(self, *args: Any, back: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.back, self.looks = back, 0

    def get_nodes(self) -> list[Any]:
        gone = {n for n, client in self.clients.items() if client == 1}
        self.looks += self.round > 0
        if self.looks and (self.looks < 3 or not self.back):
            self.online -= gone
        elif self.looks:
            self.online |= gone
        return super().get_nodes()


@pytest.mark.parametrize("back", [True, False])
def test_a_round_that_needs_everybody_waits_for_them(tmp_path: Path, back: bool) -> None:
    """Three sites under masks: a sum is of all or of nobody. One that restarts costs no round, and
    one that stays away ends the run with its number; what was done is done."""
    vaults = make_vaults(tmp_path, 3)

    def make() -> SecureSum:
        made = stack(FedAvg(Toy(), batch=8), SecureSum())
        assert isinstance(made, SecureSum)
        return made

    def site(node: Any, request: Any) -> Site:
        i = int(node["client"])
        one = federation_of_one(i, EVERYONE.holdings[i], EVERYONE.held_out_of(i))
        return Site(i, make().with_vault(vaults[i]), one, tmp_path / str(i), "recipe")

    grid = Rebooting(tmp_path, "", site=site, back=back)
    said: list[str] = []
    flwr = flower.Flower(grid, make(), 3, recipe="recipe", poll=0.01, wait=4.0, log=said.append)
    seen: list[Round] = []

    def go_on() -> None:
        run(make(), flwr, 3, after_round=lambda _, r: seen.append(r))

    if back:
        go_on()
        assert [len(r.heard) for r in seen] == [3, 3, 3] and grid.looks >= 3
        assert "client 1 has joined" in said  # and not with how many examples
        return
    flwr.wait = 0.5
    with pytest.raises(Stalled, match=r"needs 3 of the 3 sites .* there were 2: without clients 1"):
        go_on()
    assert [len(r.heard) for r in seen] == [3, 3]
