"""A policy refuses what its owner did not allow: before work, at a request, before bytes leave."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Toy

import fedlens
from fedlens import Layer, stack
from fedlens.algorithms import FedAvg
from fedlens.cli.main import invoke
from fedlens.config import recipe as recipes
from fedlens.config.recipe import ConfigError
from fedlens.core import imports
from fedlens.core.algorithm import SiteSettings
from fedlens.core.message import Header, Message
from fedlens.core.privacy import Mechanism, Unit
from fedlens.engines.flower.site import answer_request
from fedlens.layers import FedGen, PFedMe
from fedlens.sites.site import make_site, site_settings
from fedlens.trust import SecureSum
from fedlens.trust.accounting import as_charge, epsilon_of
from fedlens.trust.departures import Departures
from fedlens.trust.policy import (
    Policy,
    Terms,
    check_modules,
    named_modules,
    policy_text,
    read_policy,
    strict_policy,
    terms_of,
)
from fedlens.trust.signing import make_signing_key

TERMS = Terms(
    name="study",
    digest="0123456789abcdef" * 4,
    stack=("FedAvg", "SecureSum"),
    protection=("SecureSum",),
    trees={"delta": 400},
    scalars=("loss", "examples"),
    reply_bytes=1000,
    rounds=10,
    cohort=3,
    epochs=2,
)


def entries(policy: Policy, terms: Terms = TERMS) -> list[str]:
    return [objection.entry for objection in policy.objections(terms)]


def test_an_empty_policy_allows_everything_but_code() -> None:
    assert entries(Policy()) == []
    code = dataclasses.replace(TERMS, modules=("theirs.layers",))
    assert entries(Policy(), code) == ["modules"]
    for listed in ("theirs", "theirs.layers", "theirs.layers:Own"):
        assert entries(Policy(modules=(listed,)), code) == []
    assert entries(Policy(modules=("their",)), code) == ["modules"]


def test_the_strict_policy_allows_its_plan_and_no_more() -> None:
    """One thing at a time is changed, and the entry that says no is the one meant for it. A reply
    of 1000 bytes with 4096 of slack and 1024 for the keys of each of three is rounded up to 8200,
    ten of them to 82000."""
    strict = strict_policy(TERMS)
    assert entries(strict) == []
    assert (strict.max_bytes_round, strict.max_bytes_job) == (8200, 82000)
    changes: dict[str, dict[str, Any]] = {
        "recipes": {"digest": "f" * 64},
        "trees": {"trees": {"delta": 400, "control": 400}},
        "scalars": {"scalars": ("loss", "examples", "age")},
        "max_bytes_round": {"reply_bytes": 8201, "rounds": 1},
        "max_bytes_job": {"rounds": 83},
        "max_epochs": {"epochs": 3},
        "generators": {"generates": True},
        "modules": {"modules": ("os",)},
        "require": {"stack": ("FedAvg",)},
        "min_cohort": {"cohort": 2},
    }
    for entry, change in changes.items():
        assert entries(strict, dataclasses.replace(TERMS, **change)) == [entry], entry


def test_recipes_by_name_or_by_hash() -> None:
    assert entries(Policy(recipes=("study",))) == []
    assert entries(Policy(recipes=(TERMS.digest[:12],))) == []
    assert entries(Policy(recipes=(TERMS.digest[:11],))) == ["recipes"]  # too short to name one
    assert entries(Policy(recipes=())) == ["recipes"]
    # a hash is never a name, whoever gave it, and a name by a server is none
    for name in ("f" * 64, "f" * 12):
        called = dataclasses.replace(TERMS, name=name)
        assert entries(Policy(recipes=(name,)), called) == ["recipes"]
    theirs = dataclasses.replace(TERMS, own_name=False)
    assert entries(Policy(recipes=("study",)), theirs) == ["recipes"]
    assert entries(Policy(recipes=("study", TERMS.digest)), theirs) == []


def test_a_server_cannot_call_its_recipe_by_an_allowed_hash_or_name(tmp_path: Path) -> None:
    """The site trusts its server within its policy, which lists one recipe. Another one is refused,
    whatever the server calls it; the listed one is not. A recipe of the operator's own goes by its
    name."""
    imports.set_rules(imports.Rules())
    agreed = RECIPE.replace("clients = 3", "clients = 3\nsecure = false")
    other = agreed.replace("rounds = 2", "rounds = 99999")
    listed = recipes.from_tables(tomllib.loads(agreed), "study").digest()
    (tmp_path / "study.toml").write_text(agreed)

    def ask(text: str, name: str, allowed: str, own: str = "") -> Any:
        policy = tmp_path / f"{allowed}.toml.policy"
        policy.write_text(f"recipes = ['{allowed}']")
        node = {"client": 0, "folder": str(tmp_path / "site"), "policy": str(policy)}
        node |= {"recipe": own} if own else {"trust-server": True}
        digest = recipes.from_tables(tomllib.loads(text), name).digest()
        request = {"version": fedlens.__version__, "recipe": digest, "job": "j", "name": name}
        header = {"kind": "query", "request": {**request, "text": text}}
        return answer_request(header, [], node, make_site, lambda _: None)[0].get("detail")

    assert ask(agreed, "study", listed) is None
    assert ask(agreed, "whatever", listed[:12]) is None
    for name, allowed in ((listed, listed), (listed[:12], listed[:12]), ("study", "study")):
        assert ask(other, name, allowed) == "recipes"
    assert ask(agreed, "study", "study", str(tmp_path / "study.toml")) is None


def test_work_in_steps_and_in_epochs() -> None:
    steps = dataclasses.replace(TERMS, epochs=0, steps=50)
    assert entries(Policy(max_epochs=5), steps) == ["max_epochs"]
    assert entries(Policy(max_epochs=5, max_steps=50), steps) == []
    assert entries(Policy(max_steps=49), steps) == ["max_steps"]


@pytest.mark.parametrize(
    "layer", [PFedMe(steps=5), FedGen(noise=4, hidden=8, steps=4)], ids=lambda x: type(x).__name__
)
def test_steps_of_a_layer_are_no_local_work(layer: Layer) -> None:
    """PFedMe's K and the server's training of FedGen's generator: the client still makes a thousand
    passes over its data."""
    config = recipes.read("demo")
    terms = terms_of(config, stack(FedAvg(Toy(), batch=8, epochs=1000), layer))
    assert (terms.epochs, terms.steps) == (1000, 0)
    assert entries(Policy(max_epochs=5, max_steps=50), terms) == ["max_epochs"]
    assert entries(Policy(max_epochs=1000), terms) == []
    terms = terms_of(config, stack(FedAvg(Toy(), batch=8, epochs=7, steps=60), layer))
    assert (terms.epochs, terms.steps) == (0, 60)


def test_epsilon_must_be_promised() -> None:
    assert entries(Policy(max_epsilon=8)) == ["max_epsilon"]
    for promised, found in ((8.0, []), (8.5, ["max_epsilon"])):
        terms = dataclasses.replace(TERMS, epsilon=promised)
        assert entries(Policy(max_epsilon=8), terms) == found


def test_requests() -> None:
    policy = Policy(min_cohort=3, evaluation="withhold")
    few, enough = Header(cohort=2), Header(cohort=3)
    assert getattr(policy.refuses(few), "entry", None) == "min_cohort"
    assert policy.refuses(enough) is None
    asked = dataclasses.replace(enough, evaluate=True)
    assert getattr(policy.refuses(asked), "entry", None) == "evaluation"
    assert Policy().refuses(asked) is None
    for trip in (1, 7):  # whatever else the server calls it
        assert policy.refuses(dataclasses.replace(few, trip=trip)) is not None


def test_metrics_have_no_noise() -> None:
    """Where an epsilon is asked for, no metric leaves, whatever `evaluation` says: it is exact, and
    could be asked for again and again. The strict policy of such a recipe says so itself."""
    asked = Header(cohort=0, population=9, evaluate=True)
    for trip in (0, 1, 2):
        why = Policy(max_epsilon=8.0).refuses(dataclasses.replace(asked, trip=trip))
        assert getattr(why, "entry", None) == "max_epsilon"
    assert Policy(max_epsilon=8.0).refuses(Header(cohort=3)) is None
    noisy = dataclasses.replace(TERMS, epsilon=8.0, delta=1e-5, evaluates=True)
    assert strict_policy(noisy).evaluation == "withhold"
    assert strict_policy(dataclasses.replace(TERMS, evaluates=True)).evaluation == "send"


@pytest.mark.parametrize("first, second", [("example", "client"), ("client", "example")])
def test_what_was_spent_counts_in_any_order(first: Unit, second: Unit) -> None:
    """A limit between the cost of one reply and of two refuses the second, of whichever unit: what
    hides a whole client hides its examples, and what hid examples was spent on the same ones."""
    pytest.importorskip("dp_accounting")
    costs = {u: Mechanism(u, 1.0, 1.0, "none", 10, 1e-5, seeded=False) for u in (first, second)}
    one, two = (epsilon_of([(costs[first], n)], 1e-5) for n in (1, 2))
    policy = Policy(max_epsilon=(one + two) / 2)
    assert policy.overspends(costs[second], Departures(), True) is None
    so_far = Departures(charges={json.dumps(as_charge(costs[first]), sort_keys=True): 1})
    why = policy.overspends(costs[second], so_far, True)
    assert why is not None and f"epsilon would be {two:.4g}" in str(why)


def test_all_are_asked_in_an_evaluation() -> None:
    policy = Policy(min_cohort=3)
    for population, found in ((2, "min_cohort"), (3, None)):
        asked = Header(cohort=0, population=population, evaluate=True)
        assert getattr(policy.refuses(asked), "entry", None) == found


def test_a_site_under_masks_counts_who_takes_part_by_its_policy(tmp_path: Path) -> None:
    """The layer that checks the others' keys has the policy's number, where that is the larger."""
    for i in range(3):
        make_signing_key(tmp_path / f"site-{i}")
    node = {"key": tmp_path / "site-0", "peers": tmp_path, "folder": tmp_path / "site"}
    node["policy"] = tmp_path / "policy.toml"
    built = stack(FedAvg(Toy(), batch=8), SecureSum())
    for least, found in ((1, 3), (10, 10)):
        node["policy"].write_text(f"min_cohort = {least}")
        layer = built.at_site(site_settings(built, node, 0, 3))
        assert isinstance(layer, SecureSum) and layer.min_cohort == found


def test_the_strict_policy_leaves_room_for_dropouts() -> None:
    """Ten are asked; a sum of those who are left is opened by more than half of them."""
    assert strict_policy(dataclasses.replace(TERMS, cohort=10)).min_cohort == 6
    assert strict_policy(dataclasses.replace(TERMS, cohort=4)).min_cohort == 3
    assert strict_policy(dataclasses.replace(TERMS, cohort=10, protection=())).min_cohort == 10


def left(*sizes: tuple[str, int, int]) -> Departures:
    so_far = Departures()
    for recipe, round, size in sizes:
        so_far.rounds[recipe, round] = size
    return so_far


def test_bytes_before_they_leave() -> None:
    """100 bytes a round and 250 in all: 60 + 40 fit into round 1 and 60 + 41 do not; 150 + 100 fit
    into the whole and 150 + 101 do not, whatever was sent for another recipe."""
    policy = Policy(max_bytes_round=100, max_bytes_job=250, trees=("delta",), scalars=("loss",))
    reply = Message({"delta": {"w": torch.zeros(2)}}, {"loss": 1.0}, header=Header(round=1))

    def why(message: Message, size: int, so_far: Departures, kind: str = "reply") -> str | None:
        found = policy.withholds(kind, message, size, "recipe", so_far)
        return found.entry if found else None

    assert why(reply, 40, left(("recipe", 1, 60), ("other", 1, 900))) is None
    assert why(reply, 41, left(("recipe", 1, 60))) == "max_bytes_round"
    assert why(reply, 100, left(("recipe", 0, 150))) is None
    assert why(reply, 101, left(("recipe", 0, 150))) == "max_bytes_round"
    assert why(reply, 100, left(("recipe", 0, 151))) == "max_bytes_job"
    for kind in ("reply", "protocol"):
        assert why(reply.put(images={}), 1, left(), kind) == "trees"
    assert why(reply.note(age=71.0), 1, left()) == "scalars"
    assert why(Message(scalars={"accuracy": 0.5}), 1, left(), "evaluation") is None


def test_what_a_recipe_asks(tmp_path: Path) -> None:
    """The demo's model: 10 arrays with 21,346 float32 (456, 2,416, 7,800, 10,164 and 510 by layer),
    85,384 bytes. The bytes of a reply are those of a real one, up to the digits of its numbers."""
    config = recipes.read("demo", ["personal=true"])
    terms = terms_of(config, config.build_algorithm(config.build_task()))
    assert (terms.name, terms.stack, terms.epochs, terms.steps) == ("demo", ("FedAvg",), 2, 0)
    assert terms.trees == {"delta": 4 * 21_346} and terms.evaluates and not terms.generates
    assert terms.scalars == ("loss", "examples")
    assert 85_384 < terms.reply_bytes < 87_500
    assert terms.digest == config.digest()


def test_a_stack_for_personal_models_evaluates_them() -> None:
    config = recipes.read("demo", ["personal=false"], "Ditto")
    assert terms_of(config, config.build_algorithm(config.build_task())).evaluates


def test_the_hash_ignores_where_data_lies_and_what_is_written_down() -> None:
    plain = recipes.read("demo").digest()
    assert recipes.read("demo", ["ledger=true", "data.alpha=7.5"]).digest() == plain
    assert recipes.read("demo", ["lr=0.0123"]).digest() != plain


def test_who_generates() -> None:
    config = recipes.read("fbl")
    algorithm = config.build_algorithm(config.build_task())
    assert terms_of(config, algorithm).generates
    assert not terms_of(config, algorithm.at_site(SiteSettings({"generate": "no"}))).generates


def test_modules_are_named_without_importing_them(tmp_path: Path) -> None:
    tables = {
        "about": "see thesis:Chapter",
        "task": {"name": "a.b:C", "path": "C:\\data", "url": "http://x"},
        "algorithm": [{"name": "FedAvg", "inner": {"name": "d:E"}}, {"name": "own:Layer.Kind"}],
    }
    assert named_modules(tables) == ("a.b", "d", "own")
    check_modules(Policy(modules=("a", "d", "own")), tables)
    with pytest.raises(ConfigError, match="imports d"):
        check_modules(Policy(modules=("a",)), tables)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trees = [", "policy.toml is not TOML"),
        ("tree = ['delta']", "policy.toml has an unknown entry 'tree': did you mean trees?"),
        ("min_cohort = 0", "policy.toml: min_cohort must be a whole number of at least 1"),
        ("min_cohort = true", "policy.toml: min_cohort must be"),
        ("trees = 'delta'", "policy.toml: trees must be"),
        ("max_epsilon = nan", "policy.toml: max_epsilon must be"),
        ("evaluation = 'maybe'", "policy.toml: evaluation must be one of send, withhold"),
        ("[limits]\nmin_cohort = 3", "policy.toml has an unknown entry 'limits'"),
    ],
)
def test_a_bad_policy_is_refused_by_file_and_entry(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError) as e:
        read_policy(tmp_path / "policy.toml")
    assert words in str(e.value)


def test_a_policy_in_python_has_the_same_limits() -> None:
    with pytest.raises(ValueError, match="min_cohort"):
        Policy(min_cohort=0)


def test_a_policy_comes_back_from_its_file(tmp_path: Path) -> None:
    for policy in (Policy(), strict_policy(TERMS), Policy(max_epsilon=1.5, max_seconds=9.5)):
        (tmp_path / "policy.toml").write_text(policy_text(policy, "about"))
        assert read_policy(tmp_path / "policy.toml") == policy


RECIPE = """
[task]
name = "Classification"
classes = 6
size = 16
[data]
name = "Synthetic"
classes = 6
size = 16
images = 60
test_images = 12
[federation]
clients = 3
rounds = 2
[[algorithm]]
name = "FedAvg"
"""


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(RECIPE)
    assert invoke(["policy", "init", "study.toml"]) == 0
    said = capsys.readouterr().out
    assert "2 rounds among 3 clients each, 1 epoch" in said
    assert "SecureSum: the server can read sums, no single reply" in said  # three sites: it is on
    assert 'require = ["SecureSum"]' in Path("policy.toml").read_text()
    assert invoke(["policy", "check", "study.toml", "secure=false"]) == 1
    assert "its stack has no SecureSum (require in policy.toml)" in capsys.readouterr().out
    assert invoke(["policy", "check", "study.toml"]) == 0
    assert "yes: policy.toml allows it" in capsys.readouterr().out
    assert invoke(["policy", "check", "study.toml", "epochs=3"]) == 1
    said = capsys.readouterr().out
    assert "3 epochs a round are more than 1 (max_epochs in policy.toml)" in said
    assert invoke(["policy", "init", "study.toml"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert invoke(["policy", "check", "study.toml", "--policy", "none.toml"]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_code_that_is_not_listed_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_layers.py").write_text("open('marker', 'w').close()\n")
    Path("study.toml").write_text(RECIPE + '[[algorithm]]\nname = "evil_layers:Thief"\n')
    Path("policy.toml").write_text("min_cohort = 2\n")
    assert invoke(["policy", "check", "study.toml"]) == 2
    assert "imports evil_layers, which is not listed" in capsys.readouterr().err
    assert not Path("marker").exists() and "evil_layers" not in sys.modules


BALANCE = """
[[algorithm]]
name = 'Balance'
[algorithm.generator]
name = 'Gaussians'
root = 'public'
"""
HOSTILE = {
    "recipes": ("lr = 0.5", "recipes = ['{digest}']"),
    "trees": ("[[algorithm]]\nname = 'Scaffold'", "trees = ['delta']"),
    "scalars": ("", "scalars = ['examples']"),
    "max_bytes_round": ("", "max_bytes_round = 1000"),
    "max_bytes_job": ("[federation]\nrounds = 900", "max_bytes_job = 100000000"),
    "max_epochs": ("epochs = 50", "max_epochs = 5"),
    "max_steps": ("steps = 5000", "max_epochs = 5\nmax_steps = 100"),
    "generators": (BALANCE, "generators = false"),
    "modules": ("[[algorithm]]\nname = 'antigravity:Layer'", "modules = ['ours']"),
    "require": ("", "require = ['SecureSum']"),
    "min_cohort": ("[federation]\ncohort = 2", "min_cohort = 3"),
    "max_epsilon": ("", "max_epsilon = 8.0"),
}


@pytest.mark.parametrize("entry", HOSTILE)
def test_a_site_that_trusts_its_server_still_keeps_to_its_policy(
    tmp_path: Path, entry: str
) -> None:
    """A server sends a recipe of its own to a site that does whatever it is told, within its
    policy: one that asks for more does not even get a greeting, and hears the entry and no more.
    With the recipe as it was, or without the policy, it gets one."""
    imports.set_rules(imports.Rules())
    change, text = HOSTILE[entry]
    base = RECIPE.replace("clients = 3", "clients = 3\nsecure = false")
    hostile = tmp_path / "hostile.toml"
    hostile.write_text(changed(base, change))
    digest = recipes.from_tables(tomllib.loads(base), "study").digest()
    policy = tmp_path / "policy.toml"
    policy.write_text(text.format(digest=digest))
    said: list[str] = []

    def ask(recipe: str, policy: Path | None) -> Any:
        node = {"client": 0, "folder": str(tmp_path / "site"), "trust-server": True}
        node["policy"] = str(policy) if policy else ""
        digest = "?"
        if "antigravity" not in recipe:
            digest = recipes.from_tables(tomllib.loads(recipe), "study").digest()
        request = {"version": fedlens.__version__, "recipe": digest, "job": "j", "name": "study"}
        header = {"kind": "query", "request": {**request, "text": recipe}}
        return answer_request(header, [], node, make_site, said.append)[0]

    asked = ask(hostile.read_text(), policy)
    assert (asked["lost"], asked["detail"]) == ("policy", entry), said
    assert "antigravity" not in sys.modules
    if change:
        assert ask(base, policy)["examples"] > 0, said
    if entry not in ("modules", "generators"):  # no code without a policy, no weights to generate
        assert ask(hostile.read_text(), None)["examples"] > 0, said


def changed(recipe: str, change: str) -> str:
    """More of the last table, another layer, or another value under [federation]."""
    header, _, line = change.partition("\n")
    if header != "[federation]":
        return recipe + change
    key = line.split(" = ")[0]
    kept = "".join(x for x in recipe.splitlines(True) if not x.startswith(f"{key} = "))
    return kept.replace("[federation]\n", f"[federation]\n{line}\n")
