"""What VRT, RVRT and IART share: official names and shapes, sizes, scales, tiles, gradients, files,
and that they learn and federate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens import models, run, stack
from fedlens.algorithms.fedavg import FedAvg
from fedlens.core.algorithm import Algorithm
from fedlens.core.federation import Federation
from fedlens.core.weights import load_weights
from fedlens.data.images.tensors import Tensors
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import FedProx, HighFrequency, LossAware, Scaffold
from fedlens.models.clips import ClipModel, pad_to_multiple, spans
from fedlens.models.iart import IART, iart_small
from fedlens.models.rvrt import RVRT, rvrt_small
from fedlens.models.vrt import VRT, _chain, vrt_small
from fedlens.tasks.super_resolution import SuperResolution

SMALL = {"vrt": vrt_small, "rvrt": rvrt_small, "iart": iart_small}

# Parameters, state-dict entries and the hash of all names, shapes and types, computed from the
# public classes.
FACTS: list[tuple[Callable[[], ClipModel], int, int, str, str]] = [
    (
        lambda: VRT(frames=6),
        30_676_435,
        1666,
        "3a9396ae712a88fd005b14854e339255c772a617aaa463159c0e8341c5996274",
        (
            "VRT, official configuration for 6 frames, x4, width 120, windows of 6 frames, reach 1,"
            " 12 deformable groups"
        ),
    ),
    (
        lambda: VRT(frames=7),
        32_577_991,
        1666,
        "ca534babdeb3c01f1559a511ed249bd89a3e6e5b15f23cd9859f8782e074309b",
        (
            "VRT, official configuration for 7 frames, x4, width 120, windows of 8 frames, reach 2,"
            " 16 deformable groups"
        ),
    ),
    (
        lambda: VRT(frames=16),
        35_134_783,
        1666,
        "e7cb5dd22f6363bb0ca6f802be323a9fb23b7d2eea19802d96092de96652502a",
        (
            "VRT, official configuration for 16 frames, x4, width 120, windows of 8 frames, reach"
            " 3, 24 deformable groups"
        ),
    ),
    (
        RVRT,
        10_782_295,
        504,
        "493441836d0944a653515b9c23ec51079e74abc473755d287acda976f63b45be",
        "RVRT, official configuration, x4, width 144, 12 offset groups",
    ),
    (
        IART,
        13_410_503,
        1162,
        "520594dda833438fd2e7ba6e8b40a7b36828177ac265cd99643398d8925236d9",
        "IART, official configuration, x4, width 120, 3 layers",
    ),
]


@pytest.mark.parametrize(
    ("make", "parameters", "entries", "digest", "words"),
    FACTS,
    ids=["vrt6", "vrt7", "vrt16", "rvrt", "iart"],
)
def test_official_names_and_shapes(
    make: Callable[[], ClipModel], parameters: int, entries: int, digest: str, words: str
) -> None:
    with torch.device("meta"):
        model = make()
    state = model.state_dict()
    text = "\n".join(sorted(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in state.items()))
    assert (sum(p.numel() for p in model.parameters()), len(state)) == (parameters, entries)
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert ClipModel.recognise(state) == words


@pytest.fixture(scope="module", params=list(SMALL))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fresh(name: str, scale: int = 2, recompute: bool = True, seed: int = 0) -> ClipModel:
    """With offsets that do something: they start at zero."""
    torch.manual_seed(seed)
    model: ClipModel = SMALL[name](scale, recompute=recompute)
    for n, p in model.named_parameters():
        if "conv_offset" in n:
            nn.init.normal_(p, std=0.05)
    return model


def clip(t: int = 3, h: int = 16, w: int = 16, b: int = 1) -> Tensor:
    torch.manual_seed(1)
    return (
        F.interpolate(torch.rand(b * t, 3, h // 4, w // 4), size=(h, w), mode="bicubic")
        .clamp(0, 1)
        .unflatten(0, (b, t))
    )


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_scales(name: str, scale: int) -> None:
    with torch.no_grad():
        assert fresh(name, scale).eval()(clip(2)).shape == (1, 2, 3, 16 * scale, 16 * scale)


def test_any_size_is_padded_and_cropped(name: str) -> None:
    """13x18 is no multiple of anything here: the result is the corner of what the repeated border
    gives.
    """
    model, x = fresh(name).eval(), clip(3, 16, 20)[..., :13, :18]
    with torch.no_grad():
        whole = model(pad_to_multiple(x, model.multiple))
        torch.testing.assert_close(model(x), whole[:, :3, :, :26, :36])


def test_a_batch_is_its_clips(name: str) -> None:
    model, x = fresh(name).eval(), clip(4, b=2)
    with torch.no_grad():
        torch.testing.assert_close(
            model(x), torch.cat([model(one[None]) for one in x]), atol=1e-5, rtol=1e-4
        )


def test_every_parameter_of_the_passes_gets_a_gradient_and_recomputing_changes_none(
    name: str,
) -> None:
    x, grads = clip(3), []
    for recompute in (True, False):
        model = fresh(name, recompute=recompute).train()
        for module in model.modules():
            if hasattr(module, "drop"):
                module.drop = 0.3
        torch.manual_seed(5)
        model(x).square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    unused = {n for n, g in grads[0].items() if g is None}
    assert all(
        "swin_backbone" in n
        and n.split(".")[2] in ("conv_first", "conv_first_feat", "conv_before_upsample")
        for n in unused
    )
    assert unused == {n for n, g in grads[1].items() if g is None}
    for n, g in grads[0].items():
        if g is not None:
            torch.testing.assert_close(g, grads[1][n], msg=n)


def test_it_learns(name: str) -> None:
    model, x = fresh(name).train(), clip(2, 16, 16)
    y = F.interpolate(x[0], scale_factor=2, mode="bicubic")[None]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x) - y).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_bad_clips(name: str) -> None:
    model = fresh(name)
    with pytest.raises(ValueError, match="needs clips of at least 2 frames, this one has 1"):
        model(clip(1))
    with pytest.raises(
        ValueError,
        match=r"takes clips of shape \(batch, frames, 3, height, width\), not \(1, 3, 16, 16\)",
    ):
        model(clip(1)[:, 0])
    with pytest.raises(ValueError, match=r"enlarges by (1, )?2, 3 or 4, not by 5"):
        SMALL[name](5)


def test_long_reach_needs_more_frames() -> None:
    """Three neighbours either side, as the official configuration for 16 frames has them: four
    frames are the fewest.
    """
    model = VRT(
        2,
        window=(2, 4, 4),
        depths=(2,) * 7 + (1,),
        dims=(12,) * 8,
        heads=2,
        alone=0,
        reach=3,
        groups=6,
        width=8,
    ).eval()
    with torch.no_grad():
        assert model(clip(4)).shape == (1, 4, 3, 32, 32)
    with pytest.raises(ValueError, match="at least 4 frames, this one has 3"):
        model(clip(3))
    with pytest.raises(ValueError, match="for 6, 7 and 16 frames, not 9"):
        VRT(frames=9)


def test_flows_that_reach_farther_by_hand() -> None:
    """Uniform motion of (1, 0) a frame, and -1 back: two frames are 2, three are 3; seen away from
    the borders.
    """
    flow = torch.zeros(1, 4, 2, 3, 9)
    flow[:, :, 0] = 1
    for after in (True, False):
        reached = _chain(flow if after else -flow, 3, after)
        assert [f.shape[1] for f in reached] == [4, 3, 2]
        assert [abs(float(f[0, 0, 0, 1, 4])) for f in reached] == [1, 2, 3]


# -- tiles -----------------------------------------------------------------------------------------


class Local(ClipModel):
    """Sees two pixels and one frame either side, so that tiles with enough overlap must give the
    same bits.
    """

    def __init__(self, tile: tuple[int, int, int] | None) -> None:
        super().__init__(2, (1, 1, 1), tile, (2, 4, 4))
        torch.manual_seed(0)
        self.weight = torch.randn(12, 3, 3, 5, 5, dtype=torch.float64)

    def restore(self, clip: Tensor) -> Tensor:
        return F.pixel_shuffle(
            F.conv3d(clip.transpose(1, 2), self.weight, padding=(1, 2, 2)).transpose(1, 2), 2
        )

    @staticmethod
    def configuration(weights: Mapping[str, Tensor]) -> str | None:
        return None


@pytest.mark.parametrize("tile", [(4, 8, 8), (3, 9, 7), (20, 5, 50)])
def test_tiles_are_the_whole(tile: tuple[int, int, int]) -> None:
    x = clip(7, 20, 24).double()
    with torch.no_grad():
        torch.testing.assert_close(Local(tile).eval()(x), Local(None).eval()(x))


@pytest.mark.parametrize(
    ("n", "tile", "overlap"),
    [(10, 4, 2), (11, 4, 2), (9, 9, 3), (5, 9, 3), (100, 40, 7), (41, 40, 2)],
)
def test_every_pixel_comes_from_one_tile(n: int, tile: int, overlap: int) -> None:
    found = list(spans(n, tile, overlap))
    assert [k for *_, low, high in found for k in range(low, high)] == list(range(n))
    assert all(a <= low <= high <= b and b - a == min(tile, n) for a, b, low, high in found)
    assert all(low - a >= overlap // 2 for a, b, low, high in found if a > 0)


def test_networks_work_in_tiles(name: str) -> None:
    model, x = fresh(name).eval(), clip(3, 16, 24)
    with torch.no_grad():
        whole = model(x)
        model.tile, model.overlap = (3, 16, 16), (2, 8, 8)
        tiled = model(x)
    assert tiled.shape == whole.shape and float((tiled - whole).abs().mean()) < 0.05


def test_tiles_smaller_than_their_overlap() -> None:
    with pytest.raises(ValueError, match="cannot overlap"):
        Local((2, 8, 8))


# -- files -----------------------------------------------------------------------------------------


def test_weights_come_back(name: str, tmp_path: Path) -> None:
    torch.save({"params": fresh(name, seed=1).state_dict()}, tmp_path / "net.pth")
    model = load_weights(fresh(name, seed=2), tmp_path / "net.pth")
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), fresh(name, seed=1).state_dict().values())
    )


def test_weights_of_another_configuration(tmp_path: Path) -> None:
    torch.save(vrt_small(2).state_dict(), tmp_path / "x2.pth")
    with pytest.raises(
        ValueError,
        match=(
            r"holds VRT, x2, width 24, .*; the model is VRT, x3, .*upsample\.0\.weight is \(96, 24,"
            r" 1, 3, 3\), expected \(216, "
        ),
    ):
        load_weights(vrt_small(3), tmp_path / "x2.pth")
    torch.save(rvrt_small(2).state_dict(), tmp_path / "rvrt.pth")
    with pytest.raises(
        ValueError,
        match=(
            r"holds RVRT, x2, width 24, 4 offset groups; the model is IART, x2, width 24, 1 layers"
        ),
    ):
        load_weights(iart_small(2), tmp_path / "rvrt.pth")


def test_names_are_exported() -> None:
    for what in ("VRT", "vrt_small", "RVRT", "rvrt_small", "IART", "iart_small"):
        assert what in models.__all__ and callable(getattr(models, what))


# -- federated -------------------------------------------------------------------------------------


def clips_of(n: int, seed: int, t: int = 2, size: int = 16) -> Tensors:
    torch.manual_seed(seed)
    y = F.interpolate(
        torch.rand(n * t, 3, size // 2, size // 2), size=(2 * size, 2 * size), mode="bicubic"
    ).clamp(0, 1)
    return Tensors({"x": F.avg_pool2d(y, 2).unflatten(0, (n, t)), "y": y.unflatten(0, (n, t))})


STACKS: dict[str, Callable[[FedAvg], Algorithm]] = {
    "fedvsr": lambda base: stack(base, HighFrequency(), LossAware()),
    "fedprox": lambda base: stack(base, FedProx(mu=0.001)),
    "scaffold": lambda base: stack(base, Scaffold()),
}


PAIRS = [("rvrt", "fedvsr")]
REST = [(n, m) for n in SMALL for m in STACKS if (n, m) not in PAIRS]


@pytest.mark.parametrize(
    ("name", "method"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)]
)
def test_they_federate(name: str, method: str) -> None:
    """Two rounds with the flow frozen in the first: it moves in the second, everything else in
    both, and the loss falls.
    """
    task = SuperResolution(f"{name}_small", 2)
    base = FedAvg(
        task,
        optimizer="adam",
        lr=1e-3,
        batch=2,
        lr_factors=(("spynet.*", 0.25),),
        freeze=("spynet.*",),
        freeze_rounds=1,
    )
    algorithm = STACKS[method](base)
    t = 3 if name == "rvrt" else 2  # RVRT needs no flow inside its clips of two
    federation = Federation([clips_of(2, 0, t), clips_of(2, 1, t)])
    losses, flows = [], []

    def after(progress: object, done: object) -> None:
        losses.append(done.loss)  # type: ignore[attr-defined]
        flows.append(done.state.trees["model"]["spynet.basic_module.0.basic_module.0.weight"])  # type: ignore[attr-defined]

    run(algorithm, Loopback(algorithm, federation), 2, after_round=after)
    assert losses[1] < losses[0]
    assert torch.equal(
        flows[0], algorithm.init().trees["model"]["spynet.basic_module.0.basic_module.0.weight"]
    )
    assert not torch.equal(flows[1], flows[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_full_rvrt_for_one_round() -> None:
    """Official size, one clip a client, a process with two threads."""
    algorithm = stack(
        FedAvg(
            SuperResolution("rvrt", 4),
            optimizer="adam",
            lr=4e-4,
            betas=(0.9, 0.99),
            batch=1,
            lr_factors=(("spynet.*", 0.25),),
        ),
        HighFrequency(),
        LossAware(),
    )
    torch.manual_seed(0)
    y = F.interpolate(torch.rand(4, 3, 16, 16), size=(128, 128), mode="bicubic").clamp(0, 1)
    data = Tensors({"x": F.avg_pool2d(y, 4)[None], "y": y[None]})
    engine = Simulator(algorithm, Federation([data, data]), workers=1, threads=2)
    seen = []
    try:
        state = run(algorithm, engine, 1, after_round=lambda p, r: seen.append(r))
    finally:
        engine.close()
    assert seen[0].asked == 2 and not seen[0].lost and len(state.trees["model"]) == 504
    assert all(bool(t.isfinite().all()) for t in state.trees["model"].values())
