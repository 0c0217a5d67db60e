"""One audit: messages, attacks, the same attacks under protections; a folder `audit/` and a
page.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlens.audit.attack import Attack, Comparison, Evidence, Finding
from fedlens.audit.evidence import Messages, collect, finish, hides_singles, open_run, replay
from fedlens.audit.feddeblur import CuriousDeblurring
from fedlens.audit.gradient import GradientInversion
from fedlens.audit.labels import LabelCounts
from fedlens.audit.linear import LinearInversion
from fedlens.audit.membership import Membership
from fedlens.audit.properties import ClassCounts, Resolution
from fedlens.audit.protections import DEBLURRING, SECURE_SUM, TRAINING, WORST_CASE, Protection
from fedlens.config.convert import suggestion
from fedlens.core.files import write_atomically
from fedlens.core.log import Log
from fedlens.engines.recorder import Exchange
from fedlens.engines.worker import threads
from fedlens.runs.setup import Setup

ATTACKS: tuple[Attack, ...] = (
    CuriousDeblurring(),
    LabelCounts(),
    LinearInversion(),
    GradientInversion(),
    Membership(),
    ClassCounts(),
    Resolution(),
)
_ROUNDS = 12  # that are replayed of a run that trains nothing
_FEW = 3  # clients that are attacked under a protection
FAILED = "An attack that fails proves nothing: another one, or more time, may succeed."


@dataclass(frozen=True)
class Row:
    """One attack under one protection. cost: what the protection does to the result."""

    protection: str
    about: str
    finding: Finding
    cost: str = ""


@dataclass(frozen=True)
class AuditResult:
    """Everything the page shows. refused: attacks that do not apply, and why. hidden: the run
    itself hid single replies; its "plain" rows are then what would be seen without that.
    """

    run: str
    stack: str
    recorded: bool
    rounds: int
    rows: Sequence[Row]
    refused: Sequence[tuple[str, str]]
    attacks: Sequence[Attack] = field(default=ATTACKS, repr=False)
    seconds: float = 0.0
    hidden: bool = False

    @property
    def headline(self) -> str:
        behind = [r.finding for r in self.rows if r.protection == SECURE_SUM.name]
        if self.hidden and behind:
            return f"Behind SecureSum, which this run had: {behind[0].sentence}"
        plain = [r.finding for r in self.rows if r.protection == PLAIN.name]
        if not plain:
            return "No attack applies to this run, which proves nothing about it."
        leaking = [f for f in plain if f.leaks]
        if leaking:
            return leaking[0].sentence
        many = f"None of the {len(plain)} attacks that apply got"
        which = many if len(plain) > 1 else "The one attack that applies did not get"
        return f"{which} beyond what somebody has who saw no message."

    @property
    def picture(self) -> tuple[str, Comparison] | None:
        """What to show first: a picture that leaked, from the run itself if there is one."""
        ordered = sorted(self.rows, key=lambda r: (not r.finding.leaks, r.protection != PLAIN.name))
        for row in ordered:
            if row.finding.comparisons:
                shown = row.finding.comparisons[0]
                return f"{row.finding.attack}, {row.protection}, {shown.label}", shown
        return None


PLAIN = Protection("plain", "as the run was")


def choose_attacks(
    setup: Setup, names: Sequence[str]
) -> tuple[list[Attack], list[tuple[str, str]]]:
    """Those that apply, and why the others do not. One that was asked for by name must apply."""
    known = {a.name: a for a in ATTACKS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no attack {name!r}{suggestion(name, list(known))}")
        if why := known[name].applies(setup):
            raise ValueError(f"the attack {name} does not apply to this run: {why}")
    wanted = [known[n] for n in names] or list(ATTACKS)
    reasons = [(a.name, a.applies(setup)) for a in wanted]
    chosen = [a for a, (_, why) in zip(wanted, reasons, strict=True) if not why]
    return chosen, [(n, why) for n, why in reasons if why]


def audit(
    folder: Path,
    *,
    clients: Sequence[int] = (),
    attacks: Sequence[str] = (),
    minutes: float = 2.0,
    rounds: int = _ROUNDS,
    protections: bool = True,
    log: Log = lambda text: None,
) -> AuditResult:
    """Attack what a run sent; nothing is written."""
    began = time.perf_counter()
    setup = open_run(folder)
    chosen, refused = choose_attacks(setup, attacks)
    source = collect(folder, setup, rounds)
    everyone = heard_first(source.exchanges)
    for client in clients:
        if client not in everyone:
            raise ValueError(
                f"client {client} sent nothing in these rounds: there are"
                f" {', '.join(map(str, sorted(everyone)[:20]))}"
            )
    whom = list(clients) or everyone
    evidence = Evidence(setup, source.exchanges, whom, minutes)
    rows: list[Row] = []
    for attack in chosen:
        rows += run_attack(attack, evidence, source, protections, log)
    if protections:
        spent = costs(setup, source, list(dict.fromkeys(r.protection for r in rows)), minutes)
        rows = [replace(r, cost=spent.get(r.protection, "")) for r in rows]
    return AuditResult(
        folder.resolve().name, setup.stack, source.recorded, len(source.exchanges), rows, refused,
        seconds=time.perf_counter() - began, hidden=hides_singles(setup),
    )  # fmt: skip


def run_attack(
    attack: Attack, evidence: Evidence, source: Messages, protections: bool, log: Log
) -> list[Row]:
    """Plain, then under each protection; the minutes are for all of them together."""
    rows: list[Row] = []
    wanted = [PLAIN, *(attack.protections if protections else ())]
    share = replace(evidence, minutes=evidence.minutes / len(wanted))
    for protection in wanted:
        given = under(protection, share, source)
        found = timed(attack, given)
        name = "" if protection is PLAIN else f", {protection.name}"
        log(f"{attack.name}{name}: {found.sentence} ({found.seconds:.1f} s)")
        rows.append(Row(protection.name, protection.about, found))
    return rows


def under(protection: Protection, evidence: Evidence, source: Messages) -> Evidence:
    """What the server holds of the same run under a protection. Fewer clients: it is a row in a
    table.
    """
    if protection is PLAIN:
        return replace(evidence, over_rounds=True)
    few = replace(evidence, clients=list(evidence.clients)[:_FEW])
    if protection.probe is not None:
        over = protection is WORST_CASE
        return replace(few, probe=protection.probe, over_rounds=over)
    exchanges = source.exchanges
    if protection.change:
        setup = protection.change(evidence.setup, exchanges)
        again = replay(setup, rounds_for(few))
        few, exchanges = replace(few, setup=setup), again.exchanges
    return replace(few, exchanges=protection.seen(exchanges), seen=protection.seen)


def heard_first(exchanges: Sequence[Exchange]) -> list[int]:
    """All clients that were heard, the first ones first."""
    return list(dict.fromkeys(i for e in exchanges for i in sorted(e.replies)))


def rounds_for(evidence: Evidence) -> int:
    """How many rounds show what there is to see: all where nothing is trained, else until the first
    of these clients is heard.
    """
    if not evidence.setup.algorithm.trains:
        return len(evidence.exchanges)
    heard = [any(c in e.replies for c in evidence.clients) for e in evidence.exchanges]
    return heard.index(True) + 1


def costs(setup: Setup, source: Messages, names: Sequence[str], minutes: float) -> dict[str, str]:
    """What the whole run ends with, plain and under each of these protections, as far as there is
    time.
    """
    known = {p.name: p for p in (PLAIN, *DEBLURRING, *TRAINING)}
    ends = time.perf_counter() + 60 * minutes
    found: dict[str, str] = {}
    for name in names:
        change = known[name].change if name in known else None
        if name == PLAIN.name or change:
            changed = change(setup, source.exchanges) if change else setup
            found[name] = _metrics(finish(changed, ends - time.perf_counter()))
        elif name == SECURE_SUM.name:  # its fixed point changes the last digits at most
            found[name] = found.get(PLAIN.name, "")
    return found


def timed(attack: Attack, evidence: Evidence) -> Finding:
    began = time.perf_counter()
    with threads(evidence.setup.settings.threads):  # small arrays: more of them only wait
        found = attack.run(evidence)
    return replace(found, seconds=time.perf_counter() - began)


def _metrics(metrics: dict[str, float] | None) -> str:
    if metrics is None:
        return "not run again: it takes longer than the budget"
    return ", ".join(f"{k} {v:.3f}" for k, v in list(metrics.items())[:2])


def write_audit(report: AuditResult, folder: Path) -> Path:
    """`audit.json` and `audit.html` into the run folder, and the report once more, which has a
    section about it; returns the page.
    """
    from fedlens.audit.page import render_audit
    from fedlens.report.html import write_report

    write_atomically(folder / "audit.json", json.dumps(audit_table(report), indent=1))
    write_atomically(folder / "audit.html", render_audit(report), sync=False)
    write_report(folder)
    return folder / "audit.html"


def audit_table(report: AuditResult) -> dict[str, Any]:
    """Numbers only: for tables and for the report."""
    from fedlens.audit.page import thumbnails

    shown = report.picture
    return {
        "headline": report.headline,
        "picture": shown and {"label": shown[0], "images": thumbnails(shown[1])},
        "run": report.run,
        "stack": report.stack,
        "recorded": report.recorded,
        "rounds": report.rounds,
        "seconds": round(report.seconds, 2),
        "rows": [
            {
                "attack": r.finding.attack,
                "protection": r.protection,
                "measure": r.finding.measure,
                "score": _finite(r.finding.score),
                "baseline": _finite(r.finding.baseline),
                "smaller_leaks": r.finding.smaller_leaks,
                "sentence": r.finding.sentence,
                "numbers": dict(r.finding.numbers),
                "seconds": round(r.finding.seconds, 2),
                "budget": r.finding.budget,
                "result": r.cost,
            }
            for r in report.rows
        ],
        "refused": dict(report.refused),
        "caution": FAILED,
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
