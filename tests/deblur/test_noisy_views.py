from __future__ import annotations

import math

import pytest
import torch
from scenes import small_federation
from toy import Toy, same_bits

from fedlens import Message, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import StackError
from fedlens.deblur import FedDeblur, NoisyViews, spectrum
from fedlens.engines.loopback import Loopback

SCENE = small_federation(False, 7, seed=1)


def deblur(**keys: object) -> FedDeblur:
    return FedDeblur(eta=2.0, rho=0.3, **keys)  # type: ignore[arg-type]


def played(*layers: NoisyViews, rounds: int = 1) -> tuple[Message, Message, list[Message]]:
    """The state, what went down last and what came up."""
    algorithm = stack(deblur(), *layers).given(SCENE.facts)
    engine = Loopback(algorithm, SCENE)
    state = run(algorithm, engine, rounds)
    down, *up = [Message.from_bytes(b) for b in engine.traffic[-len(SCENE) - 1 :]]
    return state, down, up


def test_without_noise_nothing_changes() -> None:
    assert same_bits(played()[0], played(NoisyViews(0.0))[0])


def test_what_is_sent_is_clipped_and_noisy_to_the_pixel() -> None:
    """sigma 4 on every pixel, beside what is sent without; a bound of 3 grey levels."""
    _, _, plain = played()
    _, _, noisy = played(NoisyViews(4.0))
    _, down, clipped = played(NoisyViews(0.0, bound=3.0))
    name = next(iter(down.trees["x"]))
    width = SCENE.holdings[0][name].width
    added = torch.stack(
        [
            spectrum.backward(a.trees["w"][name] - b.trees["w"][name], width)
            for a, b in zip(noisy, plain, strict=True)
        ]
    )
    assert float(added.std()) == pytest.approx(4.0, rel=6 / math.sqrt(2 * added.numel()))
    for before, after in zip(plain, clipped, strict=True):
        gap, held = (
            spectrum.backward(m.trees["w"][name] - down.trees["x"][name], width)
            for m in (before, after)
        )
        root = float(gap.square().mean().sqrt())
        assert float(held.square().mean().sqrt()) == pytest.approx(min(3.0, root), rel=1e-3)


def test_it_is_for_whole_images_of_feddeblur() -> None:
    with pytest.raises(StackError, match="PrivateMean or DPSGD"):
        stack(FedAvg(Toy()), NoisyViews())
    with pytest.raises(StackError, match="masks=false"):
        stack(deblur(masks=True), NoisyViews())
    with pytest.raises(StackError, match="recall=false"):
        stack(deblur(recall=True), NoisyViews())
