"""One audit: messages, attacks, the same attacks under protections; a folder `audit/` and a
page.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlens.audit.attack import Attack, Evidence, Finding
from fedlens.audit.evidence import (
    SECURE_SUM,
    Messages,
    Protection,
    collect,
    hides_singles,
    noisy,
    open_run,
    replay,
)
from fedlens.audit.feddeblur import CuriousDeblurring
from fedlens.audit.gradient import GradientInversion
from fedlens.audit.labels import LabelCounts
from fedlens.audit.linear import LinearInversion
from fedlens.audit.membership import Membership
from fedlens.audit.probe import Probe
from fedlens.audit.properties import ClassCounts, Resolution
from fedlens.config.convert import suggestion
from fedlens.core.files import write_atomically
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
ROUNDS = 12  # that are replayed of a run that trains nothing
MOST = 4  # clients that are attacked where an attack has to search and nobody said whom
FAILED = "An attack that fails proves nothing: another one, or more time, may succeed."

Log = Callable[[str], None]


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
        leaking = [f for f in plain if f.leaks]
        if not plain:
            return "No attack applies to this run, which proves nothing about it."
        return (leaking or plain)[0].sentence


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
    rounds: int = ROUNDS,
    protections: bool = True,
    log: Log = lambda text: None,
) -> AuditResult:
    """Attack what a run sent; nothing is written."""
    began = time.perf_counter()
    setup = open_run(folder)
    chosen, refused = choose_attacks(setup, attacks)
    source = collect(folder, setup, rounds)
    everyone = sorted({i for e in source.exchanges for i in e.replies})
    for client in clients:
        if client not in everyone:
            raise ValueError(
                f"client {client} sent nothing in these rounds: there are"
                f" {', '.join(map(str, everyone[:20]))}"
            )
    whom = list(clients) or everyone
    evidence = Evidence(setup, source.exchanges, whom, minutes)
    rows: list[Row] = []
    for attack in chosen:
        rows += run_attack(attack, evidence, source, protections, log)
    return AuditResult(
        folder.resolve().name, setup.stack, source.recorded, len(source.exchanges), rows, refused,
        seconds=time.perf_counter() - began, hidden=hides_singles(setup),
    )  # fmt: skip


def run_attack(
    attack: Attack, evidence: Evidence, source: Messages, protections: bool, log: Log
) -> list[Row]:
    """Plain, then under each protection that makes sense for it."""
    plain = timed(attack, evidence)
    log(f"{attack.name}: {plain.sentence} ({plain.seconds:.1f} s)")
    rows = [Row(PLAIN.name, PLAIN.about, plain, _metrics(source.metrics))]
    few = replace(evidence, clients=list(evidence.clients)[:3])
    for probe in getattr(attack, "probes", ()) if protections else ():
        found = timed(attack, few, probe)
        log(f"{attack.name}, {probe.name}: {found.sentence} ({found.seconds:.1f} s)")
        rows.append(Row(probe.name, probe.about, found))
    for protection in protections_of(attack) if protections else ():
        setup, metrics, exchanges = evidence.setup, source.metrics, source.exchanges
        if protection.change:
            setup = protection.change(evidence.setup)
            again = replay(setup, len(source.exchanges))
            exchanges, metrics = again.exchanges, again.metrics
        found = timed(attack, replace(few, setup=setup, exchanges=protection.seen(exchanges)))
        log(f"{attack.name}, {protection.name}: {found.sentence} ({found.seconds:.1f} s)")
        rows.append(Row(protection.name, protection.about, found, _metrics(metrics)))
    return rows


def protections_of(attack: Attack) -> Sequence[Protection]:
    own: Sequence[Protection] | None = getattr(attack, "protections", None)
    if own is not None or hasattr(attack, "probes"):
        return own or ()
    return (
        Protection("noise 1 %", "Gaussian noise of 1 % on every number of w - x", noisy(0.01)),
        Protection("noise 10 %", "Gaussian noise of 10 % on every number of w - x", noisy(0.1)),
        SECURE_SUM,
    )


def timed(attack: Any, evidence: Evidence, *probe: Probe) -> Finding:
    began = time.perf_counter()
    with threads(evidence.setup.settings.threads):  # small arrays: more of them only wait
        found: Finding = attack.run(evidence, *probe)
    return replace(found, seconds=time.perf_counter() - began)


def _metrics(metrics: dict[str, float]) -> str:
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
    return {
        "headline": report.headline,
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
