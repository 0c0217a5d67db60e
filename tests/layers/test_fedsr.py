from __future__ import annotations

import math

import pytest
import torch
from toy import Net, Toy

from fedlens import Message
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import StackError, stack
from fedlens.core.replies import Replies
from fedlens.layers import FedSR, UploadFailures
from fedlens.layers.fedsr import info_nce, layer_wise, shallow
from fedlens.models import LightVSR


def test_info_nce_by_hand() -> None:
    """Two orthogonal unit vectors that match their anchors, temperature 1: the share of the own
    anchor is e / (e + 1), so the loss is log(1 + 1/e) = 0.313262. Swapped anchors: log(1 + e) =
    1.313262."""
    z = torch.eye(2)
    assert float(info_nce(z, z, 1.0)) == pytest.approx(math.log(1 + math.exp(-1)))
    assert float(info_nce(z, z.flip(0), 1.0)) == pytest.approx(math.log(1 + math.e))


def test_layer_wise_by_hand() -> None:
    """Global (1, 0). Client a stays, cos = 1. Client b moves by (-1, 1) to (0, 1), cos = 0. Weights
    e/(e+1) and 1/(e+1): the mean delta is (-1, 1) / (e + 1)."""
    model = {"w": torch.tensor([1.0, 0.0])}
    mean = layer_wise([{"w": torch.zeros(2)}, {"w": torch.tensor([-1.0, 1.0])}], model)["w"]
    torch.testing.assert_close(mean, torch.tensor([-1.0, 1.0]) / (math.e + 1))


def test_refused_where_there_is_no_such_layer() -> None:
    with pytest.raises(StackError, match="'conv_first', which SmallNet does not have"):
        stack(FedAvg(Toy()), FedSR())
    stack(FedAvg(Toy()), FedSR(layer="backbone.0"))


def test_shallow_stops_at_the_layer() -> None:
    """Nothing after the layer is computed: the assertion behind it is never reached."""
    net, x = Net().eval(), torch.randn(5, 8)

    def forward() -> None:
        net.backbone(x)
        raise AssertionError("went on after the layer")

    torch.testing.assert_close(shallow(forward, net.backbone[0]), net.backbone[0](x))


def test_every_frame_of_a_clip_has_an_anchor() -> None:
    """A network that takes frames one by one where no gradient is wanted."""
    net = LightVSR(scale=2, width=4, blocks=1).requires_grad_(False)
    clip = torch.rand(2, 3, 3, 8, 8)
    anchor = shallow(lambda: net(clip), net.conv_first)
    assert len(anchor) == 2 * 3 and not anchor.requires_grad


def replies_of(values: list[float]) -> Replies:
    singles = {
        i: Message({"delta": {"w": torch.tensor([v])}}, {"loss": 1.0}, sender=10 + i)
        for i, v in enumerate(values)
    }
    return Replies({m.sender: m.scalars for m in singles.values()}, {}, singles)


@pytest.mark.parametrize(("share", "left"), [(0.0, 4), (0.25, 3), (0.5, 2), (0.75, 1), (0.99, 1)])
def test_upload_failures_keep_exactly_the_rest(share: float, left: int) -> None:
    seen: list[list[int]] = []

    class Ear(FedAvg):
        def server_step(self, state: Message, replies: Replies) -> Message:
            seen.append(list(replies.senders))
            return state.put(model=replies.mean("delta"))

    layer = stack(Ear(Toy()), UploadFailures(share=share))
    state = Message({"model": {"w": torch.zeros(1)}}, {"seed": 0.0, "round": 3.0})
    out = layer.server_step(state, replies_of([1.0, 2.0, 3.0, 4.0]))
    assert len(seen[0]) == left
    expected = sum(s - 9 for s in seen[0]) / left  # sender 10 + i brings the value i + 1
    assert float(out.trees["model"]["w"]) == pytest.approx(expected)
    layer.server_step(state, replies_of([1.0, 2.0, 3.0, 4.0]))
    assert seen[0] == seen[1]
