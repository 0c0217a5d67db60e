"""What noise is worth: an epsilon, and always the whole statement beside it.

A layer declares what a round costs (`core.privacy.Mechanism`); this composes rounds and asks
`dp-accounting` (Google) what they come to. Two accountants, both upper bounds:

    PLD   privacy loss distributions (Koskela et al., 2020; Doroshenko et al., 2022): tight
    RDP   Renyi differential privacy (Mironov, 2017; Wang et al., 2019): a little above, quick; the
          only one for cohorts of a fixed size

Neighbouring relations. Poisson batches and sums whose members are no secret: add or remove one, so
that a sum changes by at most C. A secret cohort of a fixed size: replace one, 2 C.

A sum whose members are known is not amplified: q = 1 and only those who are in it pay. Sampling
that nobody sees costs everybody alike, whether in it or not.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, Literal

from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.files import name_in_errors
from fedlens.core.message import Header
from fedlens.core.privacy import Mechanism

Accountant = Literal["pld", "rdp"]
PRIVACY_FILE = (
    "privacy.jsonl"  # in a run folder: who was asked in which round, written before they are
)
# of Renyi divergences: whole ones have a formula, those between are sums that may not converge
ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
# of privacy losses, rounded up: ten times the library's own, ten times as quick, and hardly above;
# an epsilon below 1, of many small losses, is looked at again with the library's
DISCRETE, FINE = 1e-3, 1e-4
LEAST_NOISE, MOST_NOISE = 0.05, 1e4
# a share: noise for a wanted epsilon is found this closely, on the safe side
PRECISION = 1e-3


class BudgetSpent(ValueError):
    """Another round would cost more than `max_epsilon`."""


# -- epsilon ---------------------------------------------------------------------------------------

# what one noisy sum is, as far as an accountant looks at it: noise, rate, sampling
_Sum = tuple[float, float, str]


def epsilon_of(
    spent: Iterable[tuple[Mechanism, int]], delta: float, accountant: Accountant = "pld"
) -> float:
    """The epsilon of several mechanisms, composed; their order does not matter.

    Args:
        spent: mechanisms, each with the number of its rounds.
        delta: at which epsilon is meant.
        accountant: "pld" or "rdp".
    """
    sums: Counter[_Sum] = Counter()
    for mechanism, rounds in spent:
        if rounds:
            key = mechanism.noise, mechanism.rate, mechanism.sampling
            sums[key] += rounds * mechanism.steps
    fixed = {sampling == "fixed" and rate < 1 for _, rate, sampling in sums}
    if len(fixed) > 1:
        raise ValueError("cohorts of a fixed size and other sampling do not compose")
    accountant = "rdp" if fixed == {True} else accountant
    return _epsilon(tuple(sorted(sums.items())), delta, accountant) if sums else 0.0


def accountant_of(mechanism: Mechanism, wanted: Accountant = "pld") -> Accountant:
    return "rdp" if mechanism.sampling == "fixed" and mechanism.rate < 1 else wanted


@lru_cache(maxsize=4096)
def _epsilon(sums: tuple[tuple[_Sum, int], ...], delta: float, accountant: Accountant) -> float:
    from dp_accounting import NeighboringRelation

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if any(sampling == "fixed" and rate < 1 for (_, rate, sampling), _ in sums):
        relation = NeighboringRelation.REPLACE_ONE
    if accountant == "pld":
        merged = [_merged(one, count) for one, count in sums]
        rough = _composed(merged, delta, DISCRETE)
        return rough if rough > 1 else _composed(merged, delta, FINE)
    from dp_accounting.rdp import RdpAccountant

    ledger = RdpAccountant(ORDERS, relation)
    for one, count in sums:
        ledger.compose(_event(one), count)
    return float(ledger.get_epsilon(delta))


def _merged(one: _Sum, count: int) -> tuple[_Sum, int]:
    """Sums that everybody is in are together one with less noise."""
    noise, rate, sampling = one
    plain = sampling == "none" or rate >= 1
    return ((noise / math.sqrt(count), 1.0, "none"), 1) if plain else (one, count)


def _composed(merged: list[tuple[_Sum, int]], delta: float, interval: float) -> float:
    singles = [(_single_loss(one, interval), count) for one, count in merged]
    losses = [loss if count == 1 else loss.self_compose(count) for loss, count in singles]
    return float(reduce(lambda a, b: a.compose(b), losses).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _single_loss(one: _Sum, interval: float) -> Any:
    """The distribution of one sum's privacy loss: what takes longest, and is the same in every
    round. As `PLDAccountant` makes it."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    noise, rate, _ = one
    return from_gaussian_mechanism(
        standard_deviation=noise, value_discretization_interval=interval, sampling_prob=rate
    )


def _event(one: _Sum) -> Any:
    import dp_accounting as dp

    noise, rate, sampling = one
    if sampling == "none" or rate >= 1:
        return dp.GaussianDpEvent(noise)
    if sampling == "poisson":
        return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    share = Fraction(rate).limit_denominator(10**9)
    # one replaced changes a sum by up to twice the bound
    gaussian = dp.GaussianDpEvent(noise / 2)
    return dp.SampledWithoutReplacementDpEvent(share.denominator, share.numerator, gaussian)


def noise_for(epsilon: float, mechanism: Mechanism, rounds: int) -> float:
    """The smallest noise multiplier with which so many rounds cost at most `epsilon`.

    Args:
        epsilon: that must not be exceeded.
        mechanism: what adds the noise, with any multiplier.
        rounds: how many.
    """
    accountant = accountant_of(mechanism)

    def cost(noise: float, by: Accountant = accountant) -> float:
        return epsilon_of([(replace(mechanism, noise=noise), rounds)], mechanism.delta, by)

    high = 1.0
    while cost(high, "rdp") > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise ValueError(f"no noise below {MOST_NOISE:g} x clip is enough for {epsilon:g}")
    # RDP, which is quick and never below, finds where to look
    enough = _least(lambda noise: cost(noise, "rdp") <= epsilon, LEAST_NOISE, high)
    if accountant == "rdp":
        return enough
    return _least(lambda noise: cost(noise) <= epsilon, max(LEAST_NOISE, enough / 2), enough)


def _least(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    """By halves; `high` is enough."""
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


# -- statements ------------------------------------------------------------------------------------

RELATIONS = {
    "example": "add or remove one example of a site; how many it has is public",
    "client": "add or remove one client: its update becomes zero; who was asked is public",
    "replaced": "replace one client by another",
}


@dataclass(frozen=True)
class Statement:
    """An epsilon with everything without which it means nothing.

    Args:
        epsilon: how much one unit can change the result.
        delta: the chance that epsilon does not hold.
        unit: whose presence is hidden.
        relation: which two federations cannot be told apart.
        sampling: what is assumed about who is in a sum.
        noise: multiplier.
        sums: noisy ones, of the client that paid most.
        accountant: by which `epsilon` was found, and what another one says.
        randomness: where the noise comes from.
        outside: what else leaves, and is not covered.
    """

    epsilon: float
    delta: float
    unit: str
    relation: str
    sampling: str
    noise: float
    sums: int
    accountant: str
    randomness: str
    outside: str = ""

    def table(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        return (
            f"epsilon {self.epsilon:.3g} at delta {self.delta:g} for single {self.unit}s"
            f" ({self.relation}); {self.sampling}; {self.sums} sums with noise {self.noise:g} x"
            f" clip; {self.accountant}; {self.randomness}"
            f"{f'; {self.outside}' if self.outside else ''}"
        )


# of clients' own metrics, which leave without noise: their held-out parts are not trained on, but
# belong to a whole client, as does the model of its own that is measured
_METRICS = {
    "example": "metrics on sites' held-out examples leave without noise: it covers none of those",
    "client": "metrics on clients' held-out examples leave without noise: this epsilon is of the"
    " model alone, not of all that is seen of a client",
}


def statement_of(mechanism: Mechanism, rounds: int, personal: bool = False) -> Statement:
    """Epsilon of a mechanism, with everything that it depends on.

    Args:
        mechanism: what adds the noise.
        rounds: how many.
        personal: clients send metrics of their own.
    """
    spent = [(mechanism, rounds)]
    used = accountant_of(mechanism)
    epsilon = epsilon_of(spent, mechanism.delta)
    if used == "pld":
        other = f" (RDP: {epsilon_of(spent, mechanism.delta, 'rdp'):.3g})"
    else:
        other = ""
    replaced = mechanism.sampling == "fixed" and mechanism.rate < 1
    return Statement(
        epsilon=epsilon,
        delta=mechanism.delta,
        unit=mechanism.unit,
        relation=RELATIONS["replaced" if replaced else mechanism.unit],
        sampling=_sampling(mechanism),
        noise=mechanism.noise,
        sums=rounds * mechanism.steps,
        accountant=f"{used.upper()} of dp-accounting {_version()}{other}",
        randomness=_randomness(mechanism),
        outside=_METRICS[mechanism.unit] if personal else "",
    )


_ADDED = {
    "site": "added at each site",
    "server": "added at the server, which sees the sum without it",
    "clients": "added in shares by the clients, so that nobody sees a sum without it",
}


def _randomness(mechanism: Mechanism) -> str:
    if mechanism.seeded:
        return (
            f"noise {_ADDED[mechanism.where]}, from the run's seed: a simulation, which protects"
            " nobody"
        )
    return f"noise {_ADDED[mechanism.where]}, from the operating system"


def _sampling(mechanism: Mechanism) -> str:
    if mechanism.sampling == "none":
        return "no amplification: who is in a sum is taken as known (q = 1)"
    what = "batch" if mechanism.unit == "example" else "cohort"
    how = "Poisson" if mechanism.sampling == "poisson" else "of a fixed size"
    return f"each {what} {how} with q = {mechanism.rate:.4g}, a secret of whoever draws it"


def _version() -> str:
    try:
        return importlib.metadata.version("dp-accounting")
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- a run -----------------------------------------------------------------------------------------


def private_part(algorithm: Algorithm) -> Algorithm | None:
    """The part of a stack that promises differential privacy: there is one at most."""
    found = (part for part in algorithm.parts() if getattr(part, "protects", None))
    part = next(found, None)
    if part is not None and getattr(part, "where", "") == "clients" and not algorithm.hides_singles:
        raise StackError(
            f"{type(part).__name__} with where=clients leaves each client with a share of the noise"
            " that is too small for it alone: set secure=true, so that only sums are seen, or"
            " where=server"
        )
    return part


def tells_size(algorithm: Algorithm) -> bool:
    """Does a real site say how many examples it has? Under masks that is its weight, which they
    hide; but a budget for single examples is charged by it.
    """
    part = private_part(algorithm)
    return not algorithm.hides_singles or getattr(part, "protects", None) == "example"


@dataclass
class Account:
    """What a run has spent, by client.

    Args:
        algorithm: the stack.
        population: how many clients there are.
        cohort: how many are asked in a round.
        sizes: how many examples a client has; None while that is not known.
        asked: rounds that each client was asked in.
        rounds: all of them.
        personal: clients send metrics of their own, without noise.
    """

    algorithm: Algorithm
    population: int
    cohort: int
    sizes: Callable[[int], int | None]
    asked: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    personal: bool = False

    def mechanism(self, client: int) -> Mechanism | None:
        """What a round costs this client; None while its size is not known."""
        part, examples = private_part(self.algorithm), self.sizes(client)
        if part is None or examples is None:
            return None
        found = part.mechanism(examples, self.population, self.cohort)
        assert found is not None
        if self.algorithm.hides_singles and found.unit == "client":
            # SecureSum's roster tells everybody who takes part
            found = replace(found, sampling="none", rate=1.0)
        return found

    def charge(self, clients: Sequence[int]) -> None:
        """Clients are about to be asked. Raises BudgetSpent if one may not be any more."""
        if beyond := self.overdrawn(clients):
            worst = max(beyond, key=lambda client: beyond[client])
            mechanism = self.mechanism(worst)
            assert mechanism is not None
            raise BudgetSpent(
                f"another round would cost epsilon {beyond[worst]:.4g} at delta"
                f" {mechanism.delta:g}, more than max_epsilon = {mechanism.max_epsilon:g}"
            )
        self.asked, self.rounds = self.asked + Counter(clients), self.rounds + 1

    def overdrawn(self, clients: Sequence[int]) -> dict[int, float]:
        """Those that may not be asked once more, and the epsilon that it would cost each."""
        after = replace(self, asked=self.asked + Counter(clients), rounds=self.rounds + 1)
        paid = {i: kind for i in clients if (kind := after._paid(i))}
        beyond = {
            kind: _cost(*kind)
            for kind in set(paid.values())
            if kind[0].max_epsilon is not None and _exceeds(kind, kind[0].max_epsilon)
        }
        return {i: beyond[kind] for i, kind in paid.items() if kind in beyond}

    def statement(self) -> Statement | None:
        """Of the client that paid most: clients' examples are different ones, so that is what the
        whole run costs. None while nothing is known."""
        worst = self.costliest()
        return statement_of(*worst, self.personal) if worst else None

    def epsilon(self) -> float | None:
        worst = self.costliest()
        return _cost(*worst) if worst else None

    def by_client(self) -> dict[int, float]:
        found = {i: self._paid(i) for i in range(self.population)}
        return {i: _cost(*paid) for i, paid in found.items() if paid}

    def _paid(self, client: int) -> tuple[Mechanism, int] | None:
        mechanism = self.mechanism(client)
        if mechanism is None:
            return None
        drawn = mechanism.unit == "client" and mechanism.sampling != "none"
        return mechanism, self.rounds if drawn else self.asked[client]

    def costliest(self, clients: Iterable[int] | None = None) -> tuple[Mechanism, int] | None:
        """Clients that are alike are looked at once. RDP is quick and never below: where it is not
        above the most that was found, there is no need to look closer."""
        who = range(self.population) if clients is None else clients
        kinds = {paid for i in who if (paid := self._paid(i))}
        if len(kinds) <= 1:
            return next(iter(kinds), None)
        quick = {kind: _cost(*kind, "rdp") for kind in kinds}
        worst, most = None, -1.0
        for kind in sorted(kinds, key=lambda kind: -quick[kind]):
            if quick[kind] <= most:
                break
            if (cost := _cost(*kind)) > most:
                worst, most = kind, cost
        return worst


def _exceeds(paid: tuple[Mechanism, int], limit: float) -> bool:
    """RDP is quick and never below: what it lets pass need not be looked at again."""
    mechanism, rounds = paid
    quick = _cost(mechanism, rounds, "rdp")
    return quick > limit and _cost(mechanism, rounds) > limit


def _cost(mechanism: Mechanism, rounds: int, accountant: Accountant = "pld") -> float:
    return epsilon_of([(mechanism, rounds)], mechanism.delta, accountant)


@dataclass
class Journal:
    """Who was asked in which round, with how many examples, in a file that only grows. A round that
    is asked again after a kill counts again, except where noise follows from the seed: then the
    same bytes are made."""

    path: Path
    seeded: bool
    known: set[int] = field(default_factory=set)  # rounds
    sizes: dict[int, set[int]] = field(default_factory=dict)  # all that each client ever had

    def read(self) -> list[tuple[int, list[int]]]:
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text().splitlines():
            try:
                table = json.loads(line)
            except ValueError:  # torn by a kill: nobody was asked yet
                continue
            found.append((int(table["round"]), [int(i) for i in table["asked"]]))
            self._see({int(i): int(n) for i, n in table.get("examples", {}).items()})
        return found

    def write(self, number: int, asked: Sequence[int], sizes: Mapping[int, int]) -> None:
        """On the disk before it returns. sizes: examples, where known."""
        here = {i: sizes[i] for i in asked if i in sizes}
        line = json.dumps({"round": number, "asked": list(asked), "examples": here}) + "\n"
        with name_in_errors(self.path), self.path.open("a") as file:
            file.write("\n" + line)  # whatever a kill left of the line before ends here
            file.flush()
            os.fsync(file.fileno())
        self.known.add(number)
        self._see(here)

    def _see(self, sizes: Mapping[int, int]) -> None:
        for client, size in sizes.items():
            self.sizes.setdefault(client, set()).add(size)

    def replay(self, account: Account, done: int = 0) -> None:
        """Everything that was ever charged, whatever a checkpoint remembers; a ValueError where
        the file has lost some of its `done` rounds."""
        lines = self.read()
        if missing := sorted(set(range(done)) - {number for number, _ in lines}):
            raise ValueError(
                f"{self.path} says nothing of round {missing[0]}, which was run: bring the file"
                " back, or nobody knows what was spent"
            )
        if self.seeded:
            lines = list({number: (number, asked) for number, asked in lines}.values())
        account.asked = Counter(i for _, asked in lines for i in asked)
        account.rounds = len(lines)
        self.known = {number for number, _ in lines}

    def knows(self, number: int) -> bool:
        """Was this round paid for, and is it the same one again?"""
        return self.seeded and number in self.known


def open_account(
    algorithm: Algorithm,
    population: int,
    cohort: int | None,
    sizes: Callable[[int], int | None],
    personal: bool = False,
) -> Account | None:
    """None for a stack that promises nothing. personal: clients are evaluated too."""
    if private_part(algorithm) is None:
        return None
    import dp_accounting  # noqa: F401  missed before the first round, not in it

    personal = personal or algorithm.personalises
    return Account(algorithm, population, cohort or population, sizes, personal=personal)


def planned(account: Account, rounds: int) -> Account:
    """The account after so many rounds, where each client is asked in all of them: the most that it
    can come to."""
    everybody = Counter(dict.fromkeys(range(account.population), rounds))
    return replace(account, asked=everybody, rounds=rounds)


def affordable(mechanism: Mechanism, rounds: int) -> int:
    """How many of these rounds stay within `max_epsilon`."""
    low, high = 0, rounds
    while low < high:
        middle = (low + high + 1) // 2
        if mechanism.max_epsilon is None or _cost(mechanism, middle) <= mechanism.max_epsilon:
            low = middle
        else:
            high = middle - 1
    return low


def spent_by_round(mechanism: Mechanism, rounds: Sequence[int]) -> list[float]:
    return [_cost(mechanism, n) for n in rounds]


# -- a site ----------------------------------------------------------------------------------------


def reply_cost(algorithm: Algorithm, examples: int, asked: Header) -> Mechanism | None:
    """What one reply costs a real site. A server's secret cohort is nothing that a site can check:
    it counts as known."""
    if asked.trip or asked.evaluate:
        return None
    found = Account(algorithm, asked.population, asked.cohort or 1, lambda _: examples).mechanism(0)
    if found is None or found.unit == "example":
        return found
    return replace(found, sampling="none", rate=1.0)


def as_charge(cost: Mechanism) -> dict[str, Any]:
    """For a line of a ledger."""
    return {k: v for k, v in asdict(cost).items() if k not in ("max_epsilon", "seeded")}


def as_cost(charge: Mapping[str, Any]) -> Mechanism:
    """As a ledger has it."""
    return Mechanism(**charge)


def site_epsilon(cost: Mechanism, charges: Iterable[tuple[str, int]], delta: float) -> float:
    """What a site has spent on its data in all jobs, with this reply, in any order. charges:
    canonical JSON of what its ledger says, and how often. What hides the whole client hides its
    examples too: of both kinds together, that is what is promised."""
    before = [(as_cost(json.loads(text)), times) for text, times in charges]
    return epsilon_of([*before, (cost, 1)], delta)
