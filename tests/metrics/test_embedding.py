"""t-SNE: widths from their definition, and what it is for."""

from __future__ import annotations

import pytest
import torch

from fedlens.metrics.embedding import affinities, scatter, tsne


def test_rows_have_the_perplexity_asked_for() -> None:
    """All points alike (corners of a simplex): every row is uniform over the n - 1 others whatever
    the width, so P is 1 / (n (n - 1)). In general P sums to 1 and is symmetric."""
    p = affinities(torch.eye(6, dtype=torch.float64), 3.0)
    off = ~torch.eye(6, dtype=torch.bool)
    assert torch.allclose(p[off], torch.full((30,), 1 / 30, dtype=torch.float64))
    q = affinities(
        torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 10.0
    )
    assert float(q.sum()) == pytest.approx(1) and torch.allclose(q, q.T)


def test_groups_that_are_apart_stay_apart() -> None:
    rng = torch.Generator().manual_seed(0)
    centres = 20 * torch.eye(3, 10)
    groups = torch.arange(3).repeat_interleave(20)
    y = tsne(torch.randn(60, 10, generator=rng) + centres[groups], perplexity=10, steps=350)
    near = torch.cdist(y, y) + 1e9 * torch.eye(60)
    assert (groups[near.argmin(1)] == groups).float().mean() > 0.95
    assert torch.equal(
        y,
        tsne(
            torch.randn(60, 10, generator=rng.manual_seed(0)) + centres[groups],
            perplexity=10,
            steps=350,
        ),
    )
    assert scatter(y, groups, ["a", "b", "c"]).shape == (3, 480, 480)
    with pytest.raises(ValueError, match="not 3"):
        tsne(torch.zeros(3, 2))
