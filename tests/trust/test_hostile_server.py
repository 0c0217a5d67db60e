"""A server, or a site, that tries to see what is hidden: each attempt is refused by an honest site,
which says why. Real vaults: keys from the operating system, signatures, files."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from toy import GroupToy, Toy, toy_federation
from vaults import Sites, make_vaults, with_told

from fedlens import Client, Federation, Message, Round, run, stack
from fedlens.algorithms import FedAvg
from fedlens.config import recipe as recipes
from fedlens.core import tree
from fedlens.core.algorithm import Trips
from fedlens.core.memory import Memory
from fedlens.core.message import Header
from fedlens.core.replies import Lost
from fedlens.core.rounds import Stalled, make_trips
from fedlens.data.images.tensors import Tensors
from fedlens.engines.worker import Job, Worker
from fedlens.layers import PrivateMean, Scaffold
from fedlens.sites.keys import public_pem
from fedlens.sites.server import _bindings, _deployed, _prepare
from fedlens.trust import SecureSum
from fedlens.trust.masking import public_of
from fedlens.trust.roster import Deal, SumTerms, _greeting, b64, deal, greet, share_count
from fedlens.trust.secure_sum import DEAL, GREET, OPEN_SUM, WORK
from fedlens.trust.server_memory import ServerMemory
from fedlens.trust.vault import ENDED_SECONDS, Declined, SiteVault

N = 5
Told = dict[str, Any]


class Attack:
    """A run of honest sites under a server that writes its own messages. After `rounds` of an
    honest run, every message is at hand; `try_` sends one of them, changed, to a site."""

    def __init__(self, folder: Path, rounds: int = 2, **options: Any) -> None:
        options = {"dropouts": "recover", **options}
        self.algorithm = stack(FedAvg(Toy(), batch=8), SecureSum(**options))
        self.vaults = make_vaults(folder, N)
        self.sites = Sites(self.algorithm, toy_federation(N), self.vaults)  # type: ignore[arg-type]
        self.seen: list[Round] = []
        self.stop: tuple[int, int] | None = None
        self.rounds = rounds
        self.job = ""  # what a liar was asked about
        self.terms: Any = None

    def run(self, before: tuple[int, int] | None = None) -> None:
        """Up to the trip (round, number), which is not made any more."""

        def change(i: int, message: Message) -> Message:
            if (message.round, message.header.trip) == before:
                raise InterruptedError
            return message

        self.sites.change = change
        try:
            run(
                self.algorithm,
                self.sites,
                self.rounds,
                after_round=lambda _, r: self.seen.append(r),
            )
        except InterruptedError:
            assert before is not None
        self.sites.change = lambda i, message: message

    def message(self, number: int, trip: int, client: int = 0) -> Message:
        return next(
            m
            for i, m, _ in self.sites.sent
            if (m.round, m.header.trip, i) == (number, trip, client)
        )

    def changed(
        self, number: int, trip: int, client: int, change: Callable[[Told], None]
    ) -> Message:
        message = self.message(number, trip, client)
        told = json.loads(message.texts["secure"])
        change(told)
        return with_told(message, json.dumps(told))

    def try_(self, number: int, trip: int, client: int, change: Callable[[Told], None]) -> str:
        """Why the site does not do it."""
        return self.refusal(client, self.changed(number, trip, client, change))

    def dealt_roster(self) -> Told:
        """Of round 0, before anybody has worked."""
        deals = {
            str(i): json.loads(r.texts["secure"])["deal"]
            for i, m, r in self.sites.sent
            if m.header.trip == DEAL and isinstance(r, Message)
        }
        terms = json.loads(self.message(0, DEAL).texts["secure"])["terms"]
        return {"terms": terms, "deals": deals}

    def refusal(self, client: int, message: Message) -> str:
        outcome = self.sites.ask(client, message)
        assert isinstance(outcome, Lost), "the site did what it was asked to"
        return outcome.reason.removeprefix("Declined: ")


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Attack:
    """Two honest rounds; what follows leaves no trace, because it is refused."""
    made = Attack(tmp_path_factory.mktemp("hostile"))
    made.run()
    assert [len(r.heard) for r in made.seen] == [N, N]
    return made


def fake_key() -> str:
    return b64(public_of(b"the server's own secret, 32 byte"))


# -- keys ------------------------------------------------------------------------------------------


def test_a_forged_key(attack: Attack) -> None:
    """In the middle: a mask key of the server's own in place of client 2's."""

    def forge(told: Told) -> None:
        told["roster"]["deals"]["2"]["mask"] = fake_key()

    assert attack.try_(0, WORK, 0, forge) == "the keys of client 2 are not signed by it for round 0"


def test_a_forged_box_key(attack: Attack) -> None:
    """Shares for client 2 would go to the server."""

    def forge(told: Told) -> None:
        told["greetings"]["2"]["box"] = fake_key()

    assert attack.try_(0, DEAL, 0, forge) == "the box key of client 2 is not signed by it"


def test_swapped_keys(attack: Attack) -> None:
    def swap(told: Told) -> None:
        deals = told["roster"]["deals"]
        deals["1"], deals["2"] = deals["2"], deals["1"]

    assert "keys of client 1 are not signed by it" in attack.try_(0, WORK, 0, swap)

    def double(told: Told) -> None:
        told["roster"]["deals"]["1"] = told["roster"]["deals"]["2"]

    assert attack.try_(0, WORK, 0, double) == "two clients are to have the same key"


def test_keys_of_an_earlier_round(attack: Attack) -> None:
    old = json.loads(attack.message(0, WORK).texts["secure"])["roster"]

    def replay(told: Told) -> None:
        told["roster"] = old

    assert attack.try_(1, WORK, 0, replay).startswith("the keys are for round 0 (train)")

    def relabel(told: Told) -> None:
        told["roster"] = {**old, "terms": {**old["terms"], "round": 1}}

    assert "not signed by it for round 1" in attack.try_(1, WORK, 0, relabel)

    def one_of_them(told: Told) -> None:
        told["roster"]["deals"]["3"] = old["deals"]["3"]

    assert "client 3 are not signed by it for round 1" in attack.try_(1, WORK, 0, one_of_them)


def test_keys_of_another_job(attack: Attack) -> None:
    def rename(told: Told) -> None:
        told["roster"]["terms"]["job"] = "another"

    assert "not signed by it" in attack.try_(1, WORK, 0, rename)


def test_a_key_that_was_in_another_roster(tmp_path: Path) -> None:
    """A second attempt at a round, with fresh keys of everybody but client 3: what came out about
    its old key in the first attempt would open its part of the second."""
    attack = Attack(tmp_path)
    attack.run(before=(1, OPEN_SUM))
    first = json.loads(attack.message(1, WORK).texts["secure"])["roster"]
    asked = attack.message(0, OPEN_SUM)
    fresh = {}
    for i in range(N):
        request = {k: v for k, v in json.loads(asked.texts["secure"]).items() if k != "survivors"}
        request.pop("roster"), request.pop("lost")
        reply = attack.sites.ask(i, with_told(asked, json.dumps(request)))
        assert isinstance(reply, Message)
        fresh[str(i)] = json.loads(reply.texts["secure"])["deal"]

    def mix(told: Told) -> None:
        told["roster"]["deals"] = {**fresh, "3": first["deals"]["3"]}

    why = attack.try_(1, WORK, 0, mix)
    assert why == "a client's key was used before, with others: it is replayed"


def test_a_key_of_a_site_that_nobody_pinned(attack: Attack, tmp_path: Path) -> None:
    vault = attack.vaults[0]
    known = {i: key for i, key in vault.peers.items() if i != 4}
    poor = SiteVault(tmp_path / "poor", vault.key, known)
    with pytest.raises(Declined, match="client 4 is to take part, but this site does not know"):
        poor.is_signed(4, b"anything", "")


def test_secrets_do_not_outlive_their_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job has a box key of its own. What was not used for weeks goes when another job works;
    of a crash while a secret is written nothing is left that would be taken for one."""
    vault = make_vaults(tmp_path, 1)[0]
    assert vault.box("old") == vault.box("old") != vault.box("new")
    name, _ = vault.new("old-000009-train")
    current, seed = vault.new("new-000003-train")
    weeks_ago = time.time() - 2 * ENDED_SECONDS
    for path in vault.folder.glob("**/*.secret"):
        os.utime(path, (weeks_ago, weeks_ago))
    vault.forget("new-000003-train")
    assert {p.name for p in vault.folder.glob("*.secret")} == {"new.secret"}
    assert vault.seed("new-000003-train", current) == seed
    with pytest.raises(Declined, match="was not made here"):
        vault.seed("old-000009-train", name)

    def crash(_: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedlens.trust.vault.os.urandom", crash)
        vault.box("torn")
    assert len(vault.box("torn")) == 32


def test_its_own_key_is_not_its_own(attack: Attack) -> None:
    def other(told: Told) -> None:
        told["roster"]["deals"]["0"]["name"] = "00" * 16

    assert "client 0 are not signed by it" in attack.try_(0, WORK, 0, other)


def test_names_of_jobs_that_share_a_folder(attack: Attack, tmp_path: Path) -> None:
    """A long name or an odd one could be cut or turned into that of another job."""
    for name in ("a" * 65, "a.b", "a/b", "..", "", "job\n", 7):

        def call(told: Told, name: Any = name) -> None:
            told["terms"]["job"] = name

        assert attack.try_(0, DEAL, 0, call) == "the terms of a sum are malformed"
    vault = make_vaults(tmp_path, 1)[0]
    name, seed = vault.new("job-x-000001-train")
    for number in range(4):
        vault.new(f"job-{number:06d}-train")
    vault.forget("job-000009-train")
    assert vault.seed("job-x-000001-train", name) == seed
    assert not list(vault.folder.glob("job-0*/*.secret"))


# -- who takes part --------------------------------------------------------------------------------


def test_a_cohort_of_two(attack: Attack) -> None:
    def few(told: Told) -> None:
        deals = told["roster"]["deals"]
        told["roster"]["deals"] = {i: deals[i] for i in ("0", "1")}

    assert attack.try_(0, WORK, 0, few) == "2 are to take part, not the 4 there must be"

    def few_holders(told: Told) -> None:
        told["terms"] |= {"holders": [0, 1], "threshold": 2}

    assert attack.try_(0, DEAL, 0, few_holders).startswith("a sum of 2 is none that hides anybody")


def test_a_threshold_that_a_few_can_reach(attack: Attack) -> None:
    def lower(told: Told) -> None:
        told["terms"]["threshold"] = 2

    assert attack.try_(0, DEAL, 0, lower) == (
        "2 of 5 shares are to open a mask: more than two thirds of those who were asked it must be"
    )

    def of_those_left(told: Told) -> None:
        told["terms"] |= {"holders": [0, 1, 2, 3], "threshold": 3}

    dealt = attack.sites.ask(0, attack.changed(0, DEAL, 0, of_those_left))
    assert isinstance(dealt, Message)  # three of four are enough, if no more were asked

    def five_asked(told: Told) -> None:
        of_those_left(told["roster"])
        del told["roster"]["deals"]["4"]
        told["roster"]["deals"]["0"] = json.loads(dealt.texts["secure"])["deal"]

    assert attack.try_(0, WORK, 0, five_asked).startswith("3 of 4 shares are to open a mask")


def test_opening_among_so_few_that_nobody_may_be_lost(tmp_path: Path) -> None:
    """The recipe's "auto" skips dropouts here; a server that recovers them could split the list of
    survivors (below) with fewer friends."""
    attack = Attack(tmp_path, rounds=1)
    attack.run(before=(0, WORK))
    roster = attack.dealt_roster()
    work = attack.algorithm.inner.broadcast(attack.algorithm.init()).with_header(  # type: ignore[attr-defined]
        attack.message(0, DEAL).header, trip=WORK
    )
    site = replace(attack.algorithm, dropouts="auto")  # type: ignore[type-var]
    site.inner = attack.algorithm.inner  # type: ignore[attr-defined]
    attack.sites.workers[0].algorithm = site.with_vault(attack.vaults[0])  # type: ignore[attr-defined]
    told = json.dumps({"roster": roster, "clients": N})
    assert attack.refusal(0, with_told(work, told)).startswith("masks of 5 are to be opened")


def test_a_list_without_everybody(tmp_path: Path) -> None:
    """Where masks are never opened a sum is everybody's, and where they are, of more than two
    thirds: the sum of five and that of four of them would show the fifth."""
    attack = Attack(tmp_path / "skip", rounds=1, dropouts="skip")
    attack.run()

    def fewer(told: Told) -> None:
        del told["roster"]["deals"]["4"]

    assert attack.try_(0, WORK, 0, fewer) == "4 are to take part, not the 5 there must be"
    attack = Attack(tmp_path / "recover", rounds=1)
    attack.run()

    def few(told: Told) -> None:
        del told["roster"]["deals"]["4"], told["roster"]["deals"]["3"]

    assert attack.try_(0, WORK, 0, few) == "3 are to take part, not the 4 there must be"


def careful(attack: Attack, client: int, least: int) -> None:
    """This site's policy wants more clients in a sum than the recipe does."""
    layer = attack.algorithm.with_vault(attack.vaults[client], least)  # type: ignore[attr-defined]
    attack.sites.workers[client].algorithm = layer


def test_fewer_than_the_sites_own_policy_wants(tmp_path: Path) -> None:
    """The header says that five are asked, and they are: with the greeting. Then the server loses
    one of them. Four are enough for the recipe, not for site 0, also in an evaluation."""
    attack = Attack(tmp_path, rounds=1)
    careful(attack, 0, N)

    def lose_one(i: int, message: Message) -> Message | None:
        return None if i > 3 and message.header.trip != GREET else message

    attack.sites.change = lose_one
    with pytest.raises(Stalled):
        run(attack.algorithm, attack.sites, 1)
    assert attack.message(0, WORK).header.cohort == N
    told = [(i, r) for i, m, r in attack.sites.sent if m.header.trip == WORK]
    assert [i for i, r in told if isinstance(r, Message)] == [1, 2, 3]
    assert isinstance(told[0][1], Lost)
    assert told[0][1].reason == "Declined: 4 are to take part, not the 5 there must be"

    def few(told: Told) -> None:
        told["terms"] |= {"holders": [0, 1, 2], "threshold": 2, "purpose": "evaluate"}

    message = attack.message(0, DEAL)
    asked = json.loads(message.texts["secure"])
    few(asked)
    evaluation = with_told(message, json.dumps(asked)).with_header(evaluate=True)
    assert attack.refusal(0, evaluation).startswith("a sum of 3 is none that hides anybody")


def test_fewer_survivors_than_the_sites_own_policy_wants(tmp_path: Path) -> None:
    attack = Attack(tmp_path, rounds=1)
    careful(attack, 0, N)
    attack.run(before=(0, OPEN_SUM))
    told = json.loads(attack.message(0, WORK).texts["secure"])
    opening = {"roster": told["roster"], "survivors": [0, 1, 2, 3], "lost": [4]}
    message = with_told(attack.message(0, DEAL), json.dumps(opening)).with_header(trip=OPEN_SUM)
    assert attack.refusal(0, message) == "4 have survived, a sum opens for 5 or more"
    reply = attack.sites.ask(1, message)  # a site without such a policy
    assert isinstance(reply, Message) and "shares" in json.loads(reply.texts["secure"])


def test_a_list_without_the_site_itself(attack: Attack) -> None:
    def leave_out(told: Told) -> None:
        del told["roster"]["deals"]["0"]

    assert attack.try_(0, WORK, 0, leave_out) == (
        "client 0 is not among those who are to take part"
    )


def test_a_reply_without_masks(attack: Attack) -> None:
    def strip(told: Told) -> None:
        del told["roster"]

    assert attack.try_(0, WORK, 0, strip) == "a reply without masks is asked for"


def test_nonsense(attack: Attack) -> None:
    for roster in (7, {}, {"terms": {}, "deals": {}}, {"terms": None, "deals": {"x": 1}}):
        message = with_told(attack.message(0, WORK), json.dumps({"roster": roster, "clients": 5}))
        assert "malformed" in attack.refusal(0, message)
    message = with_told(attack.message(0, WORK), "[not json")
    assert attack.refusal(0, message) == "a reply without masks is asked for"


def test_names_of_metrics_without_an_evaluation(attack: Attack) -> None:
    """Which metrics a site has tells something about its data, and a policy that withholds them
    looks at the header: in a greeting of a training round they are not made."""
    asked = attack.message(0, GREET)
    told = {**json.loads(asked.texts["secure"]), "metrics": True}
    asked = with_told(replace(asked, trees=attack.message(0, WORK).trees), json.dumps(told))
    for evaluate, found in ((False, None), (True, ["accuracy"])):
        reply = attack.sites.ask(0, asked.with_header(evaluate=evaluate))
        assert isinstance(reply, Message)
        assert json.loads(reply.texts["secure"]).get("metrics") == found


class PerClass(Toy):
    """A metric that only client 0's data have."""

    telling: ClassVar[tuple[str, ...]] = ("accuracy_class_",)

    def evaluate(self, result: Any, data: Any) -> dict[str, float]:
        extra = {"accuracy_class_2": 0.125} if len(data) == RARE else {}
        return {**super().evaluate(result, data), **extra}


RARE = 7


def test_a_metric_that_tells_something_about_the_data(tmp_path: Path) -> None:
    """Neither its name leaves, nor, where a server asks for it by that name, its value."""
    whole = toy_federation(N)
    held = [whole.held_out_of(i) for i in range(N)]
    held[0] = Tensors(held[0].batch(torch.arange(RARE)))  # type: ignore[union-attr]
    federation = Federation([whole.holdings[i] for i in range(N)], held)
    algorithm = stack(FedAvg(PerClass(), batch=8), SecureSum())
    sites = Sites(algorithm, federation, make_vaults(tmp_path, N))  # type: ignore[arg-type]
    state = algorithm.init().with_header(Header(0, 1, 0, N, N))
    trips = make_trips(algorithm, sites, state, Trips(range(N), evaluate=True), {})
    greeted = [r for _, m, r in sites.sent if m.header.trip == GREET]
    named = {tuple(json.loads(r.texts["secure"])["metrics"]) for r in greeted}  # type: ignore[union-attr]
    assert named == {("accuracy",)}
    memory = ServerMemory(job="asks", metrics=["accuracy", "accuracy_class_2"])
    trips = make_trips(
        algorithm,
        Sites(algorithm, federation, make_vaults(tmp_path / "again", N)),  # type: ignore[arg-type]
        memory.into(state),
        Trips(range(N), evaluate=True),
        {},
    )
    totals = algorithm._opened(trips, trips.last(WORK))[0]  # type: ignore[attr-defined]
    assert totals["count accuracy"] == N and totals["count accuracy_class_2"] == 0


@pytest.mark.parametrize("dropouts", ["skip", "recover"])
def test_a_cohort_that_nobody_is_in(tmp_path: Path, dropouts: str) -> None:
    """Clients share out noise among as many as the header says. With 10^12 there is none."""
    federation = toy_federation(N)
    private = PrivateMean(noise=1.0, clip=0.5, where="clients", delta=1e-2)
    base = FedAvg(GroupToy(), batch=8, weights="uniform")
    algorithm = stack(base, private, SecureSum(dropouts=dropouts)).deployed()  # type: ignore[arg-type]
    sites = Sites(algorithm, federation, make_vaults(tmp_path, N))  # type: ignore[arg-type]

    def inflate(i: int, message: Message) -> Message:
        return message.with_header(cohort=10**12, population=10**12)

    sites.change = inflate
    with pytest.raises(Stalled):
        run(algorithm, sites, 1)
    reasons = {r.reason for _, m, r in sites.sent if m.header.trip == WORK}  # type: ignore[union-attr]
    (why,) = reasons
    assert "1000000000000 are said to be asked, but 5" in why or "two thirds of those who" in why


def noisy_sites(folder: Path, **options: Any) -> tuple[Any, Sites]:
    private = PrivateMean(noise=1.0, clip=0.5, where="clients", **options)
    base = FedAvg(GroupToy(), batch=8, weights="uniform")
    algorithm = stack(base, private, SecureSum("skip")).deployed()
    return algorithm, Sites(algorithm, toy_federation(N), make_vaults(folder, N))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "told",
    [
        {
            "bounds": {"delta/mean/head.bias": -9}
        },  # clipped to 2^-9 with their noise: signs are left
        {"bounds": {"weight delta/mean": 40}},  # rounded to 16,384: so is all noise
        {"clients": 1 << 19},
    ],
    ids=["bound", "unit", "clients"],
)
def test_how_noisy_numbers_are_rounded_is_not_the_servers_choice(
    tmp_path: Path, told: Told
) -> None:
    """A share of noise that is rounded away is not in the sum."""
    algorithm, sites = noisy_sites(tmp_path)

    def change(i: int, message: Message) -> Message:
        if message.header.trip != WORK:
            return message
        return with_told(message, json.dumps({**json.loads(message.texts["secure"]), **told}))

    sites.change = change
    with pytest.raises(Stalled):
        run(algorithm, sites, 1)
    outcomes = [r for _, m, r in sites.sent if m.header.trip == WORK]
    assert all(isinstance(r, Lost) and "no server decides" in r.reason for r in outcomes)


def test_a_clip_so_small_that_rounding_takes_the_noise(tmp_path: Path) -> None:
    """Five clients: numbers are rounded to 2^-28, and 1e-9 of noise would be gone. A clip that
    does not adapt is the recipe's."""
    for adapts in (True, False):
        (tmp_path / str(adapts)).mkdir()
        options = {"quantile": 0.5} if adapts else {}
        algorithm, sites = noisy_sites(tmp_path / str(adapts), **options)
        sites.change = lambda i, m: m.note(clip=1e-9) if m.header.trip == WORK else m
        if not adapts:
            state = run(algorithm, sites, 1)
            before = algorithm.init().trees["model"]
            gap = {n: t - before[n] for n, t in state.trees["model"].items()}
            assert tree.norm(gap) > 0.5
            continue
        with pytest.raises(Stalled):
            run(algorithm, sites, 1)
        outcomes = [r for _, m, r in sites.sent if m.header.trip == WORK]
        assert all(isinstance(r, Lost) and "lost in rounding" in r.reason for r in outcomes)


# -- the same masks twice --------------------------------------------------------------------------


def test_another_model_under_the_same_keys(attack: Attack) -> None:
    """The difference of two masked replies would be the difference of two updates."""
    message = attack.message(1, WORK, 2)
    model = {n: t + 1 if t.is_floating_point() else t for n, t in message.trees["model"].items()}
    why = attack.refusal(2, replace(message, trees={"model": model}, _derived={}))
    assert why.startswith("this site has answered another request with the same key")


def test_the_same_request_has_the_same_answer(attack: Attack) -> None:
    message = attack.message(1, WORK, 2)
    first = next(r for i, m, r in attack.sites.sent if i == 2 and m is message)
    again = attack.sites.ask(2, message)
    assert isinstance(first, Message) and isinstance(again, Message)
    for name, array in first.trees["masked"].items():
        assert torch.equal(array, again.trees["masked"][name])


@pytest.mark.parametrize("dropouts", ["recover", "skip"])
def test_one_client_with_another_model_than_the_others(tmp_path: Path, dropouts: str) -> None:
    """With a model of its own for client 2, the server could tell its part of the sum from the
    others' (Pasquini et al., 2022). Each site does as it is asked, with keys that are in order; but
    the model is part of the key of every mask, so that the sum is noise."""
    attack = Attack(tmp_path, rounds=3, dropouts=dropouts)

    def other_model(i: int, message: Message) -> Message:
        if i != 2 or message.header.trip != WORK:
            return message
        model = {n: torch.zeros_like(t) for n, t in message.trees["model"].items()}
        return replace(message, trees={"model": model}, _derived={})

    attack.sites.change = other_model
    with pytest.raises(Stalled, match=r"(added up|the weights) is impossible"):
        run(attack.algorithm, attack.sites, 3)
    replies = [
        r for _, m, r in attack.sites.sent if m.header.trip == WORK and isinstance(r, Message)
    ]
    assert len(replies) == 3 * N  # they were all given


# -- opening ---------------------------------------------------------------------------------------


def test_somebody_who_survived_and_is_lost(attack: Attack) -> None:
    def overlap(told: Told) -> None:
        told["lost"] = [2]

    assert attack.try_(1, OPEN_SUM, 0, overlap) == (
        "client 2 is to have survived and to be lost: the shares of both would open its reply"
    )


def test_a_second_opening(attack: Attack) -> None:
    def others(told: Told) -> None:
        told["survivors"], told["lost"] = [0, 1, 2, 3], [4]

    why = attack.try_(1, OPEN_SUM, 0, others)
    assert why.startswith("this site has answered another request with the same key")


def test_two_lists_of_survivors_and_a_friend(tmp_path: Path) -> None:
    """Client 0 and others are told that all survived, the rest that client 0 is lost. With client
    4, which gives the server both of its shares, the two secrets of client 0 must not both come
    out, however the honest ones are split."""
    victim, friend, everybody = 0, 4, list(range(N))
    for first in range(N - 1):
        attack = Attack(tmp_path / str(first), rounds=1)
        attack.run(before=(0, OPEN_SUM))
        roster = json.loads(attack.message(0, WORK).texts["secure"])["roster"]
        asked = attack.message(0, DEAL).with_header(trip=OPEN_SUM)
        found = {"own": 1, "key": 1}  # shares: the friend's
        for i in everybody[: first + 1] + everybody[first + 1 : friend]:
            all_ = i <= first
            told = {
                "roster": roster,
                "survivors": everybody if all_ else everybody[1:],
                "lost": [] if all_ else [victim],
            }
            reply = attack.sites.ask(i, with_told(asked, json.dumps(told)))
            if isinstance(reply, Message):
                assert str(victim) in json.loads(reply.texts["secure"])["shares"]
                found["own" if all_ else "key"] += 1
        assert sum(found.values()) == N + 1  # each list was believed
        assert min(found.values()) < roster["terms"]["threshold"]


@pytest.mark.parametrize("clients", range(3, 40))
def test_how_many_friends_a_split_takes(clients: int) -> None:
    t = share_count(clients)
    assert t <= clients
    assert 2 * t - clients > clients / 3  # friends that a server needs
    assert clients - t == (clients - 1) // 3  # losses that are made up for


def test_too_few_survivors(tmp_path: Path) -> None:
    attack = Attack(tmp_path, rounds=1)
    attack.run()

    def few(told: Told) -> None:
        told["survivors"], told["lost"] = [0, 1], [2, 3, 4]

    assert attack.try_(0, OPEN_SUM, 0, few) == "2 have survived, a sum opens for 4 or more"

    def nobody_else(told: Told) -> None:
        told["survivors"], told["lost"] = [0, 1, 2], []

    assert attack.try_(0, OPEN_SUM, 0, nobody_else) == (
        "the lists of survivors and lost are not those who took part"
    )

    def without_itself(told: Told) -> None:
        told["survivors"], told["lost"] = [1, 2, 3, 4], [0]

    assert "this client is said to be lost" in attack.try_(0, OPEN_SUM, 0, without_itself)


def test_survivors_without_the_noise_that_is_promised(tmp_path: Path) -> None:
    """Four of five open a sum, but the noise of five is counted on."""
    private = PrivateMean(noise=1.0, clip=0.5, where="clients", delta=1e-2, least=5)
    base = FedAvg(GroupToy(), batch=8, weights="uniform")
    algorithm = stack(base, private, SecureSum("recover")).deployed()
    sites = Sites(algorithm, toy_federation(N), make_vaults(tmp_path, N))  # type: ignore[arg-type]
    run(algorithm, sites, 1)
    message = next(m for _, m, _ in sites.sent if m.header.trip == OPEN_SUM)
    told = {**json.loads(message.texts["secure"]), "survivors": [0, 1, 2, 3], "lost": [4]}
    outcome = sites.ask(0, with_told(message, json.dumps(told)))
    assert isinstance(outcome, Lost)
    assert "4 have survived, a sum opens for 5 or more" in outcome.reason


def test_opening_what_it_added_nothing_to(tmp_path: Path) -> None:
    attack = Attack(tmp_path, rounds=1)
    attack.run(before=(0, WORK))
    told = {"roster": attack.dealt_roster(), "survivors": [0, 1, 2, 3], "lost": [4]}
    message = with_told(attack.message(0, DEAL), json.dumps(told)).with_header(trip=OPEN_SUM)
    for _ in range(2):  # asking again makes no difference
        assert attack.refusal(0, message) == (
            "a sum is to be opened that this site has added nothing to"
        )


def test_a_job_that_skips_opens_nothing(tmp_path: Path) -> None:
    attack = Attack(tmp_path, rounds=1, dropouts="skip")
    attack.run()

    def open_(told: Told) -> None:
        told["terms"]["threshold"] = 4

    assert attack.try_(0, DEAL, 0, open_) == (
        "masks are to be opened, but dropouts are skipped in this job"
    )


# -- a hostile site --------------------------------------------------------------------------------


def lying(attack: Attack, trip: int, lie: Callable[[Message], Message]) -> None:
    """Client 1 answers this trip otherwise."""
    ask = attack.sites.ask

    def answer(i: int, message: Message, *rest: int) -> Any:
        reply = ask(i, message, *rest)
        tells = i == 1 and message.header.trip == trip and isinstance(reply, Message)
        return lie(reply) if tells else reply

    attack.sites.ask = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("lost", [None, 3])
@pytest.mark.parametrize("share", [b64((12345).to_bytes(66, "big")), "!!", b64(b"x"), 7])
def test_shares_that_were_made_up(tmp_path: Path, share: Any, lost: int | None) -> None:
    """The sum is not opened wrongly: what comes out does not fit what client 0 had signed. Where
    enough others sent theirs it is opened with those, and whoever is off is named; else not."""
    attack = Attack(tmp_path, rounds=1)

    def lie(reply: Message) -> Message:
        told = json.loads(reply.texts["secure"])
        told["shares"]["0"] = share
        return with_told(reply, json.dumps(told))

    lying(attack, OPEN_SUM, lie)
    if lost is None:
        attack.run()
        (seen,) = attack.seen
        assert sorted(seen.heard) == [0, 1, 2, 3, 4]
        named = [(x.sender, x.reason) for x in seen.lost]
        if len(str(share)) > 10:  # what is no share at all did not come
            assert [i for i, _ in named] == [1]
            assert named[0][1].startswith("its share of client 0's secret fits none")
        return
    attack.sites.change = lambda i, m: None if i == lost and m.header.trip == OPEN_SUM else m
    why = r"the sum was not made: .*shares of client 0's secret"
    with pytest.raises(Stalled, match=why):
        run(attack.algorithm, attack.sites, 1)


@pytest.mark.parametrize("trip", [GREET, DEAL, OPEN_SUM])
def test_nonsense_costs_its_sender(tmp_path: Path, trip: int) -> None:
    """A site that answers a trip with nonsense is left out, or counts as one without an answer."""
    attack = Attack(tmp_path, rounds=1)
    lying(attack, trip, lambda reply: with_told(reply, '{"deal": 7, "shares": 3}'))
    attack.run()
    heard = sorted(attack.seen[0].heard)
    assert heard == ([0, 1, 2, 3, 4] if trip == OPEN_SUM else [0, 2, 3, 4])


ODD_TEXTS = {
    "deep": "[" * 50_000,
    "deeper inside": '{"metrics": ' + "[" * 50_000,
    "null": '{"metrics": null, "deal": null, "greeting": null, "shares": null}',
    "number": '{"metrics": 7, "deal": 7, "greeting": 7, "shares": 7}',
    "table": '{"metrics": {"accuracy": 1}, "deal": {}, "greeting": {}, "shares": {}}',
    "mixed": '{"metrics": ["accuracy", null, ["x"], 3], "shares": {"0": null, "x": [1]}}',
    "long": json.dumps({"metrics": ["x" * 10_000, "\u001b[2J"]}),
    "many": json.dumps({"metrics": [f"m{k}" for k in range(50_000)]}),
}


@pytest.mark.parametrize("trip", [GREET, DEAL, OPEN_SUM])
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_a_text_costs_its_sender_and_not_the_run(tmp_path: Path, trip: int, text: str) -> None:
    """Whatever client 1 writes where keys, shares or the names of its metrics are expected: the run
    goes on with the others, and what is measured is what they measure."""
    attack = Attack(tmp_path, rounds=2)
    lying(attack, trip, lambda reply: with_told(reply, ODD_TEXTS[text]))
    run(
        attack.algorithm,
        attack.sites,
        2,
        evaluate_every=1,
        personal=True,
        after_round=lambda _, r: attack.seen.append(r),
    )
    for seen in attack.seen:
        assert {0, 2, 3, 4} <= seen.heard.keys() and not seen.skipped
        assert list(seen.metrics) == ["client_accuracy"]


def test_a_metric_of_one_client_is_not_asked_of_all(tmp_path: Path) -> None:
    """Nor could it be shown: it would be that client's. It could be anything, such as what is
    called the worst of the others."""
    attack = Attack(tmp_path, rounds=1)

    def lie(reply: Message) -> Message:
        told = json.loads(reply.texts["secure"])
        named = {"metrics": [*told["metrics"], "accuracy_worst"]} if "metrics" in told else {}
        return with_told(reply, json.dumps({**told, **named}))

    lying(attack, GREET, lie)
    run(attack.algorithm, attack.sites, 1, evaluate_every=1, personal=True)
    asked = [json.loads(m.texts["secure"]) for _, m, _ in attack.sites.sent if m.header.evaluate]
    assert [told["metrics"] for told in asked if "bounds" in told] == [["accuracy"]] * N


ZERO = b64(bytes(32))  # a point with which everybody's exchange comes to the same


def badly_signed(attack: Attack, told: Told) -> None:
    """Client 0's signature under client 1's keys."""
    for name in ("deal", "greeting"):
        if name in told:
            told[name]["signature"] = attack.vaults[0].sign(b"something")


def unusable(attack: Attack, told: Told) -> None:
    """Signed by client 1, and no key at all."""
    vault = attack.vaults[1]
    if "greeting" in told:
        told["greeting"] = {"box": ZERO, "signature": vault.sign(_greeting(1, attack.job, ZERO))}
    if "deal" in told:
        keys = Deal.read(1, {**told["deal"], "mask": ZERO})
        signature = vault.sign(keys.statement(attack.terms))
        told["deal"] = replace(keys, signature=signature).table()


@pytest.mark.parametrize("dropouts", ["recover", "skip"])
@pytest.mark.parametrize(
    "trips", [(GREET,), (DEAL,), (WORK,), (OPEN_SUM,), (GREET, DEAL, WORK, OPEN_SUM)]
)
@pytest.mark.parametrize("lie", [badly_signed, unusable])
def test_keys_that_nobody_can_use_cost_their_sender(
    tmp_path: Path, dropouts: str, trips: tuple[int, ...], lie: Callable[[Attack, Told], None]
) -> None:
    """Every honest site would decline a sum with them. A server that knows whose key is whose
    leaves their sender out and names it, and goes on with the others, also in an evaluation; where
    a sum is everybody's, it ends with that name.
    """
    attack = Attack(tmp_path, rounds=3, dropouts=dropouts)
    attack.algorithm = attack.algorithm.with_known(attack.vaults[0].peers)  # type: ignore[attr-defined]
    ask, lied = attack.sites.ask, 0

    def answer(i: int, message: Message, *rest: int) -> Any:
        nonlocal lied
        reply = ask(i, message, *rest)
        asked = json.loads(message.texts.get("secure", "{}"))
        if i != 1 or message.header.trip not in trips or not isinstance(reply, Message):
            return reply
        if "secure" not in reply.texts:
            return reply
        attack.job = asked.get("job", "")
        attack.terms = SumTerms.read(asked["terms"]) if "terms" in asked else None
        told = json.loads(reply.texts["secure"])
        lied += "deal" in told or "greeting" in told
        lie(attack, told)
        return with_told(reply, json.dumps(told))

    attack.sites.ask = answer  # type: ignore[method-assign]
    if dropouts == "skip" and DEAL in trips:
        with pytest.raises(Stalled, match="4 of 5 took part; client 1: its keys"):
            run(attack.algorithm, attack.sites, 3)
        return
    run(
        attack.algorithm,
        attack.sites,
        3,
        evaluate_every=1,
        personal=True,
        after_round=lambda _, r: attack.seen.append(r),
    )
    assert len(attack.seen) == 3
    for seen in attack.seen:
        assert {0, 2, 3, 4} <= seen.heard.keys() and not seen.skipped
        assert "client_accuracy" in seen.metrics
        # whoever is left out is named, and it is nobody else
        assert [x.sender for x in seen.lost] == [i for i in (1,) if i not in seen.heard]
        assert all("its keys" in x.reason and x.refused for x in seen.lost)
    if len(trips) > 1:
        assert lied and not any(1 in seen.heard for seen in attack.seen)


def test_a_real_server_has_the_keys_of_its_list(tmp_path: Path) -> None:
    """As it comes with a run: client -> PEM. Nobody bound them: only sites can tell."""
    vaults = make_vaults(tmp_path, 2)
    pem = {str(i): public_pem(key).decode() for i, key in vaults[0].peers.items()}
    setup = _prepare(recipes.read("demo", ["secure=true"]), print)
    for bound, refused in ((pem, True), (None, False)):
        layer = _deployed(setup, _bindings({"bindings": json.dumps(bound)})).algorithm
        assert isinstance(layer, SecureSum)
        fine, other = (greet(vault, 0, "job") for vault in vaults)
        assert layer._known.accept_greeting(0, "job", fine)
        assert layer._known.accept_greeting(0, "job", other) is not refused
        assert not layer._known.accept_greeting(0, "job", {**fine, "box": ZERO})


def test_too_few_are_left_and_who_is_to_blame_is_said(tmp_path: Path) -> None:
    attack = Attack(tmp_path, rounds=3, min_cohort=N)
    attack.algorithm = attack.algorithm.with_known(attack.vaults[0].peers)  # type: ignore[attr-defined]

    def lie(reply: Message) -> Message:
        told = json.loads(reply.texts["secure"])
        badly_signed(attack, told)
        return with_told(reply, json.dumps(told))

    lying(attack, DEAL, lie)
    with pytest.raises(Stalled, match="4 of 5 took part; client 1: its keys"):
        attack.run()


def test_memory_follows_who_was_really_heard(tmp_path: Path) -> None:
    """A reply whose sum was never opened counts for nobody, whatever it said itself."""
    algorithm = stack(FedAvg(Toy(), batch=8), Scaffold(), SecureSum("recover"))
    sites = Sites(algorithm, toy_federation(N), make_vaults(tmp_path, N))  # type: ignore[arg-type]
    sites.change = lambda i, m: None if m.header.trip == OPEN_SUM and i > 1 else m
    seen: list[Round] = []
    with pytest.raises(Stalled, match=r"too few shares of client 0's secret came back"):
        run(algorithm, sites, 3, after_round=lambda _, r: seen.append(r))
    assert [len(r.heard) for r in seen] == [0, 0] and len(seen[0].lost) == N
    for i, worker in enumerate(sites.workers):
        assert worker.memory.load(i).settle(-1) == {}


def test_boxes_without_shares_name_who_sealed_them(tmp_path: Path) -> None:
    """Client 1 seals nonsense for everybody else. The others' secrets come out, its own does not:
    the sum stays shut and says because of whom."""
    attack = Attack(tmp_path, rounds=1)

    def nonsense(vault: SiteVault, client: int, *rest: Any) -> Deal:
        made = deal(vault, client, *rest)
        return replace(made, boxes=dict.fromkeys(made.boxes, b64(b"x" * 148)))

    ask = attack.sites.ask

    def answer(i: int, message: Message, *more: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if i == 1:
                patch.setattr("fedlens.trust.secure_sum.deal", nonsense)
            return ask(i, message, *more)

    attack.sites.ask = answer  # type: ignore[method-assign]
    with pytest.raises(Stalled, match="too few shares of client 1's secret came back"):
        attack.run()


@pytest.mark.parametrize("key", ["not base64!", b64(b"short"), ""])
def test_keys_that_are_none_cost_their_sender(tmp_path: Path, key: str) -> None:
    attack = Attack(tmp_path, rounds=1)

    def lie(reply: Message) -> Message:
        told = json.loads(reply.texts["secure"])
        told["deal"]["mask"] = key
        return with_told(reply, json.dumps(told))

    lying(attack, DEAL, lie)
    attack.run()
    assert sorted(attack.seen[0].heard) == [0, 2, 3, 4]


# -- what a failure tells --------------------------------------------------------------------------


class Overflows(FedAvg):
    """As after a crafted model: Inf, NaN or an endless weight, where the data are such."""

    how: ClassVar[str] = ""

    def client_step(self, message: Message, client: Client) -> Message:
        reply = super().client_step(message, client)
        client.memory["touched"] = {"x": torch.ones(1)}
        if client.id != 2 or message.round != 1:
            return reply
        if self.how == "weight":
            return reply.weigh("delta", math.inf)
        bad = {n: t * math.nan if t.is_floating_point() else t for n, t in delta_of(reply)}
        return reply.put(delta=bad) if self.how == "tree" else reply.note(loss=math.nan)


def delta_of(reply: Message) -> Any:
    return reply.trees["delta"].items()


def test_so_many_break_that_the_others_do_not_hide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2's reply breaks in round 1: what is left of three is the sum of two."""
    monkeypatch.setattr(Overflows, "how", "tree")
    algorithm = stack(Overflows(Toy(), batch=8), SecureSum())
    sites = Sites(algorithm, toy_federation(3), make_vaults(tmp_path, 3))  # type: ignore[arg-type]
    seen: list[Round] = []
    run(algorithm, sites, 3, after_round=lambda _, r: seen.append(r))
    assert [len(r.heard) for r in seen] == [3, 0, 3]
    assert "1 of 3 replies held NaN or Inf: the others are too few" in seen[1].skipped


@pytest.mark.parametrize("how", ["tree", "weight", "loss"])
def test_a_reply_that_breaks_does_not_show_whose_it_is(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sees that one of five was broken: the mean is that of the other four, everybody
    was heard, and the one has learned nothing."""
    monkeypatch.setattr(Overflows, "how", how)
    algorithm = stack(Overflows(Toy(), batch=8), SecureSum())
    sites = Sites(algorithm, toy_federation(N), make_vaults(tmp_path, N))  # type: ignore[arg-type]
    seen: list[Round] = []
    state = run(algorithm, sites, 2, after_round=lambda _, r: seen.append(r))
    assert [len(r.heard) for r in seen] == [N, N] and not seen[1].lost
    assert state.scalars["broken"] == (how != "loss")
    assert seen[1].loss is not None and math.isfinite(seen[1].loss)
    kept = sites.workers[2].memory.load(2)
    assert kept.draft.keys() == (set() if how != "loss" else {"touched"})
    if how == "loss":
        return
    plain = stack(FedAvg(Toy(), batch=8))
    before, work = seen[0].state, next(m for _, m, _ in sites.sent if m.round == 1)
    worker = Worker(plain, toy_federation(N), Memory())
    message = plain.broadcast(before).with_header(work.header)
    worker.begin(message, sums=False)
    replies = list(worker.work([Job(i, i, -1) for i in (0, 1, 3, 4)]))
    assert all(isinstance(r, Message) for r in replies)
    for name, t in state.trees["model"].items():
        if t.is_floating_point():
            weights = [r.weights["delta"]["mean"] for r in replies]  # type: ignore[union-attr]
            deltas = [r.trees["delta"][name].double() for r in replies]  # type: ignore[union-attr]
            mean = sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
            assert torch.allclose(
                t.double(), before.trees["model"][name].double() + mean, atol=1e-6
            )
