"""`audit.html`: one self-contained page in the report's style. It is readable without JavaScript;
with it, all pictures of a row zoom together.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedlens.audit.attack import Attack, Comparison, Finding, Histogram
from fedlens.core.picture import to_uint8
from fedlens.report.html import PAGE

if TYPE_CHECKING:
    from fedlens.audit.audit import AuditResult, Row

_PARTS = Path(__file__).parent / "page_parts"
_PICTURES = 12  # rows of pictures of one attack
HISTOGRAMS = 6
_SMALL = 96  # images with fewer pixels a side are drawn pixel by pixel
UNITS = {"psnr": "PSNR {:.1f} dB", "ssim": "SSIM {:.3f}", "lpips": "LPIPS {:.3f}"}


def render_audit(report: AuditResult) -> str:
    from fedlens.audit.audit import FAILED

    groups = [list(g) for _, g in groupby(report.rows, key=lambda r: r.finding.attack)]
    attacks = {a.name: a for a in report.attacks}
    body = [
        _masthead(report),
        f'<p class="verdict">{_text(report.headline)}</p>',
        f'<p class="caution">{_text(FAILED)} Scores stand beside what somebody would reach who'
        " learned nothing; the time each attack took is printed with it.</p>",
        _overview(groups, attacks),
        *(_section(rows, attacks[rows[0].finding.attack]) for rows in groups),
        _refused(report.refused, attacks),
    ]
    page = (_PARTS / "audit.html").read_text()
    pieces = {
        "title": _text(f"Audit of {report.run} · FedLens"),
        "style": (PAGE / "page.css").read_text() + (_PARTS / "audit.css").read_text(),
        "script": (_PARTS / "audit.js").read_text(),
        "body": "\n".join(body),
    }
    for name, piece in pieces.items():
        page = page.replace(f"<!--{name}-->", piece, 1)
    return page


def _masthead(report: AuditResult) -> str:
    where = "recorded while it ran" if report.recorded else "replayed with the real stack"
    rounds = f"{report.rounds} round{'s' if report.rounds != 1 else ''}"
    return (
        '<header class="masthead"><div><div class="brand">FedLens audit</div>'
        f"<h1>{_text(report.run)}</h1>"
        f'<div class="what"><b>{_text(report.stack)}</b> · {rounds} of messages, {where} ·'
        f" {report.seconds:.0f} s on this machine</div></div></header>"
    )


def _overview(groups: Sequence[Sequence[Row]], attacks: Mapping[str, Attack]) -> str:
    if not groups:
        return ""
    lines = []
    for rows in groups:
        for k, row in enumerate(rows):
            found = row.finding
            name = (
                f'<th scope="row" rowspan="{len(rows)}"><a href="#{found.attack}">'
                f"{_text(attacks[found.attack].title)}</a>"
                f'<span class="soft small">{_text(found.measure)}</span></th>'
            )
            lines.append(
                f"<tr>{name if not k else ''}<td>{_text(row.protection)}"
                f'<span class="soft small">{_text(row.about)}</span></td>'
                f'<td class="num">{_number(found.score)}</td>'
                f'<td class="num">{_number(found.baseline)}</td>'
                f"<td>{_bar(found, rows)}</td>"
                f'<td class="num soft">{_text(row.cost)}</td>'
                f'<td class="num soft">{_seconds(found.seconds)}</td></tr>'
            )
    return (
        '<h2 id="overview">What a protection buys</h2><div class="scroll"><table class="audit">'
        "<thead><tr><th>Attack</th><th>Protection</th><th>Attacker</th><th>Learned nothing</th>"
        "<th>Beyond the baseline</th><th>The run ends with</th><th>Time</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _section(rows: Sequence[Row], attack: Attack) -> str:
    plain = rows[0].finding
    facts = {**plain.numbers, "time": _seconds(plain.seconds), "budget": plain.budget}
    listed = "".join(
        f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts.items() if v
    )
    shown = "".join(_trio(c, plain.unrelated) for c in plain.comparisons[:_PICTURES])
    shown += "".join(map(_histogram, plain.histograms[:HISTOGRAMS]))
    left = len(plain.comparisons) - _PICTURES
    more = f'<p class="soft small">{left} more clients are not drawn.</p>' if left > 0 else ""
    under = "".join(map(_protected, rows[1:]))
    protected = (
        f"<details open><summary>The same attack under protections</summary>{under}</details>"
    )
    return (
        f'<section id="{attack.name}"><h2>{_text(attack.title)}</h2>'
        f'<p>{_text(plain.sentence)}</p><p class="soft small">Method: {_text(attack.paper)}</p>'
        f'<dl class="facts">{listed}</dl>{_first_curve(rows)}{shown}{more}'
        f"{protected if under else ''}</section>"
    )


def _protected(row: Row) -> str:
    found = row.finding
    shown = _trio(found.comparisons[0], found.unrelated) if found.comparisons else ""
    return f'<h3>{_text(row.protection)}</h3><p class="soft">{_text(found.sentence)}</p>{shown}'


def _trio(row: Comparison, unrelated: str) -> str:
    cells = [
        ("truth: never sent", row.truth, {}),
        ("what the attacker has", row.guess, row.scores),
        (unrelated, row.unrelated, row.baseline),
    ]
    figures = "".join(
        _figure(name, image, scores) for name, image, scores in cells if image is not None
    )
    return (
        f'<div class="case"><h3>{_text(row.label)}</h3><div class="trio" tabindex="0"'
        f' aria-label="{_text(row.label)}: zoom by pointing">{figures}</div></div>'
    )


def _figure(name: str, image: Tensor, scores: Mapping[str, float]) -> str:
    said = ", ".join(UNITS[k].format(v) for k, v in scores.items() if k in UNITS)
    tiny = " tiny" if max(image.shape[-2:]) < _SMALL else ""
    return (
        f'<figure><div class="pane{tiny}"><img alt="{_text(name)}" src="{_address(image)}"></div>'
        f"<figcaption>{_text(name)}<span>{_text(said) or '&nbsp;'}</span></figcaption></figure>"
    )


def thumbnails(row: Comparison, most: int = 160) -> list[str]:
    """Truth, guess and the unrelated, small: for the report."""
    images = [x for x in (row.truth, row.guess, row.unrelated) if x is not None]
    step = max(1, max(images[0].shape[-2:]) // most)
    return [_address(x[..., ::step, ::step]) for x in images]


def _address(image: Tensor) -> str:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _bar(found: Finding, rows: Sequence[Row]) -> str:
    """How far beyond the baseline, beside the other rows of this attack."""
    gains = [
        abs(r.finding.score - r.finding.baseline) for r in rows if math.isfinite(r.finding.score)
    ]
    most = max([*gains, 1e-9])
    if not (found.leaks and math.isfinite(found.score)):
        return '<span class="soft small">none</span>'
    share = 100 * abs(found.score - found.baseline) / most
    return f'<span class="bar" style="width:{max(share, 1):.0f}%"></span>'


def _first_curve(rows: Sequence[Row]) -> str:
    """Of the run as it was, or else of the first protection that has one."""
    for row in rows:
        if drawn := _curve(row.finding, "" if row is rows[0] else f" ({row.protection})"):
            return drawn
    return ""


def _histogram(held: Histogram, height: int = 84) -> str:
    """A client's classes: two bars each."""
    most = max([*held.truth, *held.guess, 1e-9])
    bars = []
    for k, pair in enumerate(zip(held.truth, held.guess, strict=True)):
        for j, share in enumerate(pair):
            tall = max(1.0, share / most * (height - 4))
            bars.append(
                f'<rect class="{("held", "said")[j]}" x="{k * 34 + j * 13}"'
                f' y="{height - tall:.1f}" width="12" height="{tall:.1f}"><title>class {k}:'
                f" {100 * share:.0f} %</title></rect>"
            )
        bars.append(f'<text x="{k * 34 + 12}" y="{height + 14}" text-anchor="middle">{k}</text>')
    wide = 34 * len(held.truth)
    return (
        f'<figure class="classes"><figcaption>{_text(held.label)}: images of each class,'
        ' <span class="held">held</span> and <span class="said">read from its message</span>'
        f'</figcaption><svg viewBox="0 0 {wide} {height + 18}" style="max-width:{wide}px"'
        f' role="img" aria-label="classes of {_text(held.label)}">{"".join(bars)}</svg></figure>'
    )


def _curve(found: Finding, of: str = "", width: int = 520, height: int = 120) -> str:
    """Leakage over the rounds, the baseline dashed."""
    points = [(x, y) for x, y in found.curve if math.isfinite(y)]
    if len(points) < 2:
        return ""
    values = [y for _, y in points] + [found.baseline]
    low, high = min(values), max(values)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> str:
        across = 46 + (x - first) / max(last - first, 1) * (width - 60)
        return f"{across:.1f},{height - 22 - (y - low) / max(high - low, 1e-9) * (height - 34):.1f}"

    line = " ".join(place(x, y) for x, y in points)
    base = " ".join(place(x, found.baseline) for x in (first, last))
    return (
        f'<figure class="curve"><figcaption>{_text(found.measure)} over the rounds{_text(of)};'
        f' dashed: learned nothing</figcaption><svg viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{_text(found.measure)} over the rounds">'
        f'<polyline class="base" points="{base}"/><polyline points="{line}"/>'
        f'<text x="0" y="16">{_number(high)}</text>'
        f'<text x="0" y="{height - 22}">{_number(low)}</text>'
        f'<text x="46" y="{height - 4}">round {first + 1}</text>'
        f'<text x="{width - 14}" y="{height - 4}" text-anchor="end">round {last + 1}</text>'
        "</svg></figure>"
    )


def _refused(refused: Sequence[tuple[str, str]], attacks: Mapping[str, Attack]) -> str:
    if not refused:
        return ""
    items = "".join(
        f"<li><b>{_text(attacks[name].title)}</b>: {_text(why)}</li>" for name, why in refused
    )
    return f'<h2 id="refused">Attacks that do not apply here</h2><ul class="refused">{items}</ul>'


def _number(x: float) -> str:
    if not math.isfinite(x):
        return "–"
    return f"{x:.1f}" if abs(x) >= 10 else f"{x:.3f}"


def _seconds(x: float) -> str:
    return f"{x:.1f} s" if x < 90 else f"{x / 60:.1f} min"


def _text(text: str) -> str:
    return html.escape(str(text))
