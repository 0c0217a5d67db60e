"""A site's policy: what its owner allows, whatever a recipe or a server asks for.

`policy.toml` lies at the site and is never part of a recipe. It is held against the recipe before
any work (`Policy.objections`), against each request (`Policy.refuses`), and against the bytes
before they leave (`Policy.withholds`). An entry that is left out sets no limit, except `modules`:
no module is imported that is not listed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fedlens.config.convert import ConfigError, convert, suggestion, toml_value
from fedlens.config.recipe import Config
from fedlens.core.algorithm import Algorithm
from fedlens.core.imports import named_modules
from fedlens.core.limits import Count, Limited, Positive, PositiveShare
from fedlens.core.message import Header, Message
from fedlens.core.privacy import Mechanism
from fedlens.core.tree import count_bytes
from fedlens.trust.accounting import private_part, site_epsilon, tells_size
from fedlens.trust.departures import Departures
from fedlens.trust.ledger import protection

_HASH = "[0-9a-f]{12,64}"  # of a recipe, or its beginning
KEY_BYTES = 1024  # of a sum under masks, for each who takes part: keys and shares of them
_SLACK = 4096  # bytes: numbers are written in more or fewer digits


class PolicyError(ConfigError):
    """What a policy does not allow.

    Args:
        entry: the one that says so, all that a server hears of it.
        text: the whole message, for the site's own log.
    """

    def __init__(self, entry: str, text: str) -> None:
        super().__init__(text)
        self.entry = entry


@dataclass(frozen=True)
class Terms:
    """What a recipe asks of a client.

    Args:
        name: the recipe's.
        own_name: the site's operator calls it so; else a server does, which may call it anything.
        digest: its hash, see `Config.digest`.
        stack: the algorithm's parts, by name.
        protection: those of them that hide single replies.
        trees: bytes of each tree of a reply.
        scalars: the numbers of a reply that are declared.
        reply_bytes: of one reply, as it leaves.
        rounds: planned.
        cohort: clients asked in a round.
        epochs: passes over the client's data in a round.
        steps: instead of epochs, where the recipe counts so.
        evaluates: whether clients are asked for metrics on their own held-out data.
        generates: whether a generator of images would run here.
        modules: of somebody's own code.
        epsilon: that the recipe promises not to exceed (max_epsilon of its layer), by noise that
            is in a reply before it leaves; what a server adds is that server's promise.
        delta: at which that is meant.
        tells_size: whether a site says how many examples it has.
    """

    name: str
    digest: str
    stack: tuple[str, ...] = ()
    protection: tuple[str, ...] = ()
    trees: Mapping[str, int] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()
    reply_bytes: int = 0
    rounds: int = 1
    cohort: int = 1
    epochs: int = 0
    steps: int = 0
    evaluates: bool = False
    generates: bool = False
    modules: tuple[str, ...] = ()
    epsilon: float | None = None
    delta: float = 0.0
    own_name: bool = True
    tells_size: bool = True


def terms_of(config: Config, algorithm: Algorithm, own_name: bool = True) -> Terms:
    """What this recipe asks; `algorithm` is built of it and knows what is public about the data."""
    s, parts, noisy = config.settings, list(algorithm.parts()), private_part(algorithm)
    if getattr(noisy, "where", "") == "server":
        noisy = None
    cohort = s.cohort or s.clients
    header = Header(0, s.rounds, s.seed, population=s.clients, cohort=cohort)
    message = algorithm.broadcast(algorithm.init().with_header(header)).with_header(header)
    expected = algorithm.expects(message)
    scalars = tuple(n for n, scalar in algorithm.declared().items() if scalar.read != "local")
    reply = Message(
        expected, dict.fromkeys(scalars, 0.0), {tree: {"mean": 0.0} for tree in expected}
    )
    # the base's: what a layer calls steps is something else (PFedMe's K, FedGen's generator)
    steps = _count(algorithm.base, "steps")
    return Terms(
        name=config.name,
        digest=config.digest(),
        stack=tuple(type(part).__name__ for part in parts),
        protection=protection(algorithm),
        trees={name: count_bytes(dict(tree)) for name, tree in expected.items()},
        scalars=scalars,
        reply_bytes=reply.write_into(memoryview(b"")),
        rounds=s.rounds,
        cohort=cohort,
        epochs=0 if steps else _count(algorithm.base, "epochs"),
        steps=steps,
        evaluates=s.personal or algorithm.personalises,
        generates=any(part.generates for part in parts),
        modules=named_modules(config.tables()),
        epsilon=getattr(noisy, "max_epsilon", None),
        delta=getattr(noisy, "delta", 0.0),
        own_name=own_name,
        tells_size=tells_size(algorithm),
    )


def _count(part: Algorithm, name: str) -> int:
    value = getattr(part, name, None)
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Policy(metaclass=Limited):
    """What a site allows.

    Args:
        recipes: names of the operator's own files, or hashes (their first 12 characters or more).
        trees: that may leave in a reply, by name.
        scalars: numbers that may leave in a reply, by name.
        evaluation: whether metrics on this site's own held-out data leave: "send" or "withhold".
        max_bytes_round: that leave in one round of a recipe, in all its jobs together.
        max_bytes_job: that leave in all its rounds.
        max_epochs: passes over this site's data in a round.
        max_steps: the same for recipes that count in steps.
        max_seconds: of work on one message; it is then stopped.
        generators: whether a generator of images may run here.
        modules: of somebody's own code that a recipe may import.
        require: layers that the recipe's stack must have.
        min_cohort: clients that must be asked together; under SecureSum also those whose keys make
            a sum, and those for whom it is opened.
        max_epsilon: of differential privacy: a recipe that promises none is refused, and no reply
            leaves that would cost more, with all that the site's ledger has seen leave. Metrics
            have no noise: with this entry, none leave.
        max_delta: at which max_epsilon is meant.
        keep_days: how long ledgers, memories and checkpoints are kept; `fedlens forget` uses it.
    """

    recipes: tuple[str, ...] | None = None
    trees: tuple[str, ...] | None = None
    scalars: tuple[str, ...] | None = None
    evaluation: Literal["send", "withhold"] = "send"
    max_bytes_round: Count | None = None
    max_bytes_job: Count | None = None
    max_epochs: Count | None = None
    max_steps: Count | None = None
    max_seconds: Positive | None = None
    generators: bool = True
    modules: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    min_cohort: Count = 1
    max_epsilon: Positive | None = None
    max_delta: PositiveShare = 1e-5
    keep_days: Count | None = None

    def objections(self, terms: Terms) -> list[PolicyError]:
        """Why this site would not take part, before any work; nothing if it would."""
        found = [
            self._unknown_recipe(terms),
            self._missing("trees", terms.trees, "a reply has the tree"),
            self._missing("scalars", terms.scalars, "a reply has the number"),
            self._above("max_bytes_round", terms.reply_bytes, "bytes of a reply"),
            self._above("max_bytes_job", terms.reply_bytes * terms.rounds, "bytes of all rounds"),
            self._too_much_work(terms),
            self._not_listed(terms.modules),
            self._unprotected(terms),
            self._generating(terms.generates),
        ]
        if terms.cohort < self.min_cohort:
            found.append(self._too_few(terms.cohort))
        return [objection for objection in found if objection]

    def refuses(self, asked: Header) -> PolicyError | None:
        """Why this request is not worked on. The server says how many it asks; only a layer that
        needs the others' keys can check it (`SecureSum.with_vault`)."""
        if asked.evaluate:
            if self.evaluation == "withhold":
                return PolicyError("evaluation", "metrics on this site's own data are withheld")
            if self.max_epsilon is not None:
                return PolicyError("max_epsilon", "metrics on this site's own data have no noise")
        together = asked.population if asked.evaluate else asked.cohort
        return self._too_few(together) if together < self.min_cohort else None

    def withholds(
        self, kind: str, message: Message, size: int, recipe: str, so_far: Departures
    ) -> PolicyError | None:
        """Why these bytes do not leave. recipe: its hash. so_far: what has left this site
        before."""
        if kind != "evaluation":  # its numbers have an entry of their own
            if found := self._missing("trees", message.trees, "the reply has the tree"):
                return found
            if found := self._missing("scalars", message.scalars, "the reply has the number"):
                return found
        round, whole = so_far.bytes_of(recipe, message.round), so_far.bytes_of(recipe)
        return self._above(
            "max_bytes_round", round + size, f"bytes of round {message.round}"
        ) or self._above("max_bytes_job", whole + size, "bytes of this recipe")

    def overspends(
        self, cost: Mechanism | None, so_far: Departures, recorded: bool
    ) -> PolicyError | None:
        """Why a reply may not be made or leave, whatever the server says. recorded: is there a
        ledger that remembers what was spent?"""
        if self.max_epsilon is None:
            return None
        if cost is None or cost.seeded:
            return PolicyError("max_epsilon", "what is asked for has no noise of this site's own")
        if cost.where == "server":
            return PolicyError("max_epsilon", "the server adds the noise, and sees what has none")
        if not recorded:
            return PolicyError("max_epsilon", "without a ledger nobody knows what was spent")
        spent = site_epsilon(cost, so_far.charges.items(), self.max_delta)
        if spent <= self.max_epsilon:
            return None
        return PolicyError(
            "max_epsilon",
            f"with this reply, epsilon would be {spent:.4g} at delta {self.max_delta:g}, more than"
            f" {self.max_epsilon:g}",
        )

    # -- one entry each ----------------------------------------------------------------------------

    def _unknown_recipe(self, terms: Terms) -> PolicyError | None:
        if self.recipes is None:
            return None
        for listed in self.recipes:
            if re.fullmatch(_HASH, listed):  # which is nobody's name
                if terms.digest.startswith(listed):
                    return None
            elif listed == terms.name and terms.own_name:
                return None
        whose = "" if terms.own_name else ", and a name that a server gives is none: list its hash"
        return PolicyError("recipes", f"{terms.name} ({terms.digest[:16]}) is not listed{whose}")

    def _missing(self, entry: str, names: Iterable[str], what: str) -> PolicyError | None:
        allowed = getattr(self, entry)
        odd = [] if allowed is None else [name for name in names if name not in allowed]
        return PolicyError(entry, f"{what} {odd[0]!r}, which is not listed") if odd else None

    def _above(self, entry: str, value: float, what: str) -> PolicyError | None:
        most = getattr(self, entry)
        if most is None or value <= most:
            return None
        return PolicyError(entry, f"{value:,} {what} are more than {most:,}")

    def _too_much_work(self, terms: Terms) -> PolicyError | None:
        if terms.steps and self.max_steps is None and self.max_epochs is not None:
            return PolicyError(
                "max_epochs", f"it works {terms.steps} steps a round, and max_steps is not set"
            )
        epochs = self._above("max_epochs", terms.epochs, "epochs a round")
        return epochs or self._above("max_steps", terms.steps, "steps a round")

    def _not_listed(self, modules: Iterable[str]) -> PolicyError | None:
        for module in modules:
            listed = (entry.partition(":")[0] for entry in self.modules)
            if not any(f"{module}.".startswith(f"{m}.") for m in listed):
                return PolicyError("modules", f"it imports {module}, which is not listed")
        return None

    def _generating(self, generates: bool) -> PolicyError | None:
        if self.generators or not generates:
            return None
        return PolicyError("generators", "it runs a generator of images here")

    def _unprotected(self, terms: Terms) -> PolicyError | None:
        for layer in self.require:
            if layer not in terms.stack:
                return PolicyError("require", f"its stack has no {layer}")
        if self.max_epsilon is None or (
            terms.epsilon is not None and terms.epsilon <= self.max_epsilon
        ):
            if self.max_epsilon is not None and terms.delta > self.max_delta:
                return PolicyError(
                    "max_delta", f"delta {terms.delta:g} is more than {self.max_delta:g}"
                )
            return None
        none = terms.epsilon is None
        promised = (
            "promises none by noise in what leaves" if none else f"promises {terms.epsilon:g}"
        )
        return PolicyError("max_epsilon", f"epsilon {self.max_epsilon:g} is asked, it {promised}")

    def _too_few(self, cohort: int) -> PolicyError:
        return PolicyError(
            "min_cohort", f"{cohort} clients are asked together, fewer than {self.min_cohort}"
        )


# -- as a file -------------------------------------------------------------------------------------


def read_policy(path: Path) -> Policy:
    """A policy from its TOML file. A wrong entry is refused with its name.

    Args:
        path: the file.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not TOML: {e}") from e
    hints = get_type_hints(Policy, include_extras=True)
    known = {f.name: hints[f.name] for f in fields(Policy)}
    for key in table:
        if key not in known:
            raise ConfigError(f"{path} has an unknown entry {key!r}{suggestion(key, known)}")
    return Policy(**{k: convert(v, known[k], f"{path}: {k}") for k, v in table.items()})


def site_policy(path: Path | str | None, modules: Iterable[str]) -> Policy:
    """What the operator of a site allows: by this file, if there is one, and these modules."""
    policy = read_policy(Path(path)) if path else Policy()
    return replace(policy, modules=(*policy.modules, *modules))


def check_modules(policy: Policy, tables: Mapping[str, Any]) -> None:
    """Before a recipe is built, because building it imports what it names."""
    if found := policy._not_listed(named_modules(tables)):
        raise found


def check_generators(policy: Policy, algorithm: Algorithm) -> None:
    """Before an algorithm is given facts, because a generator may then read images or weights."""
    if found := policy._generating(any(part.generates for part in algorithm.parts())):
        raise found


def strict_policy(terms: Terms) -> Policy:
    """The policy that allows this terms and little else."""
    sends = terms.evaluates and terms.epsilon is None
    trips = 1 + sends
    keys = KEY_BYTES * terms.cohort * trips if terms.protection else 0
    reply = _rounded(terms.reply_bytes + _SLACK * trips + keys)
    return Policy(
        recipes=(terms.digest,),
        trees=tuple(terms.trees),
        scalars=terms.scalars,
        evaluation="send" if sends else "withhold",
        max_bytes_round=reply,
        max_bytes_job=_rounded(reply * terms.rounds),
        max_epochs=terms.epochs or None,
        max_steps=terms.steps or None,
        generators=terms.generates,
        modules=terms.modules,
        require=terms.protection,
        # of a sum under masks, some may be lost
        min_cohort=max(3, terms.cohort // 2 + 1) if terms.protection else terms.cohort,
        max_epsilon=terms.epsilon,
        max_delta=terms.delta or Policy.max_delta,
        keep_days=365,
    )


def _rounded(size: int) -> int:
    """Up, to two digits: a limit that people can read."""
    unit = int("1" + "0" * max(0, len(str(size)) - 2))
    return -(-size // unit) * unit


_COMMENTS = {
    "recipes": "Which recipes: hashes, which change with every setting but [data], or own files.",
    "trees": "What may leave in a reply: arrays,",
    "scalars": "and single numbers.",
    "evaluation": 'Metrics on this site\'s own held-out data: "send" or "withhold".',
    "max_bytes_round": "Bytes that may leave in one round of a recipe,",
    "max_bytes_job": "and in all its rounds. A restart or a second run sends again: leave room.",
    "max_epochs": "Work: passes over this site's data in a round,",
    "max_steps": "for recipes that count in steps: steps in a round,",
    "max_seconds": "seconds on one message, after which work is stopped.",
    "generators": "May a generator of images run here?",
    "modules": "Python modules of somebody's own code that a recipe may import.",
    "require": "Layers without which this site does not take part.",
    "min_cohort": "Clients asked, and added up, together: a sum of few tells much about each.",
    "max_epsilon": "The weakest differential privacy that is accepted (larger is weaker).",
    "max_delta": "The chance that is left to it to fail.",
    "keep_days": "Days that ledgers, memories and checkpoints are kept (fedlens forget --expired).",
}
_EXAMPLES: Mapping[str, Any] = {
    "max_epochs": 5,
    "max_steps": 100,
    "max_seconds": 600,
    "max_epsilon": 8.0,
}


def policy_text(policy: Policy, about: str) -> str:
    """A policy as a commented file. An entry without a value stands there as a comment."""
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    for f in fields(Policy):
        value = getattr(policy, f.name)
        lines += ["", f"# {_COMMENTS[f.name]}"]
        unset = value is None
        shown = toml_value(_EXAMPLES.get(f.name, "") if unset else value)
        lines.append(f"{'# ' if unset else ''}{f.name} = {shown}")
    return "\n".join(lines) + "\n"
