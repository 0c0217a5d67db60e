from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from films import converted, make_clips, save
from PIL import Image

from fedlens.core.client import generator
from fedlens.data.source import DataError
from fedlens.data.video.clips import Clips
from fedlens.data.video.degradations import (
    BlurDecimate,
    CameraSettings,
    Pass,
    Real,
    blur_decimate,
    blurred,
    draw_settings,
    h264,
    jpeg,
    with_grain,
    worsen,
)
from fedlens.data.video.files import open_frames
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.moving_textures import MovingTextures, moving_texture
from fedlens.data.video.windows import cut_pair

ndimage = pytest.importorskip("scipy.ndimage")


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(-10 * (a - b).square().mean().log10())


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_blur_and_decimation_by_scipy(scale: int) -> None:
    """scipy's Gaussian of 0.4 times the scale, mirrored, every scale-th pixel. BasicSR's own
    function was run beside this one on 2x3x48x60 noise: largest difference 4.8e-7 (x4)."""
    clip = noise(2, 3, 12 * scale, 15 * scale)
    theirs = ndimage.gaussian_filter(
        clip.double().numpy(), 0.4 * scale, axes=(2, 3), mode="mirror", truncate=4
    )[..., ::scale, ::scale]
    torch.testing.assert_close(
        blur_decimate(clip, scale).double(), torch.from_numpy(theirs.copy()), atol=1e-6, rtol=0
    )


def test_a_blurred_crop_is_cut_from_the_whole() -> None:
    frames = ArrayFrames((noise(2, 3, 64, 96) * 255).byte())
    whole = (blur_decimate(frames.array.float() / 255, 4) * 255).round() / 255
    for top, left in [(0, 0), (5, 9), (8, 16)]:
        x, _ = cut_pair(frames, 0, 2, (4 * top, 4 * left, 32, 32), 4, BlurDecimate())
        torch.testing.assert_close(
            x, whole[..., top : top + 8, left : left + 8], atol=1.01 / 255, rtol=0
        )


def test_turned_blur_by_scipy() -> None:
    """Sigmas 3 and 1, the long axis at 30 degrees: a Gaussian with that covariance, by scipy's
    convolution."""
    clip = noise(1, 3, 30, 40)
    angle = np.pi / 6
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    inverse = turn.T @ np.diag([1 / 9, 1.0]) @ turn
    y, x = np.mgrid[-10:11, -10:11]
    places = np.stack([x, y], -1)
    kernel = np.exp(-0.5 * np.einsum("...i,ij,...j", places, inverse, places))
    kernel /= kernel.sum()
    ours = blurred(clip, (3.0, 1.0, angle))
    for c in range(3):
        theirs = ndimage.convolve(clip[0, c].double().numpy(), kernel, mode="reflect")
        np.testing.assert_allclose(ours[0, c].numpy(), theirs, atol=1e-6)


def test_grain_has_its_strength() -> None:
    """10 levels, in the middle of the range where nothing is cut off; grey noise is one for all
    colours, and no frame has another's."""
    flat = torch.full((4, 3, 64, 64), 0.5)
    for grey in (False, True):
        grain = (with_grain(flat, 10, grey, generator(1)) - flat) * 255
        assert float(grain.std()) == pytest.approx(10, rel=0.05)
        assert bool((grain[:, 0] == grain[:, 1]).all()) is grey
        assert not torch.equal(grain[0], grain[1])


def test_jpeg_by_pil() -> None:
    clip = (noise(2, 3, 17, 23) * 255).round() / 255
    ours = jpeg(clip, 40)
    for k in range(2):
        file = io.BytesIO()
        levels = (clip[k] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(levels).save(file, "jpeg", quality=40)
        theirs = np.asarray(Image.open(file))
        assert np.array_equal((ours[k] * 255).round().byte().permute(1, 2, 0).numpy(), theirs)


def test_compression_by_the_ffmpeg_program(tmp_path: Path) -> None:
    """What ffmpeg's own program loses of a clip at the same rate factor is what ours loses, to half
    a dB; and more compression loses more."""
    pytest.importorskip("av")
    clip = moving_texture(6, 64, 96, generator(0), generator(1)).float() / 255
    save(tmp_path / "in", [f.permute(1, 2, 0).numpy() for f in (clip * 255).byte()])
    lost = {}
    for crf in (20, 36):
        film = converted(
            tmp_path / "in" / "f%d.png",
            tmp_path / f"{crf}.mkv",
            *("-c:v", "libx264", "-crf", str(crf), "-pix_fmt", "yuv420p"),
        )
        theirs = open_frames(film).read(0, 6).float() / 255
        lost[crf] = psnr(h264(clip, crf), clip)
        assert lost[crf] == pytest.approx(psnr(theirs, clip), abs=0.5)
    assert lost[36] < lost[20] - 3


def test_odd_sides_can_be_compressed() -> None:
    pytest.importorskip("av")
    clip = torch.full((2, 3, 15, 21), 0.4)
    assert (h264(clip, 18) - clip).abs().max() < 0.02


def test_second_order_is_seeded_and_has_its_size() -> None:
    pytest.importorskip("av")
    clip = noise(3, 3, 48, 64)
    made = [Real()(clip, 4, generator(s)) for s in (1, 1, 2)]
    assert made[0].shape == (3, 3, 12, 16)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert torch.equal(Real()(clip, 4, None), Real()(clip, 4, None))


def test_almost_nothing_is_almost_bicubic() -> None:
    """No blur to speak of, no resizing, one level of noise, best JPEG and H.264; on grey, because
    the last two halve the resolution of colours, and away from the border."""
    pytest.importorskip("av")
    clip = moving_texture(3, 96, 96, generator(0), generator(1)).float() / 255
    clip = clip.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    still = Pass((0.2, 0.2, 0.0), 1.0, "area", 1.0, True, 100)
    inner = (..., slice(4, -4), slice(4, -4))
    small = worsen(clip, 4, CameraSettings((still, still), 0), generator(0))[inner]
    bicubic = cut_pair(ArrayFrames((clip * 255).byte()), 0, 3, (0, 0, 96, 96), 4)[0][inner]
    assert psnr(small, bicubic) > 36
    worse = worsen(clip, 4, draw_settings(generator(3)), generator(0))[inner]
    assert psnr(worse, bicubic) < 30


def test_unlike_cameras(tmp_path: Path) -> None:
    """Client i has the i mod n-th kind, "camera" one of its own that stays; the federation says
    which. The test clips are made as they are told."""
    pytest.importorskip("av")
    root = make_clips(tmp_path, ["a", "b", "c", "d"], size=(32, 32))
    kinds = ("bi", "bd", "camera", "camera")
    source = Clips(str(root), frames=2, crop=32, split="groups", degradation=kinds, test=str(root))
    federation = source.federation(4, 0)
    cameras = federation.facts.details["cameras"]
    assert cameras[:2] == ["bicubic", "Gaussian blur and decimation"] and cameras[2] != cameras[3]
    assert (
        cameras
        == Clips(str(root), frames=2, crop=32, degradation=kinds)
        .federation(4, 0)
        .facts.details["cameras"]
    )
    first = torch.tensor([0])
    for client in federation.holdings:
        assert torch.equal(client.batch(first)["x"], client.batch(first)["x"])
    again = [federation.holdings[2].batch(first, generator(5))["x"] for _ in range(2)]
    assert torch.equal(again[0], again[1])
    plain = federation.test.batch(first)["x"]
    for kind in ("bd", "real"):
        made = Clips(str(root), frames=2, crop=32, test=str(root), test_degradation=kind)
        tested = made.federation(4, 0).test
        assert not torch.equal(tested.batch(first)["x"], plain)
        assert torch.equal(tested.batch(first)["x"], tested.batch(first)["x"])


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.degradation is empty"):
        MovingTextures(degradation=())
    with pytest.raises(ValueError, match="not divisible by the scale 4"):
        blur_decimate(torch.zeros(1, 3, 10, 8), 4)
