"""The mean of w: by pixel, and of what everyone last sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scenes import SIZE, make, small_federation, solve

from fedlens import Message, run
from fedlens.core.message import MEAN, Header
from fedlens.core.replies import Heard, Replies, Sum
from fedlens.deblur.consensus import mean_of_last
from fedlens.deblur.spectrum import backward
from fedlens.engines.flaky import Flaky
from fedlens.engines.loopback import Loopback


def test_masks_travel_only_when_asked_to_and_average_pixel_by_pixel() -> None:
    """As the public code does with a denoiser: x = prox(sum m_k w_k / sum m_k), here with the
    ridge's prox a / (1 + eta / (n rho)); a pixel that nobody saw stays as it was, 127.5. The
    replies then hold the masks."""
    federation = small_federation(True)
    state, engine = solve(federation, 1, prior="ridge", masks=True)
    _, plain = solve(federation, 1, prior="ridge")
    ws = [backward(Message.from_bytes(b).trees["w"]["scene"], SIZE[1]) for b in plain.traffic[1:]]
    masks = [held["scene"].mask(torch.float64) for held in federation.holdings]
    count = sum(masks)
    mean = torch.where(
        count > 0, sum(m * w for m, w in zip(masks, ws, strict=True)) / count.clamp_min(1), 127.5
    )
    torch.testing.assert_close(state.trees["image"]["scene"], mean / (1 + 2.0 / (3 * 0.3)))
    for sent, mask in zip(engine.traffic[1:], masks, strict=True):
        assert torch.equal(Message.from_bytes(sent).trees["seen"]["scene"], mask)


@pytest.mark.parametrize("cohort", [1, 2])
def test_part_of_the_clients_a_round_and_lost_replies_still_restore(cohort: int) -> None:
    """Algorithm 6. Who was not asked, or not heard, keeps its old dual: no state is lost. The
    paper: slower and restless.
    """
    federation = small_federation(False)
    truth = federation.test["scene"]
    whole, _ = solve(federation, 80, eta=0.5)
    part, _ = solve(federation, 80, cohort=cohort, eta=0.5)
    algorithm = make(federation, eta=0.5)
    flaky = Flaky(Loopback(algorithm, federation), after=0.3, delay=0.2, by=2)
    lossy = run(algorithm, flaky, 80, late=2)
    errors = [
        float((s.trees["image"]["scene"] - truth).square().mean()) for s in (whole, part, lossy)
    ]
    assert errors[1] < 6 * errors[0] and errors[2] < 6 * errors[0]


def test_who_is_not_asked_counts_with_what_it_last_sent() -> None:
    """By hand from the traffic: the server's total is the sum of the last w of everyone it heard,
    though it only ever got differences; and a part of the clients a round ends where all of them
    do, which a mean over those who answered (recall=False) does not."""
    federation = small_federation(False)
    algorithm = make(federation, eta=0.5, rho=0.02)
    engine = Loopback(algorithm, federation)
    known: dict[int, torch.Tensor] = {}

    def look(_: Any, r: Any) -> None:
        for sent in engine.traffic[1:]:
            reply = Message.from_bytes(sent)
            assert list(reply.trees) == ["dw"]
            known[reply.sender] = known.get(reply.sender, 0) + reply.trees["dw"]["scene"]
        torch.testing.assert_close(r.state.trees["total"]["scene"], sum(known.values()))
        assert r.state.scalars["met"] == len(known)

    part = run(algorithm, engine, 150, cohort=2, after_round=look)
    whole, _ = solve(federation, 150, eta=0.5, rho=0.02)
    mean, _ = solve(federation, 150, cohort=2, eta=0.5, rho=0.02, recall=False)
    x = whole.trees["image"]["scene"]
    assert float((part.trees["image"]["scene"] - x).abs().mean()) < 0.2 * float(
        (mean.trees["image"]["scene"] - x).abs().mean()
    )


def test_whose_reply_was_broken_under_masks_is_not_met() -> None:
    """Three were heard, but one added nothing, as SecureSum has it of a reply with NaN: the mean of
    w = 2 and 4 is 3, not a third of their sum."""
    dw = {"w": torch.full((2,), 3.0)}
    heard = {i: Heard(i, 0, {}, 8, {}) for i in range(3)}
    replies = Replies(heard, {("dw", MEAN): Sum(dw, 2.0)}, totals={"first": (2.0, 2.0)})
    state, mean = mean_of_last(Message(header=Header(population=9)), replies)
    assert state.scalars["met"] == 2 and mean["w"].tolist() == [3.0, 3.0]
