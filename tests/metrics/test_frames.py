from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.metrics.frames import frame_psnr, frame_ssim, levels, temporal_gap


def pair(shape: tuple[int, ...] = (2, 3, 40, 36)) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    a = torch.rand(shape, generator=rng)
    return a, (a + 0.1 * torch.randn(shape, generator=rng)).clamp(0, 1)


def as_uint8(x: torch.Tensor) -> np.ndarray:
    return (x.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)


@pytest.mark.parametrize("border", [0, 4])
def test_equal_to_skimage(border: int) -> None:
    """skimage with the Gaussian window of the original paper; its score map is cut by the window's
    5 pixels to the valid part.
    """
    metrics = pytest.importorskip("skimage.metrics")
    a, b = pair()
    inner = slice(border, -border or None)
    for k, (x, y) in enumerate(zip(as_uint8(a), as_uint8(b), strict=True)):
        x, y = x[inner, inner], y[inner, inner]
        psnr = metrics.peak_signal_noise_ratio(y, x, data_range=255)
        assert float(frame_psnr(a, b, border=border)[k]) == pytest.approx(psnr, abs=1e-5)
        _, score = metrics.structural_similarity(
            x,
            y,
            channel_axis=2,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=255,
            full=True,
        )
        assert float(frame_ssim(a, b, border=border)[k]) == pytest.approx(
            score[5:-5, 5:-5].mean(), abs=1e-5
        )


def test_luma_of_primaries() -> None:
    """BT.601 in studio range: black 16, white 16 + 65.481 + 128.553 + 24.966 = 235, pure green 16 +
    128.553 = 144.553.
    """
    colours = torch.tensor([[0.0, 0, 0], [1, 1, 1], [0, 1, 0]]).view(3, 3, 1, 1)
    torch.testing.assert_close(levels(colours, "y").flatten(), torch.tensor([16.0, 235.0, 144.553]))


def test_psnr_by_hand() -> None:
    """An error of 5 levels everywhere: 20 log10(255 / 5) = 34.151 dB; errors below half a level are
    rounded away: 100 dB by convention.
    """
    a = torch.full((1, 3, 16, 16), 100 / 255)
    assert float(frame_psnr(a, a + 5 / 255)) == pytest.approx(34.1514, abs=1e-4)
    assert float(frame_psnr(a * 0, a * 0 + 0.4 / 255)) == 100.0


def test_temporal_gap_sees_flicker_only() -> None:
    """A constant error costs nothing; an error of +1 level in every other frame changes each
    difference by 1.
    """
    a = torch.full((4, 3, 12, 12), 100 / 255)
    flicker = torch.tensor([0.0, 1, 0, 1]).view(4, 1, 1, 1) / 255
    assert float(temporal_gap(a + 3 / 255, a)) == 0
    assert float(temporal_gap(a + flicker, a)) == pytest.approx(1.0)
    assert float(temporal_gap(a[:1], a[:1])) == 0


def test_too_small_for_ssim() -> None:
    with pytest.raises(ValueError, match="at least 11x11"):
        frame_ssim(torch.zeros(1, 3, 8, 20), torch.zeros(1, 3, 8, 20))
    with pytest.raises(ValueError, match="border of 4 pixels leaves nothing of frames of 20x8"):
        frame_psnr(torch.zeros(1, 3, 8, 20), torch.zeros(1, 3, 8, 20), border=4)


def test_lpips_of_the_published_example(data_pack: Path) -> None:
    from PIL import Image

    from fedlens.metrics.perceptual import lpips

    folder = data_pack / "weights" / "lpips"

    def read(name: str) -> torch.Tensor:
        return (
            torch.from_numpy(np.array(Image.open(folder / name).convert("RGB"))).permute(2, 0, 1)[
                None
            ]
            / 255
        )

    assert float(lpips(read("ex_ref.png"), read("ex_p0.png"), str(folder))) == pytest.approx(
        0.7219, abs=5e-5
    )
    assert float(lpips(read("ex_ref.png"), read("ex_p1.png"), str(folder))) == pytest.approx(
        0.1376, abs=5e-5
    )
    assert float(lpips(read("ex_ref.png"), read("ex_ref.png"), str(folder))) == 0
    with pytest.raises(FileNotFoundError, match="does not hold"):
        lpips(read("ex_ref.png"), read("ex_ref.png"), str(data_pack))


def test_vmaf_of_identical_clips(data_pack: Path) -> None:
    """The value libvmaf gives for these eight frames against themselves."""
    pytest.importorskip("imageio_ffmpeg")
    from fedlens.data.video.files import open_frames
    from fedlens.metrics.video import vmaf

    clip = open_frames(data_pack / "vid4" / "GT" / "city").read(0, 8) / 255
    assert vmaf(clip, clip) == pytest.approx(99.678554, abs=1e-3)
