"""SecureSum: the server learns a sum and nothing else (Bonawitz et al., 2017).

A wire layer over anything that needs only sums. A client writes its reply as whole numbers
(`fixed_point`) and adds masks (`masking`) that cancel in the sum of all replies and in no other.
Trees times each of their weights, the weights themselves and every scalar that is declared as a
mean or a sum go under the mask; scalars that would be read one by one are withheld. In an
evaluation, metrics are summed in the same way.

Trips of a round, `dropouts = "recover"` (double masking):
    greet   once a job: everybody's box key
    deal    everybody's fresh keys for this sum, and boxed shares of their secrets
    work    down: the message and all deals; up: the masked reply
    open    down: who survived; up: shares of the survivors' own masks and of the keys of the lost
Deals for the next round come up with `open`, from those who will be asked then: two trips a round.
Where that is not known, or somebody's deal is missing, three.

`dropouts = "skip"`: pairwise masks only. Deals come up with the work, nothing is ever opened, one
trip a round. A lost reply skips the round: nobody was heard, and memory being a transaction, nobody
remembers. Right for three to five sites, of which one lost leaves too few to hide among anyhow.

A mask belongs to one request: the hash of the message that a client works on is part of every
mask's key. A server that sends one client another model than the others, to tell its part of the
sum from theirs, gets a sum in which the masks do not cancel.

What follows for the stack: whoever was lost or heard follows from whose masks were opened. Clipping
(`saturated` in the state) costs a little of one round where clients remember nothing; where they
do, what a client remembers would no longer be what the server added: the round is skipped, and the
bound is twice as large the next time. A reply with NaN or Inf adds nothing and counts for nothing
(`broken`): a client that failed visibly would tell what a crafted model does to its data. Nobody
can name a liar under a mask; robust layers need single replies and are refused. This cryptography
is unaudited.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge
from torch import Tensor

from fedlens.core.algorithm import (
    Algorithm,
    Brought,
    Layer,
    SiteSettings,
    StackError,
    Stage,
    Trip,
    Trips,
)
from fedlens.core.client import Client
from fedlens.core.message import RING, Header, Message
from fedlens.core.replies import SIZE, Lost, Replies
from fedlens.core.tree import Tree
from fedlens.trust.fixed_point import (
    BROKEN,
    FINE_SHARE,
    MASKED,
    MOST_UNIT,
    SATURATED,
    WRITERS,
    Layout,
    declared_sums,
    decode,
    encode,
    too_coarse,
    unit_of,
)
from fedlens.trust.masking import Streams, Tampered, add_masks, expand, few_masks, fingerprint
from fedlens.trust.roster import (
    FEW,
    Dropouts,
    KnownKeys,
    Purpose,
    Roster,
    SumTerms,
    Wrong,
    check_opening,
    deal,
    greet,
    is_share,
    recover,
    share_count,
)
from fedlens.trust.server_memory import (
    DEAL,
    GREET,
    KEY,
    OPEN_SUM,
    WORK,
    ServerMemory,
    deals_in,
    parsed,
    put_fields,
    read_fields,
)
from fedlens.trust.signing import PublicKey
from fedlens.trust.summand import check_totals, to_numbers, to_replies
from fedlens.trust.vault import Declined, RanBefore, SimulatedVault, Vault, open_vault

ANOTHER_SUM = (
    "this site has added to another sum of this round: the difference of the two would show single"
    " clients; to run the recipe once more, agree on another seed"
)

WRONG = (
    "its share of client {}'s secret fits none: it made it up, or was dealt it; its reply counts,"
    " and the sum was opened without client {}'s shares"
)


class Masks(NamedTuple):
    """Of one client for one reply. about: the sum. key: the client's own in it, its public half."""

    streams: Streams = ()
    about: str = ""
    key: str = ""


@dataclass
class SecureSum(Layer):
    """
    Args:
        dropouts: "recover" opens the sum of those who are left, "skip" gives the round up; "auto"
            skips where no more than five take part.
        min_cohort: fewer never make a sum.
        ring: bits of a tensor's entries; 16 halves what goes up and is for updates of a network.
        masks: false adds the same numbers in the open, for simulations that need not wait for
            keystreams.
    """

    dropouts: Dropouts = "auto"
    min_cohort: Annotated[int, Ge(3)] = 3
    ring: Literal[16, 32] = 32
    masks: bool = True
    stage: ClassVar[Stage] = "wire"
    hides_replies: ClassVar[bool] = True
    post_processes: ClassVar[bool] = True
    weighs: ClassVar[Mapping[str, Sequence[str]]] = {MASKED: (RING,)}
    _vault: Vault | None = field(default=None, init=False, repr=False, compare=False)
    _known: KnownKeys = field(default=KnownKeys(), init=False, repr=False, compare=False)

    def check(self, inner: Algorithm) -> None:
        if self.ring == 16 and not inner.trains:
            raise StackError(
                f"ring=16 is for updates of a network, whose rounding averages out: the replies of"
                f" {type(inner.base).__name__} need ring=32"
            )

    @property
    def _is_noisy(self) -> bool:
        """Does a sum hide clients in noise? Then nothing else is summed about them: tensors keep
        their 64 bits and need no bounds."""
        return any(isinstance(p, Layer) and p.protects == "client" for p in self.inner.parts())

    def check_cohort(self, asked: int) -> None:
        if asked < self.min_cohort:
            raise ValueError(
                f"SecureSum hides a client among at least {self.min_cohort}, but {asked} are asked:"
                " without it, `secure = false`, the server sees what each of them sends"
            )

    def recovers(self, clients: int) -> bool:
        if self.dropouts == "auto":
            return clients > FEW
        return self.dropouts == "recover"

    def quorum(self, asked: int) -> int:
        """All, where none can be made up for."""
        if not self.recovers(asked):
            return max(self.min_cohort, asked)
        return max(self._survivors(asked), share_count(asked))

    def _survivors(self, clients: int) -> int:
        """Of so many, how many must be in a sum for it to hide anybody, and to have its noise."""
        shares = [part.noise_shares(clients) for part in self.inner.parts()]
        return max(self.min_cohort, *shares)

    # -- the server's half: trips ------------------------------------------------------------------

    def init(self) -> Message:
        """The job's name is drawn by chance: no key of another job is ever one of this."""
        return ServerMemory(job=secrets.token_hex(8)).into(self.inner.init())

    def next_trip(self, state: Message, trips: Trips) -> Trip | None:
        memory = ServerMemory.of(state)
        last = trips.made[-1].number if trips.made else None
        if last is None:
            return self._first_trip(state, memory, trips)
        here = trips.replies[-1].senders
        if len(here) < self.min_cohort:
            return None
        if last == GREET:
            memory = self._after(memory, trips)
            if not self.masks:
                return self._work(state, memory, trips, None)
            recovers = self.recovers(len(trips.asked))
            greeted = [i for i in here if i in memory.greetings or not recovers]
            enough = len(greeted) >= self.quorum(len(trips.asked))
            return self._deal(memory, state, trips, greeted) if enough else None
        if last == DEAL:
            terms = SumTerms.read(read_fields(trips.made[-1].message)["terms"])
            dealt = deals_in(trips.replies[-1], terms, self._known)
            if len(dealt) < self.quorum(len(trips.asked)):
                return None
            return self._work(state, self._after(memory, trips), trips, Roster(terms, dealt))
        if last == WORK and self.masks and self.recovers(len(trips.asked)):
            return self._open(state, memory, trips, here)
        return None

    def _after(self, memory: ServerMemory, trips: Trips) -> ServerMemory:
        return memory.with_trips(trips, self.min_cohort, self._known)

    def _first_trip(self, state: Message, memory: ServerMemory, trips: Trips) -> Trip:
        asked = trips.asked
        self.check_cohort(len(asked))
        unnamed = trips.evaluate and memory.metrics is None
        recovers = self.masks and self.recovers(len(asked))
        ungreeted = recovers and not set(asked) <= memory.greetings.keys()
        if unnamed or ungreeted:
            # Clients find out which metrics they have by making them.
            down = self.inner.broadcast(state) if unnamed else Message()
            return Trip(put_fields(down, job=memory.job, metrics=unnamed), asked, GREET)
        if not self.masks:
            return self._work(state, memory, trips, None)
        ready = memory.ready(state.round, asked) if not trips.evaluate else None
        if ready is not None:
            return self._work(state, memory, trips, ready)
        return self._deal(memory, state, trips, asked)

    def _terms(
        self, memory: ServerMemory, number: int, purpose: Purpose, ids: Sequence[int], clients: int
    ) -> SumTerms:
        """Who holds shares are `ids`, of the `clients` that were asked."""
        threshold = share_count(clients) if self.recovers(clients) else 0
        return SumTerms(memory.job, number, purpose, tuple(sorted(ids)), threshold)

    def _deal(self, memory: ServerMemory, state: Message, trips: Trips, ids: Sequence[int]) -> Trip:
        purpose: Purpose = "evaluate" if trips.evaluate else "train"
        terms = self._terms(memory, state.round, purpose, ids, len(trips.asked))
        return Trip(put_fields(Message(), **memory.invitation(terms)), sorted(ids), DEAL)

    def _work(
        self, state: Message, memory: ServerMemory, trips: Trips, roster: Roster | None
    ) -> Trip:
        fields: dict[str, Any] = {"clients": len(trips.asked), "bounds": memory.bounds}
        if roster is not None:
            fields["roster"] = roster.table()
        if trips.evaluate:
            fields["metrics"] = memory.metrics or []
        elif self._invites_early(trips):
            fields |= self._invitation(memory, state, trips)
        ids = sorted(roster.deals) if roster is not None else sorted(trips.asked)
        return Trip(put_fields(self.inner.broadcast(state), **fields), ids, WORK)

    def _invites_early(self, trips: Trips) -> bool:
        """Where nothing is opened, keys for the next round come up with the work."""
        early = self.masks and not self.recovers(len(trips.asked))
        return early and set(trips.upcoming) <= set(trips.asked)

    def _open(
        self, state: Message, memory: ServerMemory, trips: Trips, here: Sequence[int]
    ) -> Trip | None:
        fields = read_fields(trips.made[-1].message)
        if len(here) < self.quorum(len(trips.asked)):
            return None
        lost = sorted(set(trips.made[-1].ids) - set(here))
        fields = {"roster": fields["roster"], "survivors": list(here), "lost": lost}
        ids = set(here)
        memory = self._after(memory, trips)
        if not trips.evaluate and set(trips.upcoming) <= memory.greetings.keys():
            fields |= self._invitation(memory, state, trips)
            ids |= set(trips.upcoming)
        return Trip(put_fields(Message(), **fields), sorted(ids), OPEN_SUM)

    def _invitation(self, memory: ServerMemory, state: Message, trips: Trips) -> dict[str, Any]:
        """To deal for the next round, where it is known who will be asked."""
        if len(trips.upcoming) < self.min_cohort:
            return {}
        ids = trips.upcoming
        terms = self._terms(memory, state.round + 1, "train", ids, len(ids))
        return memory.invitation(terms)

    # -- the server's half: what came --------------------------------------------------------------

    def read(self, state: Message, trips: Trips) -> Brought:
        memory = self._after(ServerMemory.of(state), trips)
        left_out = self._left_out(memory, trips)
        before = [
            x for trip, lost in zip(trips.made, trips.lost) if trip.number != OPEN_SUM for x in lost
        ] + left_out
        at = trips.last(WORK)
        try:
            if at is None:
                here = set(trips.replies[-1].senders) - {x.sender for x in left_out}
                raise Tampered(f"{len(here)} of {len(trips.asked)} took part")
            totals, flats, layout, wrong = self._opened(trips, at)
            least = self.min_cohort if trips.evaluate else 0
            replies = to_replies(layout, totals, flats, trips.replies[at].heard, least)
            if len(replies) - totals[BROKEN] < self.min_cohort:
                raise Tampered(
                    f"{totals[BROKEN]:.0f} of {len(replies)} replies held NaN or Inf: the others"
                    " are too few to hide among"
                )
            if not trips.evaluate:
                memory = memory if self._is_noisy else memory.bounded(layout, totals)
                if too_coarse(layout, totals):
                    raise Tampered(
                        "weights are so small that they need a finer unit, which the next round has"
                    )
                if totals[SATURATED] and totals[WRITERS]:
                    raise Tampered(f"{totals[SATURATED]:.0f} numbers were beyond their bounds")
        except Tampered as e:
            heard = trips.replies[-1 if at is None else at].senders
            lost = [Lost(i, f"the sum was not made: {e}") for i in heard]
            everybody = _by_client([*before, *lost])
            why = f"the sum was not made: {e}{self._blame(_by_client(before), len(trips.asked))}"
            return Brought(memory.into(state), Replies(), everybody, why)
        state = memory.into(state)
        if not trips.evaluate:
            state = state.note(saturated=totals[SATURATED], broken=totals[BROKEN])
        return Brought(state, replies, _by_client([*before, *wrong]))

    def _blame(self, lost: Sequence[Lost], asked: int) -> str:
        """Who was missing first and why, and what would make up for it."""
        if not lost:
            return ""
        said = f"; client {lost[0].sender}: {lost[0].reason}"
        spare = asked - max(self.min_cohort, share_count(asked))
        if self.recovers(asked) or spare < len(lost):
            return said
        return f'{said}; dropouts = "recover" of SecureSum would make up for {spare} of {asked}'

    def _left_out(self, memory: ServerMemory, trips: Trips) -> list[Lost]:
        """Who answered with keys that no site would accept, and was asked nothing more."""
        why = "its keys are missing, are none, or are not signed by it"
        found = []
        for trip, replies in zip(trips.made, trips.replies):
            fine: Collection[int] = replies.heard
            if trip.number == DEAL:
                terms = SumTerms.read(read_fields(trip.message)["terms"])
                fine = deals_in(replies, terms, self._known)
            elif trip.number == GREET and self.masks and self.recovers(len(trips.asked)):
                fine = memory.greetings
            found += [Lost(i, why, refused=True) for i in replies.heard if i not in fine]
        return found

    def _opened(
        self, trips: Trips, at: int
    ) -> tuple[dict[str, float], dict[int, Tensor], Layout, list[Lost]]:
        """The sums without masks: the few numbers by name, and tensors by width. And whose shares
        were wrong, though its reply is in the sum.
        """
        message, replies = trips.made[at].message, trips.replies[at]
        layout = self._layout(message)
        if not len(replies):
            raise Tampered("nobody was heard")
        left: Streams = []
        wrong: Wrong = {}
        if self.masks:
            left, wrong = self._left(trips, at, replies.senders)
        sums = replies.ring_sum(MASKED)
        flats = {bits: sums[f"ring{bits}"] for bits in layout.widths()}
        masks = few_masks(left, len(layout.names))
        add_masks(list(flats.values()), [(expand(k, "flat"), not plus) for k, plus in left])
        values = decode(sums["few"], masks)
        totals = dict(zip(layout.names, values, strict=True))
        check_totals(layout, message, totals, len(replies))
        odd = [Lost(i, WRONG.format(wrong[i], i), refused=True) for i in sorted(wrong)]
        return totals, flats, layout, odd

    def _left(self, trips: Trips, at: int, survivors: Sequence[int]) -> tuple[Streams, Wrong]:
        """The streams that are still in the sum, and whose shares of them were wrong."""
        roster = Roster.read(read_fields(trips.made[at].message)["roster"])
        if not roster.terms.threshold:
            if missing := sorted(roster.deals.keys() - set(survivors)):
                raise Tampered(f"without client {missing[0]} the masks do not cancel")
            return [], {}
        need = self.quorum(len(trips.asked))
        if trips.made[-1].number != OPEN_SUM:
            raise Tampered(f"{len(survivors)} of {len(roster.deals)} were heard, not {need}")
        shares = {}
        for i, h in trips.replies[-1].heard.items():
            found = parsed(h.texts.get(KEY, "")).get("shares")
            if i in survivors and isinstance(found, Mapping):
                shares[i] = {k: v for k, v in found.items() if is_share(v)}
        return recover(roster, survivors, shares, trips.made[at].message.digest())

    def server_step(self, state: Message, replies: Replies) -> Message:
        return replace(self.inner.server_step(state, replies), texts=state.texts)

    # -- what a reply looks like -------------------------------------------------------------------

    def _layout(self, message: Message) -> Layout:
        return message.derived("layout", lambda: self._make_layout(message))

    def _make_layout(self, message: Message) -> Layout:
        fields = read_fields(message)
        header = message.header
        # a message that nobody was asked with is looked at to estimate what it would cost
        clients = fields.get("clients", header.cohort or header.population)
        if type(clients) is not int or not 1 <= clients < 1 << 20:
            raise Declined("the message does not say how many are to add")
        if message.header.evaluate:
            names = [str(name) for name in fields.get("metrics", [])]
            return Layout.of({}, {}, [SIZE, *names], {}, clients, self.ring)
        bounds = {str(k): int(e) for k, e in fields.get("bounds", {}).items()}
        if any(abs(e) > MOST_UNIT for e in bounds.values()):
            raise Declined("the message has a bound that is out of all proportion")
        if self._is_noisy and (bounds or clients != (header.cohort or header.population)):
            raise Declined("where clients add noise, no server decides how numbers are rounded")
        return Layout.of(
            self.inner.expects(message),
            self.inner.weighing(),
            list(declared_sums(self.inner.declared())),
            bounds,
            clients,
            self.ring,
        )

    def expects(self, message: Message) -> Mapping[str, Tree]:
        return self._layout(message).expects()

    def answers(self, message: Message) -> Mapping[str, Tree]:
        return {} if message.header.trip else self.expects(message)

    # -- a client's half ---------------------------------------------------------------------------

    def client_step(self, message: Message, client: Client) -> Message:
        fields, vault = read_fields(message), self._vault_of(message, client)
        trip = message.header.trip
        if trip == GREET:
            return put_fields(Message(), **self._greeting(fields, message, client, vault))
        if trip == DEAL:
            return put_fields(Message(), **self._dealt(fields, message, client, vault))
        if trip == OPEN_SUM:
            return put_fields(Message(), **self._shares(fields, message, client, vault))
        if trip != WORK:  # would be neither charged nor remembered
            raise Declined(f"{trip} is no trip of a round")
        masks = self._masks(fields, message, client, vault)
        layout = self._layout(message)
        self._check_rounding(message, layout)
        reply = self.inner.client_step(message, client)
        values, flats = to_numbers(layout, self.inner.declared(), message, client, reply)
        if self._is_noisy:
            values |= {name: 0.0 for name in values if name.startswith("moment ")}
        masked = self._masked(layout, values, flats, masks, vault)
        return replace(
            masked, texts=put_fields(Message(), **self._invited(fields, client, vault)).texts
        )

    def _check_rounding(self, message: Message, layout: Layout) -> None:
        """A client's share of the noise must be far above what numbers are rounded to, or rounding
        takes it away: a server that sends a tiny clip would see counts without noise."""
        least = min(part.share_noise(message) for part in self.inner.parts())
        if not least >= FINE_SHARE * unit_of(layout.clients):
            raise Declined(f"noise of {least:.2g} would be lost in rounding: the clip is too small")

    def score(self, message: Message, client: Client) -> Message:
        fields, vault = read_fields(message), self._vault_of(message, client)
        masks = self._masks(fields, message, client, vault)
        scores = self._common_scores(message, client)
        layout = self._layout(message)
        values = dict.fromkeys(layout.names, 0.0)
        for name, value in scores.items():
            if f"value {name}" in values and math.isfinite(value):
                values[f"value {name}"], values[f"count {name}"] = value, 1.0
        reply = self._masked(layout, values, {}, masks, vault)
        return replace(reply, sender=client.id, header=Header(round=message.round))

    def _common_scores(self, message: Message, client: Client) -> dict[str, float]:
        """A client's metrics, without those whose names alone tell something about its data."""
        telling = getattr(getattr(self.inner.base, "task", None), "telling", ())
        scalars = super().score(message, client).scalars
        return {name: value for name, value in scalars.items() if not name.startswith(telling)}

    def _vault_of(self, message: Message, client: Client) -> Vault:
        return self._vault or SimulatedVault(message.header.seed, client.id)

    def _greeting(
        self, fields: Mapping[str, Any], message: Message, client: Client, vault: Vault
    ) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if fields.get("metrics") and message.header.evaluate:
            out["metrics"] = sorted(n for n in self._common_scores(message, client) if n != SIZE)
        if self.masks and self.dropouts != "skip":
            out["greeting"] = greet(vault, client.id, str(fields["job"]))
        return out

    def _dealt(
        self, fields: Mapping[str, Any], message: Message, client: Client, vault: Vault
    ) -> dict[str, Any]:
        terms = SumTerms.read(fields.get("terms"))
        purpose = "evaluate" if message.header.evaluate else "train"
        if terms.round not in (message.round, message.round + 1) or terms.purpose != purpose:
            raise Declined("keys are asked for, but for another round")
        if client.id not in terms.holders:
            raise Declined(f"client {client.id} is not among those who are to take part")
        return self._invited(fields, client, vault)

    def _invited(self, fields: Mapping[str, Any], client: Client, vault: Vault) -> dict[str, Any]:
        """Fresh keys for the sum of these terms, if this client was invited to it."""
        if "terms" not in fields:
            return {}
        terms = SumTerms.read(fields["terms"])
        if client.id not in terms.holders:
            return {}
        terms.check(self.min_cohort, self.dropouts)
        greetings = {int(i): g for i, g in fields.get("greetings", {}).items()}
        return {"deal": deal(vault, client.id, terms, greetings).table()}

    def _masks(
        self, fields: Mapping[str, Any], message: Message, client: Client, vault: Vault
    ) -> Masks:
        """What this client adds to its reply, after every check and before any work; nothing where
        there are no masks.
        """
        if not self.masks:
            return Masks()
        roster = self._checked(fields, message, client, vault)
        mine, request = roster.deals[client.id].mask, message.digest()
        vault.lock(roster.terms.about, f"roster {mine}", roster.hash)
        vault.lock(roster.terms.about, f"work {mine}", request)
        if self.keeps_secrets:
            self._keep_to_one_sum(roster, message, client, vault)
        vault.forget(roster.terms.about)
        return Masks(roster.streams(vault, client.id, request), roster.terms.about, mine)

    def _masked(
        self,
        layout: Layout,
        values: Mapping[str, float],
        flats: Mapping[int, Tensor],
        masks: Masks,
        vault: Vault,
    ) -> Message:
        """A reply: whole numbers with masks added, tensors in place. A site's masks hide one set of
        numbers ever, whatever those follow from: its memory, which a server may call by another
        job's name, the round in which it was heard, noise. The difference of two would be in clear.
        """
        numbers = list(values.values())
        if self.keeps_secrets:
            plain = _in_ring(encode(numbers), flats).digest()
            vault.lock(masks.about, f"numbers {masks.key}", plain)
        streams = masks.streams
        add_masks(list(flats.values()), [(expand(key, "flat"), plus) for key, plus in streams])
        return _in_ring(encode(numbers, few_masks(streams, len(layout.names))), flats)

    def _keep_to_one_sum(
        self, roster: Roster, message: Message, client: Client, vault: Vault
    ) -> None:
        """A round of the recipe comes to one sum, of one set of clients, whatever the server calls
        the job and however often it asks: two would show in their difference who is in one only,
        or one client's own change of memory. Before masks are opened another attempt is free.
        """
        about, mine = roster.terms.about, roster.deals[client.id].mask
        whole = vault.begin(message.round, roster.terms.purpose, mine)
        content = _content(message, client)
        vault.lock(about, f"content {mine}", content)
        if not roster.terms.threshold:
            vault.lock(
                whole, "survivors", fingerprint(*map(str, roster.deals)), RanBefore(ANOTHER_SUM)
            )
        if not roster.terms.threshold or vault.locked(whole, "content") is not None:
            vault.lock(whole, "content", content, RanBefore(ANOTHER_SUM))

    def _checked(
        self, fields: Mapping[str, Any], message: Message, client: Client, vault: Vault
    ) -> Roster:
        if "roster" not in fields:
            raise Declined("a reply without masks is asked for")
        roster = Roster.read(fields["roster"])
        purpose = "evaluate" if message.header.evaluate else "train"
        if (roster.terms.round, roster.terms.purpose) != (message.round, purpose):
            raise Declined(
                f"the keys are for round {roster.terms.round} ({roster.terms.purpose}), the message"
                f" is of round {message.round} ({purpose})"
            )
        vault.check_agreed(message.header)
        roster.check(vault, client.id, self.min_cohort, self.dropouts, _asked(message))
        return roster

    def _shares(
        self, fields: Mapping[str, Any], message: Message, client: Client, vault: Vault
    ) -> dict[str, Any]:
        invited = self._invited(fields, client, vault)
        if client.id not in fields.get("survivors", []) and invited:
            return invited
        roster = self._checked(fields, message, client, vault)
        about, mine = roster.terms.about, roster.deals[client.id].mask
        survivors = check_opening(
            roster,
            client.id,
            fields.get("survivors"),
            fields.get("lost"),
            self._survivors(0 if message.header.evaluate else _asked(message)),
        )
        content = vault.locked(about, f"content {mine}")
        if content is None:
            raise Declined("a sum is to be opened that this site has added nothing to")
        vault.lock(about, f"roster {mine}", roster.hash)
        vault.lock(about, f"open {mine}", fingerprint(*map(str, survivors)))
        whole = vault.begin(message.round, roster.terms.purpose, mine)
        vault.lock(whole, "content", content, RanBefore(ANOTHER_SUM))
        vault.lock(whole, "survivors", fingerprint(*map(str, survivors)), RanBefore(ANOTHER_SUM))
        return {"shares": roster.open(vault, client.id, survivors), **invited}

    # -- a real server -----------------------------------------------------------------------------

    def with_known(self, keys: Mapping[int, PublicKey]) -> SecureSum:
        """This layer at a server that knows with which key each client signs."""
        layer = copy.copy(self)
        layer._known = KnownKeys(keys)
        return layer

    # -- a real site -------------------------------------------------------------------------------

    @property
    def keeps_secrets(self) -> bool:
        return self._vault is not None

    def at_site(self, site: SiteSettings) -> Algorithm:
        layer = super().at_site(site)
        assert isinstance(layer, SecureSum)
        return layer.with_vault(open_vault(site), site.least)

    def with_vault(self, vault: Vault, least: int = 0) -> SecureSum:
        """This layer at a real site, with secrets of its own. least: clients in a sum that the
        site's own policy wants, if that is more than the recipe does.
        """
        if not self.masks:
            raise Declined("masks = false is for simulations: it hides nothing")
        layer = copy.copy(self)
        layer._vault, layer.min_cohort = vault, max(self.min_cohort, least)
        return layer


def _in_ring(few: Tensor, flats: Mapping[int, Tensor]) -> Message:
    tree = {"few": few, **{f"ring{bits}": t for bits, t in flats.items()}}
    return Message({MASKED: tree}, weights={MASKED: {RING: 1.0}})


def _content(message: Message, client: Client) -> str:
    """What a client's reply follows from, besides keys and its data."""
    fields = {
        k: v for k, v in read_fields(message).items() if k in ("clients", "bounds", "metrics")
    }
    asked = put_fields(replace(message, texts={**message.texts, KEY: ""}), **fields)
    memory = Message({name: client.memory[name] for name in sorted(client.memory)})
    return fingerprint(asked.digest(), memory.digest())


def _asked(message: Message) -> int:
    """How many the server says that it asks."""
    return message.header.population if message.header.evaluate else message.header.cohort


def _by_client(lost: Sequence[Lost]) -> list[Lost]:
    """One line a client, the first."""
    found: dict[int, Lost] = {}
    for item in lost:
        found.setdefault(item.sender, item)
    return [found[i] for i in sorted(found)]
