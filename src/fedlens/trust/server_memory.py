"""What a server of SecureSum remembers between rounds, and the text by which it and its clients
speak: JSON under the key "secure" of a message, of a reply, and of the state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedlens.core.algorithm import Trip, Trips
from fedlens.core.message import Message
from fedlens.core.replies import MOST_SCALARS, Lost, Replies, is_name
from fedlens.trust.fixed_point import Layout, next_bounds
from fedlens.trust.roster import Deal, KnownKeys, Roster, SumTerms
from fedlens.trust.vault import Declined

WORK, GREET, DEAL, OPEN_SUM = 0, 1, 2, 3  # the trips of a round
KEY = "secure"


def put_fields(message: Message, **fields: Any) -> Message:
    if not fields:
        return message
    return replace(message, texts={**message.texts, KEY: json.dumps(fields)}, _derived={})


def read_fields(message: Message) -> dict[str, Any]:
    return message.derived("fields", lambda: parsed(message.texts.get(KEY, "{}")))


def parsed(text: str) -> dict[str, Any]:
    """Somebody else's JSON; nothing where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def common_names(said: Iterable[Mapping[str, Any]], least: int) -> list[str]:
    """The metrics that at least so many clients say they have; of what is no list of so many short
    names, nothing. One that fewer have is not shown anyway: it would be theirs.
    """
    voices: Counter[str] = Counter()
    for names in (table.get("metrics") for table in said):
        if isinstance(names, list) and len(names) <= MOST_SCALARS:
            voices.update({n for n in names if isinstance(n, str) and is_name(n)})
    return sorted(n for n, times in voices.items() if times >= least)


def deals_in(replies: Replies, terms: SumTerms, known: KnownKeys) -> dict[int, Deal]:
    """By client, of those among the holders who dealt keys of their own that sites accept."""
    found = {}
    for i, heard in replies.heard.items():
        table = parsed(heard.texts.get(KEY, "")).get("deal")
        if table is None or i not in terms.holders:
            continue
        try:
            found[i] = Deal.read(i, table)
        except Declined:
            continue
    masks = Counter(deal.mask for deal in found.values())
    return {i: d for i, d in found.items() if masks[d.mask] == 1 and known.accept_deal(d, terms)}


@dataclass(frozen=True)
class ServerMemory:
    """What the server remembers between rounds, in the state's text.

    greetings: box keys by client. dealt: terms and deals of the next sum. bounds: exponents, by
    tensor. metrics: names of what clients evaluate, None while unknown."""

    job: str
    greetings: Mapping[int, Any] = field(default_factory=dict)
    dealt: Mapping[str, Any] | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)
    metrics: Sequence[str] | None = None

    @staticmethod
    def of(state: Message) -> ServerMemory:
        if KEY not in state.texts:
            raise ValueError(
                "this state was made without SecureSum: such a run cannot go on with it"
            )
        table = json.loads(state.texts[KEY])
        greetings = {int(i): g for i, g in table["greetings"].items()}
        return ServerMemory(**{**table, "greetings": greetings})

    def into(self, state: Message) -> Message:
        table = {**self.__dict__, "greetings": {str(i): g for i, g in self.greetings.items()}}
        return replace(state, texts={**state.texts, KEY: json.dumps(table)}, _derived={})

    def invitation(self, terms: SumTerms) -> dict[str, Any]:
        greetings = {str(i): self.greetings[i] for i in terms.holders if terms.threshold}
        return {"terms": terms.table(), "greetings": greetings}

    def ready(self, number: int, asked: Sequence[int]) -> Roster | None:
        """The deals for this round, if they are everybody's."""
        if self.dealt is None:
            return None
        roster = Roster.read(self.dealt)
        terms = roster.terms
        fits = terms.round == number and list(terms.holders) == sorted(asked)
        return roster if fits and roster.deals.keys() == set(asked) else None

    def with_trips(self, trips: Trips, least: int, known: KnownKeys) -> ServerMemory:
        """With what the trips of a round brought, besides sums. least: clients in a sum."""
        memory = self if trips.evaluate else replace(self, dealt=None)
        for trip, replies, lost in zip(trips.made, trips.replies, trips.lost, strict=True):
            memory = memory._with_trip(trip, replies, lost, least, known)
        return memory

    def _with_trip(
        self, trip: Trip, replies: Replies, lost: Sequence[Lost], least: int, known: KnownKeys
    ) -> ServerMemory:
        said = {i: parsed(h.texts.get(KEY, "")) for i, h in replies.heard.items()}
        fields = read_fields(trip.message)
        memory = self
        if trip.number == GREET:
            greetings = {i: table.get("greeting") for i, table in said.items()}
            new = {i: g for i, g in greetings.items() if known.accept_greeting(i, self.job, g)}
            memory = replace(memory, greetings={**memory.greetings, **new})
            if fields.get("metrics"):
                memory = replace(memory, metrics=common_names(said.values(), least) or None)
        if trip.number == WORK:
            # whoever could not mask its reply may have lost its box key: it is asked for a new one
            gone = {x.sender for x in lost}
            kept = {i: g for i, g in memory.greetings.items() if i not in gone}
            memory = replace(memory, greetings=kept)
        if trip.number in (WORK, OPEN_SUM) and "terms" in fields:
            terms = SumTerms.read(fields["terms"])
            roster = Roster(terms, deals_in(replies, terms, known))
            memory = replace(memory, dealt=roster.table())
        return memory

    def bounded(self, layout: Layout, totals: Mapping[str, float]) -> ServerMemory:
        return replace(self, bounds=next_bounds(layout, totals))
