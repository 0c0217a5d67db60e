"""What a config stands for, built: task, data and algorithm, checked before any work starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedlens.config.parts import parameters
from fedlens.config.recipe import Config, ConfigError, Settings
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.task import Task


@dataclass(frozen=True)
class Setup:
    """The objects a job works with."""

    config: Config
    settings: Settings
    task: Task
    federation: Federation
    algorithm: Algorithm

    @property
    def stack(self) -> str:
        return " + ".join(type(p).__name__ for p in self.algorithm.parts())

    @property
    def personal(self) -> bool:
        """Are clients evaluated too, each on what it held out?"""
        return self.settings.personal or self.algorithm.personalises

    @property
    def device(self) -> str:
        return str(self.algorithm.place)


NO_SINGLES = (
    "replies are added up under masks ({layer}): there is no worst client, no spread between"
    " clients and no table of them"
)


def load_federation(config: Config) -> Federation:
    return config.build_source().federation(config.settings.clients, config.settings.seed)


def make_setup(config: Config, federation: Federation | None = None, learn: bool = True) -> Setup:
    """Build everything, and refuse what cannot work, before any work starts. learn: what the task
    could be told and nobody said, classes or sizes, is taken from the data. Not at a server of real
    sites, which build theirs from the recipe alone."""
    settings = config.settings
    task = config.build_task()
    algorithm = config.build_algorithm(task)
    federation = federation or load_federation(config)
    told = with_facts(config, federation) if learn else config
    if told is not config:
        config = told
        task = config.build_task()
        algorithm = config.build_algorithm(task)
    federation = task.admit(federation)
    if not len(federation):
        raise ConfigError(f"{config.data.name} found no clients")
    if settings.cohort is not None and settings.cohort > len(federation):
        raise ConfigError(
            f"federation.cohort is {settings.cohort}, but {config.data.name} has only"
            f" {len(federation)} clients"
        )
    for part in algorithm.parts():
        part.check_cohort(settings.cohort or len(federation))
    if settings.personal or algorithm.personalises:
        federation = _with_note(config, federation)
    if algorithm.hides_singles:
        facts = federation.facts.noting(NO_SINGLES.format(layer=algorithm.hiding_layer))
        federation = replace(federation, facts=facts)
    return Setup(config, settings, task, federation, algorithm.given(federation.facts))


def with_facts(config: Config, federation: Federation) -> Config:
    """The same config, its task told what the data knows and nobody gave."""
    if all(h is None for h in federation.holdings):
        return config
    known = config.task.cls.arguments_from_facts(federation.facts)  # type: ignore[attr-defined]
    new = {k: v for k, v in known.items() if k not in config.task.given}
    if "classes" not in new and len(known.get("names", ())) != config.task.given.get("classes"):
        new.pop("names", None)  # of other classes than the recipe speaks of
    if not new:
        return config
    return replace(config, task=replace(config.task, given={**config.task.given, **new}).checked())


def _with_note(config: Config, federation: Federation) -> Federation:
    """Not refused, because recipes ask for personal metrics of whatever data somebody may put in;
    but not passed over either.
    """
    if any(h is not None and len(h) for h in federation.held_out):
        return federation
    advice = ": data.holdout=0.1 keeps a tenth" if "holdout" in parameters(config.data.cls) else ""
    note = (
        f"clients are not evaluated, because none of {config.data.name} keeps anything for that"
        f"{advice}"
    )
    return replace(federation, facts=federation.facts.noting(note))


def try_one_example(setup: Setup) -> None:
    """Sizes and labels that do not fit are found out here, not by every client on its own."""
    try:
        setup.algorithm.rehearse(setup.federation)
    except ValueError as e:
        raise ConfigError(
            f"{setup.config.data.name} does not fit {setup.config.task.name} as it is set up"
            f" here: {e}"
        ) from e
