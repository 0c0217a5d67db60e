"""Hand-held views come back into register, and to the same tones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.data.images.reading import read_image, shipped
from fedlens.data.source import DataError
from fedlens.deblur.blur import motion
from fedlens.deblur.scenes import Scene
from fedlens.deblur.spectrum import circular_blur
from fedlens.deblur.views import align_views, estimate_kernel, match_tones
from fedlens.metrics.image import psnr

cv2 = pytest.importorskip("cv2")


def test_a_moved_and_darkened_view_is_put_back() -> None:
    """A known homography and a gamma: afterwards the view agrees with the first one as if the
    homography had been told.
    """
    first = torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 2)
    warp = np.array([[1.01, 0.015, 5.0], [-0.01, 0.99, -3.0], [1e-5, 2e-5, 1.0]], np.float32)
    moved = cv2.warpPerspective(
        first[0].numpy(), warp, (256, 256), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT
    )
    view = 255 * (torch.from_numpy(moved)[None].clamp(0, 255) / 255) ** 1.4
    back = align_views([first, view])[1]
    inner = (slice(None), slice(20, -20), slice(20, -20))
    assert psnr(back[inner], first[inner]) > psnr(view[inner], first[inner]) + 8
    told = cv2.warpPerspective(
        view[0].numpy(), warp, (256, 256), flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    )
    ideal = match_tones(torch.from_numpy(told)[None].clamp(0, 255), first)
    assert psnr(back[inner], first[inner]) > psnr(ideal[inner], first[inner]) - 0.3


def test_tones_are_matched_channel_by_channel() -> None:
    rng = torch.Generator().manual_seed(0)
    like = torch.rand(3, 40, 40, generator=rng) * torch.tensor([50.0, 100.0, 200.0])[:, None, None]
    view = like.flip(-1) * 0.5 + 20
    torch.testing.assert_close(
        match_tones(view, like).flatten(1).sort().values,
        like.flatten(1).sort().values,
        atol=0.5,
        rtol=0,
    )


def test_views_of_different_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="one size"):
        align_views([torch.zeros(1, 20, 20), torch.zeros(1, 20, 21)])


@pytest.mark.parametrize("size", [9, 8])
def test_a_kernel_is_found_from_a_photo_and_a_sharp_picture(size: int) -> None:
    """Blurred by a known kernel, darkened, noise of one grey level: the estimate blurs the sharp
    picture into the same photo, within the noise, and lies on the same pixels. Odd and even sizes
    stand where `spectrum.otf` puts them."""
    sharp = torch.nn.functional.avg_pool2d(shipped("camera", "grey"), 4)
    true = torch.zeros(size, size, dtype=torch.float64)
    line = motion(6, 30)
    true[1 : 1 + line.shape[0], 1 : 1 + line.shape[1]] = line
    clean = circular_blur(sharp, true)
    view = 0.9 * clean + 5 + torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    found = estimate_kernel(view.float(), sharp, size)
    assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
    inner = (slice(None), slice(size, -size), slice(size, -size))
    assert float((circular_blur(sharp, found) - clean)[inner].std()) < 1
    assert float((found - true).abs().sum()) < 0.25


def test_no_kernel_can_come_from_nothing() -> None:
    flat, busy = (
        torch.zeros(1, 40, 40),
        255 * torch.rand(1, 40, 40, generator=torch.Generator().manual_seed(0)),
    )
    for view, sharp, size, words in (
        (busy, flat, 5, "flat"),
        (-busy, busy, 1, "nothing in common"),
        (busy, busy, 25, "too small"),
    ):
        with pytest.raises(DataError, match=words):
            estimate_kernel(view, sharp, size)


@pytest.mark.slow
def test_real_views_of_a_castle(data_pack: Path, tmp_path: Path) -> None:
    """Five hand-held photos: after registration they agree better with the first than before, and
    `scene=DIR align=true` takes them.
    """
    photos = sorted((data_pack / "multiview" / "sceaux_castle").glob("*.JPG"))
    views = [torch.nn.functional.avg_pool2d(read_image(p, "grey"), 6) for p in photos[:3]]
    back = align_views(views)
    for before, after in zip(views[1:], back[1:], strict=True):
        assert psnr(after, views[0]) > psnr(before, views[0]) + 1
    for k, view in enumerate(views):
        (tmp_path / f"client{k}").mkdir()
        np.save(tmp_path / f"client{k}" / "observation.npy", view[0].numpy())
        np.save(tmp_path / f"client{k}" / "kernel.npy", np.ones((1, 1)))
    assert len(Scene(scene=str(tmp_path), align=True).federation(3, 0)) == 3
