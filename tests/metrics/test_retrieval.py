from __future__ import annotations

import torch

from fedlens.metrics.retrieval import most_similar, recall, vote


def test_hits_and_votes_by_hand() -> None:
    """A query at 0 degrees among videos at 10, 20, 30, 40 and 170 degrees of classes 1, 0, 0, 2, 0.
    Nearest first: 1 0 0 2 0. It is of class 0: no hit at 1, one at 2. Votes: at 1 class 1; at 2 one
    each, the nearer wins, class 1; at 3 class 0."""
    at = torch.deg2rad(torch.tensor([40.0, 10, 170, 20, 30]))
    gallery, labels = torch.stack([at.cos(), at.sin()], 1), torch.tensor([2, 1, 0, 0, 0])
    found, alike = most_similar(torch.tensor([[5.0, 0.0]]), gallery, 5)
    assert found.tolist() == [[1, 3, 4, 0, 2]]
    assert torch.allclose(alike[0], at[found[0]].cos().double(), atol=1e-6)
    y = torch.tensor([0])
    assert recall(found, y, labels, (1, 2)) == {"recall_at_1": 0.0, "recall_at_2": 1.0}
    assert vote(found, y, labels, (1, 2, 3)) == {
        "vote_at_1": 0.0,
        "vote_at_2": 0.0,
        "vote_at_3": 1.0,
    }


def test_nobody_finds_itself() -> None:
    x = torch.eye(3)
    assert most_similar(x, x, 5)[0][:, 0].tolist() == [0, 1, 2]
    assert all(k not in row for k, row in enumerate(most_similar(x, x, 5, same=True)[0].tolist()))


def test_length_does_not_matter() -> None:
    gallery = torch.tensor([[100.0, 101.0], [0.1, 0.0]])
    assert most_similar(torch.tensor([[2.0, 0.0]]), gallery, 1)[0].tolist() == [[1]]
