"""Denoisers denoise, and what is missing is named before the first round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedlens.data.images.reading import read_image
from fedlens.deblur.denoisers import FFDNet, ffdnet_weights, find_ffdnet, load_denoiser
from fedlens.deblur.priors import PlugAndPlay, make_prior
from fedlens.metrics.image import psnr


def test_ffdnet_denoises_as_its_authors_say(data_pack: Path) -> None:
    """Set12 01 with noise 25: the data pack's README measured 30.34 dB on average over seven
    images; one alone is near that.
    """
    truth = read_image(data_pack / "classic" / "gray_set12" / "01.png")
    noisy = truth + 25 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    prior = PlugAndPlay(
        "ffdnet", str(data_pack / "weights" / "denoise" / "ffdnet_ipol_net_gray.pth")
    )
    clean = prior.prox(noisy.clone(), 25.0**2)
    assert psnr(noisy.clamp(0, 255), truth) < 21 and 29 < psnr(clean, truth) < 31
    odd = prior.prox(noisy[:, :61, :77].clone(), 25.0**2)
    assert odd.shape == (1, 61, 77) and psnr(odd, truth[:, :61, :77]) > 28
    colour = load_denoiser(
        "ffdnet", str(data_pack / "weights" / "denoise" / "ffdnet_ipol_net_rgb.pth"), 3
    )
    assert isinstance(colour, FFDNet) and colour.channels == 3


def test_denoisers_of_deepinv_are_priors_too() -> None:
    pytest.importorskip("deepinv")
    truth = torch.full((1, 32, 32), 60.0)
    truth[:, 8:24, 8:24] = 200.0
    noisy = truth + 20 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    clean = make_prior("pnp", "tv").prox(noisy.clone(), 20.0**2)
    assert psnr(clean, truth) > psnr(noisy, truth) + 3


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("ffdnet", "/nowhere/x.pth", "no file of weights at /nowhere/x.pth"),
        ("drunet", "/nowhere/x.pth", "no file of weights at /nowhere/x.pth"),
    ],
)
def test_missing_weights_are_named(name: str, weights: str, words: str) -> None:
    pytest.importorskip("deepinv")
    with pytest.raises(ValueError, match=words):
        load_denoiser(name, weights, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights"):  # and before the first round
        make_prior("pnp", name, weights).check(1)  # type: ignore[arg-type]


def test_weights_for_another_kind_of_image_are_refused(data_pack: Path) -> None:
    with pytest.raises(ValueError, match="this scene has 3"):
        load_denoiser(
            "ffdnet", str(data_pack / "weights" / "denoise" / "ffdnet_ipol_net_gray.pth"), 3
        )


def test_ffdnet_is_looked_for_in_the_data_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights" / "denoise" / "ffdnet_ipol_net_gray.pth"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    assert find_ffdnet(1) is None
    with pytest.raises(ValueError, match=r"weights=PATH, or set FEDLENS_DATA"):
        ffdnet_weights(None, 1)
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    assert ffdnet_weights(None, 1) == file and find_ffdnet(3) is None
