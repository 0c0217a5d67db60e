from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedlens.models.spynet import SpyNet, both_ways, load_flow, warp


def constant(spynet: SpyNet, level: int, x: float, y: float) -> SpyNet:
    """Only one level says anything: this flow, everywhere."""
    for p in spynet.parameters():
        nn.init.zeros_(p)
    spynet.basic_module[level].basic_module[-1].bias.data = torch.tensor([float(x), float(y)])  # type: ignore[union-attr,index,operator]
    return spynet


def test_whole_pixels_are_moved_as_they_are() -> None:
    image = torch.arange(12.0).view(1, 1, 3, 4)
    flow = torch.zeros(1, 2, 3, 4)
    flow[:, 0] = 1
    assert warp(image, flow)[0, 0].tolist() == [[1, 2, 3, 0], [5, 6, 7, 0], [9, 10, 11, 0]]
    assert warp(image, flow, "border")[0, 0, 0].tolist() == [1, 2, 3, 3]
    flow[:, 0], flow[:, 1] = 0, -0.5
    assert warp(image, flow)[0, 0].tolist() == [[0, 0.5, 1, 1.5], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_flows_double_from_level_to_level() -> None:
    """The coarsest of six levels says (1, -2): five doublings make (32, -64); at half and quarter
    size (16, -32) and (8, -16).
    """
    spynet = constant(SpyNet((1, 2, 4)), 0, 1, -2)
    frame = torch.rand(1, 3, 64, 64)
    for flow, size, by in zip(spynet(frame, frame), (64, 32, 16), (32, 16, 8)):
        assert flow.shape == (1, 2, size, size)
        torch.testing.assert_close(
            flow, torch.tensor([1.0, -2.0]).view(1, 2, 1, 1).expand_as(flow) * by
        )


def test_sizes_between_are_scaled_by_hand() -> None:
    """40x48 is taken as 64x64: a flow of (1, -2) there is 48/64 and -2 * 40/64 here."""
    (flow,) = constant(SpyNet(), 5, 1, -2)(torch.rand(1, 3, 40, 48), torch.rand(1, 3, 40, 48))
    torch.testing.assert_close(
        flow, torch.tensor([0.75, -1.25]).view(1, 2, 1, 1).expand(1, 2, 40, 48)
    )


def test_small_frames() -> None:
    (flow,) = SpyNet()(torch.rand(2, 3, 12, 20), torch.rand(2, 3, 12, 20))
    assert flow.shape == (2, 2, 12, 20) and bool(flow.isfinite().all())


def test_both_ways_are_the_two_calls() -> None:
    torch.manual_seed(0)
    spynet, clip = SpyNet(), torch.rand(2, 3, 3, 32, 32)
    later, earlier = both_ways(spynet, clip)
    torch.testing.assert_close(
        later[0][1, 0], spynet(clip[1, :1], clip[1, 1:2])[0][0], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        earlier[0][0, 1], spynet(clip[0, 2:], clip[0, 1:2])[0][0], atol=1e-5, rtol=1e-4
    )


def test_checkpoints_with_and_without_the_constants(tmp_path: Path) -> None:
    first, second = SpyNet(), SpyNet()
    assert sum(p.numel() for p in first.parameters()) == 1_440_300  # 6 levels of 240,050
    state = {n: t for n, t in first.state_dict().items() if n not in ("mean", "std")}
    torch.save({"params": state}, tmp_path / "flow.pth")
    load_flow(second, tmp_path / "flow.pth")
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values())
    )
    torch.save({"params": {**state, "more": torch.zeros(1)}}, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match="more is unknown to the model"):
        load_flow(second, tmp_path / "odd.pth")
