"""Is one algorithm of a comparison really ahead? Paired over seeds, because a seed gives all of
them the same split and the same first weights: Wilcoxon's signed-rank test (1945) of each against
the one with the best mean, two-sided, with Holm's correction (1979) for their number.

Where the seeds are so few that no outcome could reach the level, nothing is called a tie or a win:
the answer is how many it would take.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.core.direction import smaller_is_better

LEVEL = 0.05


def signed_rank(differences: Sequence[float]) -> float:
    """The p-value of Wilcoxon's test that the differences are around 0."""
    from scipy.stats import wilcoxon

    moved = [d for d in differences if d != 0]
    return float(wilcoxon(moved).pvalue) if moved else 1.0


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Each p-value as it counts among so many: the k-th smallest of m times m - k + 1, and never
    below the one before it.
    """
    ordered = sorted(p.items(), key=lambda item: item[1])
    raised = [min(1.0, value * (len(p) - k)) for k, (_, value) in enumerate(ordered)]
    highest = itertools.accumulate(raised, max)
    return {name: value for (name, _), value in zip(ordered, highest, strict=True)}


def seeds_needed(rivals: int) -> int:
    """The fewest with which the clearest outcome, the same sign everywhere, reaches the level."""
    return next(n for n in itertools.count(2) if rivals * 2 / 2**n <= LEVEL)


def compare_to_best(
    values: Mapping[str, Sequence[float | None]], metric: str
) -> dict[str, Any] | None:
    """values: of one metric, by algorithm, a number a seed in the same order. Nothing where there
    is nothing to compare.
    """
    known = {n: v for n, v in values.items() if v and all(x is not None for x in v)}
    seeds = min((len(v) for v in known.values()), default=0)
    if len(known) < 2 or seeds < 2 or len({len(v) for v in known.values()}) > 1:
        return None
    sign = -1.0 if smaller_is_better(metric) else 1.0
    best = max(known, key=lambda n: sign * sum(x for x in known[n] if x is not None))
    gaps = {
        n: [float(a) - float(b) for a, b in zip(known[best], v, strict=True)]  # type: ignore[arg-type]
        for n, v in known.items()
        if n != best
    }
    p = holm({n: signed_rank(d) for n, d in gaps.items()})
    needed = seeds_needed(len(gaps))
    rivals = {}
    for name, gap in gaps.items():
        same = not any(gap)
        undecided = seeds < needed and not same
        verdict = "undecided" if undecided else "behind" if p[name] <= LEVEL else "tie"
        rivals[name] = {"difference": sum(gap) / seeds, "p": p[name], "verdict": verdict}
    return {
        "metric": metric, "best": best, "seeds": seeds, "needed": needed, "rivals": rivals
    }  # fmt: skip


def in_sentences(found: Mapping[str, Any] | None) -> list[str]:
    """What the test says, a line for each rival."""
    if not found:
        return []
    best, metric, seeds = found["best"], found["metric"], found["seeds"]
    lines = []
    for name, row in found["rivals"].items():
        gap = f"{row['difference']:+.4f} {metric}, p = {row['p']:.2g}"
        if row["verdict"] == "behind":
            lines.append(f"{best} is ahead of {name} ({gap})")
        elif row["verdict"] == "tie":
            lines.append(f"{best} and {name} tie ({gap})")
    if undecided := [n for n, row in found["rivals"].items() if row["verdict"] == "undecided"]:
        lines.append(
            f"{seeds} seeds cannot tell {best} from {', '.join(undecided)}: it takes"
            f" {found['needed']} at least"
        )
    return [*lines, f"Wilcoxon's test over {seeds} seeds, paired, with Holm's correction"]
