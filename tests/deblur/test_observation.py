"""What one client saw: where it lies in the scene, and how well a scene explains it."""

from __future__ import annotations

import torch

from fedlens.deblur.observation import Observation, without_rim
from fedlens.deblur.spectrum import forward


def test_a_partial_view_lies_where_it_was_taken() -> None:
    seen = Observation(torch.tensor([[[1.0, 2.0]]]), torch.ones(1, 1), 2, 4, top=1, left=2)
    assert seen.partial and seen.embed(seen.pixels).tolist() == [[[0, 0, 0, 0], [0, 0, 1, 2]]]
    assert torch.equal(seen.cut(seen.embed(seen.pixels)), seen.pixels)
    assert seen.mask().tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1]]]


def test_a_complete_view_is_the_scene() -> None:
    seen = Observation(torch.rand(3, 2, 4), torch.ones(1, 1), 2, 4)
    assert (
        not seen.partial
        and seen.embed(seen.pixels) is seen.pixels
        and seen.cut(seen.pixels) is seen.pixels
    )
    assert torch.equal(seen.mask(torch.float64), torch.ones(1, 2, 4, dtype=torch.float64))


def test_only_pixels_in_view_count_in_the_misfit() -> None:
    """x = 0 1 2 3 in both rows, blurred by [1/2 1/2] from its right with wrap: 0.5 1.5 2.5 1.5.
    Seen were 2 and 2 of the lower row's last two pixels: 0.5^2 + 0.5^2."""
    seen = Observation(
        torch.tensor([[[2.0, 2.0]]]), torch.tensor([[0.5, 0.5]]), 2, 4, top=1, left=2
    )
    x = forward(torch.arange(4.0).expand(1, 2, 4))
    torch.testing.assert_close(seen.through(x, seen.otf(x.dtype)), torch.tensor([[[2.5, 1.5]]]))
    assert abs(seen.misfit(x) - 0.5) < 1e-6


def test_the_rim_is_cut_off() -> None:
    x = torch.arange(20.0).reshape(1, 4, 5)
    assert without_rim(x, 1).tolist() == [[[6, 7, 8], [11, 12, 13]]] and torch.equal(
        without_rim(x, 0), x
    )
