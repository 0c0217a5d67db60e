from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlens.core.weights import Misfit, load_weights, read_weights
from fedlens.data.video.files import open_frames
from fedlens.metrics.frames import frame_psnr
from fedlens.models import RLFN, rlfn_ntire, rlfn_s
from fedlens.models.clips import configurations
from fedlens.models.vsr import Bicubic
from fedlens.tasks.super_resolution import SuperResolution

NETWORKS = {"rlfn_x4": RLFN, "rlfn_s_x4": rlfn_s, "rlfn_ntire_x4": rlfn_ntire}
SIZES = {"rlfn_x4": 543_740, "rlfn_s_x4": 470_208, "rlfn_ntire_x4": 317_218}


def by_hand(w: dict[str, Tensor], x: Tensor, blocks: int) -> Tensor:
    """RLFN written down once more, from its paper's figures, on one frame."""

    def conv(name: str, x: Tensor, **how: int) -> Tensor:
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], **how)

    first = deep = conv("conv_1", x, padding=1)
    for k in range(1, blocks + 1):
        y = deep
        for c in (1, 2, 3):
            y = conv(f"block_{k}.c{c}_r", y, padding=1)
            y = torch.where(y > 0, y, 0.05 * y)
        y = conv(f"block_{k}.c5", y + deep)
        few = conv(f"block_{k}.esa.conv1", y)
        pooled = F.max_pool2d(conv(f"block_{k}.esa.conv2", few, stride=2), 7, 3)
        grid = conv(f"block_{k}.esa.conv3", pooled, padding=1)
        grid = F.interpolate(grid, y.shape[-2:], mode="bilinear")
        few = conv(f"block_{k}.esa.conv_f", few)
        deep = y / (1 + torch.exp(-conv(f"block_{k}.esa.conv4", grid + few)))
    large = conv("upsampler.0", conv("conv_2", deep, padding=1) + first, padding=1)
    return F.pixel_shuffle(large, 4)


@pytest.mark.parametrize("name", NETWORKS)
def test_published_weights_load_and_tell_their_network(name: str, data_pack: Path) -> None:
    """Beside the public code, which takes levels up to 255, on two frames of noise of 48x61 with
    these weights: largest difference 0 for all three."""
    file = data_pack / "weights" / "sr" / f"{name}.pth"
    weights = read_weights(file)
    ((found, configuration),) = configurations(weights)
    assert found == "rlfn" and configuration.scale == 4 and configuration.official
    for model in (NETWORKS[name](), RLFN(4, **configuration.official)):
        load_weights(model, file)
        assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    x = torch.rand(1, 2, 3, 24, 31, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.eval()(x)
        for k in range(2):
            once = by_hand(weights, 255 * x[:, k], configuration.official["blocks"]) / 255
            torch.testing.assert_close(ours[:, k], once, atol=1e-5, rtol=0)


def test_training_and_using_agree_also_for_tiny_frames() -> None:
    """With a gradient all frames at once, without one by one; below 15 pixels they are padded."""
    torch.manual_seed(0)
    model = rlfn_ntire(2)
    for size in [(20, 17), (9, 30), (1, 1)]:
        x = torch.rand(2, 3, 3, *size)
        y = model(x)
        assert y.requires_grad and y.shape == (2, 3, 3, 2 * size[0], 2 * size[1])
        with torch.no_grad():
            torch.testing.assert_close(model(x), y, atol=1e-6, rtol=1e-5)


def test_other_weights_are_named(data_pack: Path) -> None:
    file = data_pack / "weights" / "sr" / "rlfn_s_x4.pth"
    with pytest.raises(Misfit, match=r"the file holds RLFN, x4, 6 blocks, width 48; the model is"):
        load_weights(rlfn_ntire(), file)


@pytest.mark.slow
def test_figures_on_vid4(data_pack: Path) -> None:
    """What others measured: RLFN_ntire 25.35 dB on luma, no border cut off, first 8 frames of each
    clip at the given low resolution; bicubic 23.78 (PIL's; MATLAB's here)."""
    task = SuperResolution("rlfn_ntire", metrics=("psnr_y",))
    model = load_weights(task.model(), data_pack / "weights" / "sr" / "rlfn_ntire_x4.pth").eval()
    found = {"rlfn": model, "bicubic": Bicubic(4)}
    means: dict[str, float] = {}
    for name, network in found.items():
        clips = []
        for folder in sorted((data_pack / "vid4" / "GT").iterdir()):
            low = open_frames(data_pack / "vid4" / "BIx4" / folder.name).read(0, 8).float() / 255
            true = open_frames(folder).read(0, 8).float() / 255
            made = task.enlarge(network, low[None])[0]
            clips.append(float(frame_psnr(made, true, "y", 0).mean()))
        means[name] = sum(clips) / len(clips)
    assert means["rlfn"] == pytest.approx(25.35, abs=0.01)
    assert means["bicubic"] == pytest.approx(23.78, abs=0.05)


def test_it_is_federated_from_published_weights(data_pack: Path) -> None:
    """`task.pretrained` is where a run starts."""
    file = data_pack / "weights" / "sr" / "rlfn_ntire_x4.pth"
    task = SuperResolution("rlfn_ntire", pretrained=str(file))
    model = task.model()
    task.load_init(model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), read_weights(file).values())
    )
    with pytest.raises(ValueError, match=r"task\.init and task\.pretrained are both given"):
        SuperResolution("rlfn_ntire", pretrained=str(file), init=str(file))
