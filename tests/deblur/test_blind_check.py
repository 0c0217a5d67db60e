"""Whether a blind kernel is doubted. References: photos whose kernel is known, checked with that
kernel and with another one; and *zebra*, on which blind estimation is known to fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from fedlens.core.picture import to_uint8
from fedlens.data.images.reading import read_image, resize, shipped
from fedlens.deblur.blind_check import MOST_BEYOND, MOST_ECHO, doubt, signs
from fedlens.deblur.blur import gaussian, motion
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import circular_blur


def photo_of(sharp: Tensor, kernel: Tensor) -> Tensor:
    """Blurred, noise of one grey level, without what came round the edge."""
    rng = torch.Generator().manual_seed(0)
    seen = circular_blur(sharp, kernel) + torch.randn(sharp.shape, generator=rng)
    return seen[:, 12:-12, 12:-12].float().clamp(0, 255).contiguous()


@pytest.fixture(scope="module")
def sharp() -> Tensor:
    return torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 4)


def test_the_true_kernel_is_not_doubted(sharp: Tensor) -> None:
    true = motion(7, 0)
    beyond, echo = signs(photo_of(sharp, true), true)
    assert beyond < MOST_BEYOND and echo < MOST_ECHO
    assert doubt(photo_of(sharp, true), true) is None


@pytest.mark.parametrize("wrong", [motion(13, 0), motion(9, 90)], ids=["too long", "across"])
def test_a_wrong_kernel_is_doubted(sharp: Tensor, wrong: Tensor) -> None:
    """Undone twice as far as it went, and across."""
    assert doubt(photo_of(sharp, motion(7, 0)), wrong) is not None


def test_of_a_pale_photo_the_echo_tells(sharp: Tensor) -> None:
    """A quarter of the contrast, in the middle of the range: nothing rings beyond black or white,
    but what is not explained is a picture."""
    pale = 127.5 + (sharp - 127.5) / 4
    reason = doubt(photo_of(pale, gaussian(9, 1.0)), motion(13, 0))
    assert reason is not None and "no noise" in reason


def test_highlights_that_were_cut_off_are_no_reason(sharp: Tensor) -> None:
    """A lamp that is twice as bright as white: the photo says 255 there."""
    lamp = sharp.clone()
    lamp[:, 40:48, 60:68] = 600
    true = motion(7, 0)
    assert signs(photo_of(lamp, true), true)[0] < MOST_BEYOND


def test_a_run_names_the_view_whose_kernel_probably_failed(data_pack: Path, tmp_path: Path) -> None:
    """*zebra*, whose stripes look like their own blur (15.3 dB, below the photo)."""
    zebra = resize(read_image(data_pack / "classic" / "color" / "zebra.png", "grey"), 256)
    (tmp_path / "anna").mkdir()
    view = photo_of(zebra, motion(9, 30)) / 255
    Image.fromarray(to_uint8(view)).save(tmp_path / "anna" / "observation.png")
    facts = Scene(scene=str(tmp_path), kernel_size=13).federation(1, 0).facts
    (said,) = [n for n in facts.notes if n.startswith("WARNING")]
    assert "the photo of anna is probably wrong" in said and "anna/kernel.json" in said
