"""A pipeline of diffusers that is built and saved here, a few thousand weights large: everything
but the quality is real.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fedlens.core.client import generator
from fedlens.data.source import DataError
from fedlens.generators import StableDiffusion
from fedlens.generators.stable_diffusion import (
    GROUP_SIZE,
    FourBit,
    pack_four_bits,
    quantise,
    unpack_four_bits,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and diffusers about each other


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(tmp_path_factory.mktemp("tiny"))


def build(folder: Path) -> Path:
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({w: k for k, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )
    torch.manual_seed(0)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
    )
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    made = StableDiffusionPipeline(
        vae, text, tokenizer, unet, DDIMScheduler(), None, None, requires_safety_checker=False
    )
    made.save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def test_images_of_a_class(pipeline: Path) -> None:
    """The right number and size, in [0, 1], the same for the same random numbers, others for
    another class or other numbers.
    """
    told = StableDiffusion(str(pipeline), steps=2, batch=2, resolution=16).bind(
        ["cat", "dog"], (3, 8, 8)
    )
    made = told.generate(0, 3, generator(0))
    assert made.shape == (3, 3, 8, 8) and 0 <= float(made.min()) <= float(made.max()) <= 1
    assert torch.equal(made, told.generate(0, 3, generator(0)))
    assert not torch.equal(made, told.generate(1, 3, generator(0))) and not torch.equal(
        made, told.generate(0, 3, generator(1))
    )
    with pytest.raises(DataError, match="knows 2 classes, so it cannot make class 2"):
        told.generate(2, 1, generator(0))
    assert StableDiffusion(str(pipeline), steps=1, resolution=16).bind(["cat"], (1, 8, 8)).generate(
        0, 1, generator(0)
    ).shape == (
        1,
        1,
        8,
        8,
    )


def test_four_bits(pipeline: Path) -> None:
    """Images change a little, the weights of the network shrink to an eighth and a scale for every
    64 (1/8 + 1/64 of 32 bits).
    """
    told = [
        StableDiffusion(str(pipeline), steps=2, resolution=16, bits=b).bind(["cat"], (3, 16, 16))
        for b in (32, 4)
    ]
    whole, small = (t.generate(0, 2, generator(0)) for t in told)
    assert 0 < float((whole - small).abs().mean()) < 0.1
    unet = told[1]._pipeline.unet  # type: ignore[attr-defined]
    layers = [m for m in unet.modules() if isinstance(m, FourBit)]
    before = sum(4 * m.shape.numel() for m in layers)
    after = sum(m.packed.numel() + 4 * m.scales.numel() for m in layers)
    assert len(layers) > 20 and after / before == pytest.approx(1 / 8 + 1 / 64, rel=0.05)


def test_no_such_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    """One that is not there is refused before any client starts, one that is only half there
    when it is used.
    """
    (tmp_path / "nothing").mkdir()
    with pytest.raises(
        DataError,
        match=(
            r"needs a saved pipeline of diffusers, and the folder .*nothing has no model_index.json"
        ),
    ):
        StableDiffusion(str(tmp_path / "nothing")).bind(["cat"])
    with pytest.raises(
        DataError, match="no/such/place is neither a folder here nor found on the hub: "
    ):
        StableDiffusion("/no/such/place").bind(["cat"])
    (tmp_path / "nothing" / "model_index.json").write_text(
        '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DModel"]}'
    )
    with pytest.raises(DataError, match="could not be loaded"):
        StableDiffusion(str(tmp_path / "nothing")).bind(["cat"]).generate(0, 1, generator(0))


def test_loading_says_nothing(pipeline: Path, capfd: pytest.CaptureFixture[str]) -> None:
    StableDiffusion(str(pipeline)).bind(["cat"], (3, 8, 8))._loaded()  # type: ignore[attr-defined]
    assert capfd.readouterr() == ("", "")


def test_packing_by_hand() -> None:
    """A group whose largest weight is 7 has scale 1: whole numbers come back as they were, 2.4
    becomes 2, and the error is half a scale at most."""
    weight = torch.zeros(1, GROUP_SIZE)
    weight[0, :5] = torch.tensor([7.0, -7.0, 3.0, 2.4, -0.6])
    packed, scales = pack_four_bits(weight)
    assert (
        packed.dtype == torch.uint8
        and packed.numel() == GROUP_SIZE // 2
        and scales.tolist() == [[1.0]]
    )
    assert int(packed[0]) == (7 + 8) + 16 * (-7 + 8)
    assert unpack_four_bits(packed, scales, weight.shape)[0, :5].tolist() == [7, -7, 3, 2, -1]
    odd = torch.randn(3, 5, 3, 3, generator=generator(0))
    back = unpack_four_bits(*pack_four_bits(odd), odd.shape)
    assert (
        back.shape == odd.shape
        and float((back - odd).abs().max()) <= float(odd.abs().max()) / 14 + 1e-6
    )


def test_quantised_layers_compute_with_the_unpacked_weights() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(128, 4), nn.Linear(4, 2)
    )
    x = torch.randn(2, 3, 8, 8)
    quantise(net)
    # 8 weights are not worth it
    assert (
        isinstance(net[0], FourBit)
        and isinstance(net[2], FourBit)
        and isinstance(net[3], nn.Linear)
    )
    expected = nn.functional.conv2d(x, net[0].weight, net[0].bias, stride=2, padding=1)
    assert torch.allclose(net[0](x), expected)
    assert not [n for n, _ in net[0].named_parameters() if n.endswith("weight")]
