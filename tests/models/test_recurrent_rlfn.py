from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedlens.core.weights import Misfit
from fedlens.models import RLFN, RecurrentRLFN, rlfn_ntire
from fedlens.models.clips import configurations
from fedlens.models.recurrent_rlfn import align
from fedlens.tasks.super_resolution import SuperResolution

SMALL = {"width": 8, "blocks": 1, "middle": 8, "carried": 6, "steps": 1, "radius": 2}


def clip(frames: int = 3, height: int = 18, width: int = 20) -> torch.Tensor:
    return torch.rand(1, frames, 3, height, width, generator=torch.Generator().manual_seed(0))


def started(model: RecurrentRLFN) -> RecurrentRLFN:
    """As if it had learned something: what starts at 0 does not stay there."""
    torch.nn.init.normal_(model.join.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return model.eval()


def test_a_fresh_one_on_its_trunks_weights_is_its_trunk() -> None:
    trunk = RLFN(4, 8, 1, 8).eval()
    model = RecurrentRLFN(4, **SMALL).eval()
    model.load_state_dict(trunk.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.allclose(model(clip()), trunk(clip()), atol=1e-6)


def test_alignment_finds_a_shift_and_says_which() -> None:
    """The frame moved by one row down and two columns left: away from the edges the state comes
    back unmoved, the mean shift is (1, -2) / 3 of the radius, and the patches do not differ."""
    here = clip()[:, 0]
    there, state = (torch.roll(x, (1, -2), (-2, -1)) for x in (here, here))
    found = align(state, there, here, torch.tensor(1e4), radius=3)
    inner = (..., slice(5, -5), slice(5, -5))
    assert torch.allclose(found[:, :3][inner], here[inner], atol=1e-4)
    assert torch.allclose(found[:, 3][inner], torch.tensor(1 / 3), atol=1e-4)
    assert torch.allclose(found[:, 4][inner], torch.tensor(-2 / 3), atol=1e-4)
    assert torch.allclose(found[:, 5][inner], torch.tensor(0.0), atol=1e-3)


def test_every_frame_sees_the_first_and_the_last() -> None:
    model = started(RecurrentRLFN(4, **SMALL))
    x = clip(4)
    with torch.no_grad():
        before = model(x)
        for changed in (0, 3):
            other = x.clone()
            other[:, changed] = 0.5
            moved = (model(other) - before).abs().amax((0, 2, 3, 4))
            assert (moved > 0).all()


def test_sizes() -> None:
    """At most 0.8 M parameters on the small published trunk; one frame, and frames below ESA's
    least, are enlarged too."""
    assert sum(p.numel() for p in RecurrentRLFN().parameters()) < 800_000
    model = started(RecurrentRLFN(4, **SMALL))
    with torch.no_grad():
        assert model(clip(1)).shape == (1, 1, 3, 72, 80)
        assert model(clip(2, 9, 12)).shape == (1, 2, 3, 36, 48)


def test_weights_tell_their_network() -> None:
    model = RecurrentRLFN(4, **SMALL)
    ((name, found),) = configurations(model.state_dict())
    assert name == "recurrent" and found.scale == 4 and found.official is not None
    again = RecurrentRLFN(found.scale, **found.official)
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }


def test_it_starts_from_its_trunks_file(tmp_path: Path) -> None:
    trunk, file = rlfn_ntire(), tmp_path / "trunk.safetensors"
    save_file(trunk.state_dict(), file)
    task = SuperResolution("recurrent", pretrained=str(file))
    model = task.model()
    with pytest.warns(UserWarning, match="initialised: sharpness"):
        task.load_init(model)
    own = model.state_dict()
    assert all(torch.equal(own[n], t) for n, t in trunk.state_dict().items())
    whole = tmp_path / "whole.safetensors"
    save_file(own, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SuperResolution("recurrent", pretrained=str(whole)).load_init(task.model())
    other = tmp_path / "other.safetensors"
    save_file(RLFN(4, 8, 1).state_dict(), other)
    with pytest.raises(Misfit, match=r"block_2\.c1_r\.weight is missing"):
        SuperResolution("recurrent", pretrained=str(other)).load_init(task.model())
