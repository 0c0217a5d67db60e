from __future__ import annotations

import pytest
import torch

from fedlens.core.client import Output, generator
from fedlens.data.video.frames import ArrayFrames
from fedlens.tasks.agreement import ClipAgreement, covariance, disagreement


def test_the_loss_by_hand() -> None:
    """a = (0, 0), (2, 0) and b = (1, 0), (1, 0). Distance: (1 + 0 + 1 + 0) / 4 = 0.5, times 25:
    12.5. Deviations of a: sqrt(2 + 1e-4) > 1 and sqrt(1e-4) = 0.01, so (0 + 0.99) / 2 = 0.495; of
    b: 0.01 twice, 0.99. Their mean 0.7425, times 25: 18.5625. No covariances: 31.0625.
    """
    a, b = torch.tensor([[0.0, 0], [2, 0]]), torch.tensor([[1.0, 0], [1, 0]])
    assert float(disagreement(a, b)) == pytest.approx(31.0625, rel=1e-5)
    assert float(disagreement(a[:1], b[:1])) == pytest.approx(12.5)


def test_covariance_by_hand() -> None:
    """(-1, -2), (0, 0), (1, 2): variances 1 and 4, covariance 2, twice squared over two
    coordinates: 4. Three coordinates that do not go together: 0.
    """
    assert float(covariance(torch.tensor([[-1.0, -2], [0, 0], [1, 2]]))) == pytest.approx(4.0)
    apart = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert float(covariance(apart)) == pytest.approx(0.0, abs=1e-7)


def test_what_all_clips_share_costs_the_most() -> None:
    """A network that answers the same to everything pays 25 x .99; one that tells 64 videos apart
    and agrees with itself pays little.
    """
    same = torch.ones(64, 8)
    told = torch.randn(64, 8, generator=generator(0)) * 1.3
    assert float(disagreement(same, same)) == pytest.approx(24.75, rel=1e-3)
    assert float(disagreement(told, told)) < 1.5


def test_an_example_is_two_clips_of_one_video() -> None:
    """Pixels are frame numbers: each clip runs forward at its own stride, up to 3 where 24 frames
    have room for it.
    """
    pixels = torch.arange(24, dtype=torch.uint8)[:, None, None, None].expand(24, 3, 40, 40)
    task = ClipAgreement(backbone="r3d10s", frames=8, size=32, colour=False)
    strides, starts = set(), set()
    for seed in range(60):
        x = task.sample(ArrayFrames(pixels.contiguous()), 0, generator(seed), True)["x"]
        assert x.shape == (2, 3, 8, 32, 32)
        for clip in x:
            shown = (clip[0, :, 0, 0] * 255).round()
            assert len(set(shown.diff().tolist())) == 1
            strides.add(int(shown[1] - shown[0]))
            starts.add(int(shown[0]))
    assert strides == {1, 2, 3} and len(starts) > 8
    assert task.least == 8


def test_the_network_answers_for_both_clips() -> None:
    task = ClipAgreement(backbone="r3d10s", frames=4, size=16, width=6)
    model = task.model().train()
    batch = {"x": torch.rand(3, 2, 3, 4, 16, 16)}
    output = task.forward(model, batch)
    assert output.prediction.shape == (3, 2, 6) and output.features is not None
    assert output.features.shape == (3, 2, 64)
    loss = task.loss(Output(output.prediction), batch)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    one = {"x": batch["x"][:1]}
    assert bool(task.loss(task.forward(model, one), one).isfinite())
