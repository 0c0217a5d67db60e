"""Recipes and overrides: what is accepted, what it becomes, and the sentence for what is not."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from toy_job import RECIPE, Slow, ToySource, write_recipe

from fedlens import StackError
from fedlens.algorithms.fedavg import FedAvg
from fedlens.algorithms.named import NAMED, named
from fedlens.config import convert as values
from fedlens.config import recipe as config
from fedlens.config.parts import exported_names, find_class, parameters
from fedlens.config.recipe import Config, ConfigError, Settings
from fedlens.layers import FedProx, Scaffold

Read = Callable[..., Config]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    path = write_recipe(tmp_path)
    return lambda *overrides, algorithm=None: config.read(path, list(overrides), algorithm)


def sentence(read: Read, *overrides: str, algorithm: str | None = None) -> str:
    with pytest.raises(ConfigError) as e:
        read(*overrides, algorithm=algorithm)
    text = str(e.value)
    assert "\n" not in text
    return text


def test_a_recipe_becomes_constructor_calls(read: Read) -> None:
    made = read()
    assert made.settings == Settings(clients=6, rounds=4, workers=0)
    task = made.build_task()
    assert isinstance(task, Slow) and task.level == 3
    stack = made.build_algorithm(task)
    fedavg, scaffold = stack.parts()
    assert isinstance(fedavg, FedAvg) and isinstance(scaffold, Scaffold)
    assert (fedavg.lr, fedavg.batch, fedavg.task) == (0.1, 8, task)
    assert isinstance(made.build_source(), ToySource)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("federation.rounds=6", lambda c: c.settings.rounds, 6),
        ("rounds=6", lambda c: c.settings.rounds, 6),
        ("cohort=3", lambda c: c.settings.cohort, 3),
        ("algorithm.FedAvg.lr=0.5", lambda c: c.algorithm[0].given["lr"], 0.5),
        ("fedavg.lr=1", lambda c: c.algorithm[0].given["lr"], 1.0),
        ("algorithm.lr=1e-3", lambda c: c.algorithm[0].given["lr"], 0.001),
        ("lr=.5", lambda c: c.algorithm[0].given["lr"], 0.5),
        ("betas=[0.5, 0.9]", lambda c: c.algorithm[0].given["betas"], (0.5, 0.9)),
        ("steps=3", lambda c: c.algorithm[0].given["steps"], 3),
        ("steps=none", lambda c: c.algorithm[0].given["steps"], None),
        ("clip=2", lambda c: c.algorithm[0].given["clip"], 2.0),
        ("optimizer=adamw", lambda c: c.algorithm[0].given["optimizer"], "adamw"),
        ("init_from=12", lambda c: c.algorithm[0].given["init_from"], "12"),
        (
            "init_from=a=b.safetensors",
            lambda c: c.algorithm[0].given["init_from"],
            "a=b.safetensors",
        ),
        ("mixed_precision=true", lambda c: c.algorithm[0].given["mixed_precision"], True),
        ("freeze=head.*", lambda c: c.algorithm[0].given["freeze"], ("head.*",)),
        ("option=II", lambda c: c.algorithm[1].given["option"], "II"),
        ("task.pause=0", lambda c: c.task.given["pause"], 0.0),
    ],
)
def test_overrides(read: Read, override: str, get: Callable[[Config], Any], value: Any) -> None:
    found = get(read(override))
    assert found == value and type(found) is type(value)


def test_a_bare_seed_is_the_federations_and_the_model_follows_it(read: Read) -> None:
    made = read("seed=7")
    fedavg = next(iter(made.build_algorithm(made.build_task()).parts()))
    assert made.settings.seed == 7 and isinstance(fedavg, FedAvg) and fedavg.seed == 7
    kept = read("seed=7", "FedAvg.seed=1")
    fedavg = next(iter(kept.build_algorithm(kept.build_task()).parts()))
    assert isinstance(fedavg, FedAvg) and fedavg.seed == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("roundz=6", "did you mean rounds?"),
        ("root=photos", "has no root: set data.name to one that has it (Cifar10, "),
        ("federation.round=6", "did you mean federation.rounds?"),
        ("algorithm.FedAvg.lrr=1", "did you mean algorithm.FedAvg.lr?"),
        ("algorithm.FedProx.mu=1", "FedProx is not in the stack (FedAvg, Scaffold)"),
        ("FedPorx.mu=1", "FedPorx is not in the stack (FedAvg, Scaffold): did you mean FedProx?"),
        ("fedprox.mu=1", "fedprox is not in the stack (FedAvg, Scaffold)"),
        (
            "algorithm.Scafold.lr=1",
            "Scafold is not in the stack (FedAvg, Scaffold): did you mean Scaffold?",
        ),
        (
            "federaton.rounds=1",
            "nothing here is called 'federaton.rounds': did you mean federation.rounds?",
        ),
        ("rounds=six", 'federation.rounds must be a whole number of at least 0, not "six"'),
        ("rounds=2.5", "federation.rounds must be a whole number of at least 0, not 2.5"),
        ("rounds=true", "federation.rounds must be a whole number of at least 0, not true"),
        ("lr=fast", 'algorithm.FedAvg.lr must be a number above 0, not "fast"'),
        ("personal=1", "federation.personal must be true or false, not 1"),
        ("optimizer=sdg", 'must be one of sgd, adam, adamw, not "sdg": did you mean sgd?'),
        (
            "betas=[0.9]",
            (
                "must be a list of 2 (a number of at least 0 and below 1, a number of at least 0"
                " and below 1), not [0.9]"
            ),
        ),
        ("clip=tight", "must be a number above 0 or none"),
        ("clients=0", "federation.clients must be a whole number of at least 1, not 0"),
        ("rounds=-1", "federation.rounds must be a whole number of at least 0, not -1"),
        ("cohort=0", "federation.cohort must be a whole number of at least 1 or none, not 0"),
        ("cohort=7", "federation.cohort is 7, but there are only 6 clients"),
        (
            "workers=-1",
            "federation.workers must be a whole number of at least 0 and at most 1024 or none, not"
            " -1",
        ),
        ("threads=100000", "federation.threads must be a whole number of at least 1 and at most"),
        ("timeout=0", "federation.timeout must be a number above 0 or none, not 0"),
        ("rounds", "is not an override: write key=value"),
        ("=3", "is not an override"),
        ("data.name=ToySorce", "there is no data source 'ToySorce'"),
        ("data.name=nowhere:Source", "cannot be loaded"),
        ("data.name=toy_job:Slow", "is not a Source"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    read: Read, override: str, words: str
) -> None:
    assert words in sentence(read, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=-1", "algorithm.FedAvg.lr must be a number above 0, not -1"),
        ("lr=0", "above 0, not 0"),
        ("lr=nan", "above 0, not nan"),
        ("lr=inf", "above 0, not inf"),
        ("lr=1e999", "above 0, not inf"),
        ("betas=[0.9, nan]", "not [0.9, nan]"),
        ("momentum=2", "of at least 0 and below 1, not 2"),
        ("weight_decay=-1", "of at least 0, not -1"),
        ("batch=0", "algorithm.FedAvg.batch must be a whole number of at least 1, not 0"),
        ("batch=-5", "at least 1, not -5"),
        ("epochs=0", "at least 1, not 0"),
        ("steps=0", "a whole number of at least 1 or none, not 0"),
        ("step_every=0", "at least 1, not 0"),
        ("clip=-1", "above 0 or none, not -1"),
        ("server_lr=-1", "above 0, not -1"),
        ("timeout=nan", "not nan"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_meant_are_refused(read: Read, override: str, words: str) -> None:
    assert words in sentence(read, override)


@pytest.mark.parametrize(
    ("layer", "override", "words"),
    [
        ("FedProx", "mu=-5", "algorithm.FedProx.mu must be a number of at least 0, not -5"),
        ("MovingMean", "beta=-1", "at least 0, not -1"),
        ("LossAware", "tau=nan", "not nan"),
        ("LossAware", "tau=1", "at least 0 and below 1, not 1"),
        ("MixedWeights", "alpha=1.5", "at least 0 and at most 1, not 1.5"),
        ("Moon", "tau=0", "above 0, not 0"),
        ("FedAdam", "beta_2=1", "below 1, not 1"),
    ],
)
def test_numbers_of_layers_too(read: Read, layer: str, override: str, words: str) -> None:
    assert words in sentence(read, override, algorithm=layer)


def test_every_default_is_within_its_own_limits() -> None:
    for kind in ("task", "data", "algorithm"):
        for name in exported_names(kind):
            for p in parameters(find_class(kind, name, kind, object)).values():
                if isinstance(p.default, (int, float, tuple)):
                    found = values.convert(p.default, p.hint, f"{name}.{p.name}")
                    same = list(found) == list(p.default) if isinstance(found, list) else None
                    assert found == p.default or same, f"{name}.{p.name}"


def test_a_name_that_fits_two_places_is_refused_with_both(tmp_path: Path) -> None:
    text = RECIPE + '[[algorithm]]\nname = "MixedWeights"\n'
    text = text.replace('name = "toy_job:ToySource"', f'name = "{__name__}:WithAlpha"')
    path = write_recipe(tmp_path, text)
    with pytest.raises(
        ConfigError,
        match=r"alpha could mean data.alpha or algorithm.MixedWeights.alpha: write one of these",
    ):
        config.read(path, ["alpha=0.1"])
    assert config.read(path, ["data.alpha=0.1"]).data.given == {"alpha": 0.1}


@dataclass
class WithAlpha(ToySource):
    alpha: float = 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[task", "is not valid TOML"),
        (RECIPE.replace("[data]", "[dada]"), "unknown table 'dada': did you mean data?"),
        (
            RECIPE.replace("lr = 0.1", "learning_rate = 0.1"),
            "algorithm.FedAvg has no 'learning_rate'",
        ),
        (
            RECIPE.replace("lr = 0.1", 'lr = "0.1"'),
            'algorithm.FedAvg.lr must be a number above 0, not "0.1"',
        ),
        (
            RECIPE.replace('"Scaffold"', '"Scafold"'),
            "there is no algorithm or layer 'Scafold': did you mean Scaffold?",
        ),
        (
            RECIPE.replace("clients = 6", "client = 6"),
            "federation has no 'client': did you mean federation.clients?",
        ),
        (RECIPE.replace('name = "FedAvg"', ""), "[algorithm] needs a name"),
        (RECIPE.split("[[algorithm]]")[0], "needs at least one [[algorithm]] table"),
        (RECIPE.replace("[task]", "[federation.x]"), "has no [task] table"),
    ],
)
def test_broken_recipes(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.read(write_recipe(tmp_path, text))
    assert words in str(e.value)


def test_unknown_recipes_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe 'dem': did you mean demo\?"):
        config.read("dem")
    with pytest.raises(ConfigError, match=r"there is no recipe file no/such\.toml"):
        config.read("no/such.toml")


def test_the_resolved_config_reads_back_as_itself(read: Read, tmp_path: Path) -> None:
    made = read("steps=3", "task.pause=0.5", 'init_from=weird "name" \\ ä.safetensors')
    text = made.to_toml()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(text, encoding="utf-8")
    again = config.read(tmp_path / "run")
    assert again.to_toml() == text
    assert made.difference(tomllib.loads(text)) is None
    assert again.algorithm[0].given["init_from"] == 'weird "name" \\ ä.safetensors'
    changed = read("steps=4", "task.pause=0.5", 'init_from=weird "name" \\ ä.safetensors')
    assert changed.difference(tomllib.loads(text)) == "algorithm.FedAvg.steps was 3, now it is 4"


def test_a_run_from_before_a_key_existed_is_the_run_with_its_default(read: Read) -> None:
    before = read().tables()
    assert before["algorithm"][0].pop("channels_last") is False
    assert read().difference(before) is None
    assert (
        read("channels_last=true").difference(before)
        == "algorithm.FedAvg.channels_last was false, now it is true"
    )
    before = read().tables()
    before["algorithm"][0]["gone"] = 1  # a key that exists no more meant something then
    assert read().difference(before) == "algorithm.FedAvg.gone was 1, now it is not set"


def test_another_algorithm_takes_over_the_keys_of_the_same_name(read: Read) -> None:
    """The base keeps lr and batch; Scaffold's keys go with it; overrides come last."""
    made = read("FedProx.mu=0.3", algorithm="fedprox")
    stack = list(made.build_algorithm(made.build_task()).parts())
    assert isinstance(stack[0], FedAvg) and (stack[0].lr, stack[0].batch) == (0.1, 8)
    assert isinstance(stack[1], FedProx) and stack[1].mu == 0.3 and len(stack) == 2


def test_what_a_name_stands_for_is_not_carried_over(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that says greedy = false, run as the ablation that is greedy by name; its tau
    carries over.
    """
    monkeypatch.setitem(NAMED, "greedy", named("test", "FedAvg", ("LossAware", {"greedy": True})))
    path = write_recipe(
        tmp_path, RECIPE + '[[algorithm]]\nname = "LossAware"\ntau = 0.3\ngreedy = false\n'
    )
    assert dict(config.read(path, [], "greedy").algorithm[1].given) == {"tau": 0.3, "greedy": True}


def test_stacks_can_be_named_by_their_parts(read: Read) -> None:
    def names(algorithm: str) -> list[str]:
        made = read(algorithm=algorithm)
        return [type(p).__name__ for p in made.build_algorithm(made.build_task()).parts()]

    assert names("FedAvg+FedProx+Median") == ["FedAvg", "FedProx", "Median"]
    assert names("median") == names("Median") == ["FedAvg", "Median"]
    assert "did you mean FedProx?" in sentence(read, algorithm="fedprx")
    with pytest.raises(StackError, match="FedAvg is a base of its own"):
        names("FedAvg+FedAvg")


def test_every_named_stack_can_be_built(read: Read) -> None:
    known = {n.lower() for n in exported_names("algorithm")}
    for name, known_as in NAMED.items():
        parts = [t["name"] for t in known_as.tables()]
        if not {p.lower() for p in parts} <= known or parts[0] != "FedAvg":
            continue
        needed = {
            "MultiResolution": "MultiResolution.sizes=[[8, 8], [4, 4]]",
            "FedSR": "FedSR.layer=backbone",
            "Balance": "Balance.generator=Gaussians",
        }
        made = read(*(text for part, text in needed.items() if part in parts), algorithm=name)
        built = made.build_algorithm(made.build_task())
        assert [type(p).__name__ for p in built.parts()] == parts


def test_every_constructor_can_be_looked_into() -> None:
    """Annotations must be resolvable and have words: this is what recipes are checked against."""
    for kind in ("task", "data", "algorithm"):
        for name in exported_names(kind):
            try:
                cls = find_class(kind, name, kind)
            except ConfigError:
                continue  # exported for Python, not for recipes
            for p in parameters(cls).values():
                values._adapter(p.hint)
                assert values.describe_type(p.hint)
