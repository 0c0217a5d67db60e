from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tables import from_table
from torch import Tensor, nn
from toy import same_bits

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import stack
from fedlens.core.client import Output
from fedlens.core.federation import Federation
from fedlens.core.message import Message
from fedlens.core.picture import Picture, save_pictures
from fedlens.core.replies import Heard
from fedlens.core.rounds import run
from fedlens.data.video.degrade import enlarge
from fedlens.data.video.files import FileFrames, open_frames
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.moving_textures import MovingTextures
from fedlens.data.video.writer import writer
from fedlens.engines.loopback import Loopback
from fedlens.engines.simulator import Simulator
from fedlens.layers import (
    FedProx,
    FedSR,
    HighFrequency,
    LossAware,
    Median,
    MultiResolution,
    Scaffold,
)
from fedlens.models.vsr import Bicubic, LightVSR
from fedlens.tasks.super_resolution import SuperResolution, charbonnier
from fedlens.tasks.tiles import Tiles


class Own(nn.Module):
    """A user's network: nothing of it is known to the project."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_first = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        y = nn.functional.pixel_shuffle(self.conv_first(x.flatten(0, 1)), 2)
        return y.reshape(b, t, *y.shape[1:])


def scenes(clients: int = 3, scale: int = 2) -> Federation:
    source = MovingTextures(
        clips=clients,
        groups=clients,
        split="groups",
        scale=scale,
        crop=16,
        height=48,
        width=48,
        frames=4,
        test_clips=1,
    )
    return source.federation(clients, 0)


def test_charbonnier_by_hand() -> None:
    """Differences 3 and 0 with eps = 16 - 9 = 7: sqrt(16) and sqrt(7), mean (4 + 2.645751) / 2."""
    assert float(charbonnier(torch.tensor([3.0, 0.0]), torch.zeros(2), 7.0)) == pytest.approx(
        (4 + 7**0.5) / 2
    )


@pytest.mark.parametrize(
    "layers",
    [[HighFrequency(), LossAware()], [FedProx(0.1)], [Scaffold()], [Median()], [FedSR()]],
    ids=lambda x: type(x[0]).__name__,
)
def test_a_network_of_ones_own_learns_under_every_method(layers: Sequence[Any]) -> None:
    """Untouched, x2: the loss after five rounds is below that of the first."""
    task = SuperResolution(Own, scale=2)
    algorithm = stack(FedAvg(task, lr=5e-3, optimizer="adam", batch=2), *layers)
    federation = scenes()
    losses: list[float | None] = []
    with Simulator(algorithm, federation, workers=0) as engine:
        run(algorithm, engine, 5, after_round=lambda _, r: losses.append(r.loss))
    assert losses[-1] is not None and losses[0] is not None and losses[-1] < losses[0]


def test_same_bits_with_workers_and_over_bytes() -> None:
    task = SuperResolution("light", scale=2, options={"width": 4, "blocks": 1})
    algorithm = stack(
        FedAvg(task, lr=1e-3, optimizer="adam", batch=2), HighFrequency(), LossAware()
    )
    federation = scenes()
    with Simulator(algorithm, federation, workers=2) as engine:
        a = run(algorithm, engine, 2)
    assert same_bits(a, run(algorithm, Loopback(algorithm, federation), 2))


def test_cameras_of_two_resolutions_learn_together() -> None:
    """Where the low view is the native one there is nothing to distil; above it the term is
    Charbonnier of the doubled small answer and the large one, worked out here frame by frame. Five
    rounds of FedVSR with it lower the loss."""
    source = MovingTextures(
        clips=2,
        groups=2,
        split="groups",
        scale=2,
        crop=16,
        height=48,
        width=48,
        frames=4,
        test_clips=1,
        native=(1, 2),
    )
    federation = source.federation(2, 0)
    task = SuperResolution(Own, scale=2)
    layers = [HighFrequency(), MultiResolution(sizes=((8, 8), (4, 4)), alpha=0.5), LossAware()]
    algorithm = stack(FedAvg(task, lr=5e-3, optimizer="adam", batch=2), *layers)
    distil = next(p for p in algorithm.parts() if isinstance(p, MultiResolution))
    model = Own()
    large, small = (f.batch(torch.arange(2)) for f in federation.holdings)
    assert float(distil.distil(model, small, task.forward(model, small))) == 0
    x, gaps = large["x"], []
    for b in range(2):
        for t in range(4):
            low = nn.functional.interpolate(
                x[b, t][None], size=(4, 4), mode="bicubic", antialias=True
            )
            up = nn.functional.interpolate(model(low[None])[0], scale_factor=2, mode="bilinear")
            gaps.append((up[0] - model(x[b : b + 1, t : t + 1])[0, 0]).square().add(1e-9).sqrt())
    expected = 0.5 * torch.stack(gaps).mean()
    torch.testing.assert_close(distil.distil(model, large, task.forward(model, large)), expected)
    losses: list[float | None] = []
    with Simulator(algorithm, federation, workers=0) as engine:
        run(algorithm, engine, 5, after_round=lambda _, r: losses.append(r.loss))
    assert losses[-1] is not None and losses[0] is not None and losses[-1] < losses[0]


def test_loss_aware_weighting_lets_only_sums_reach_the_server() -> None:
    """FedVSR needs no single replies: workers add up what their clients send, and the server sees
    sums of deltas and of importances. That holds for the trees; SecureSum hides
    the scalars as well."""
    task = SuperResolution(Own, scale=2)
    algorithm = stack(
        FedAvg(task, lr=1e-3, optimizer="adam", batch=2), HighFrequency(), LossAware()
    )
    assert algorithm.needs == "sums"
    federation = scenes()
    arrived: list[Heard] = []
    with Simulator(algorithm, federation, workers=0) as engine:
        whole = engine.exchange

        def listen(message: Message, ids: Any, heard: Any) -> Any:
            for item in whole(message, ids, heard):
                assert not isinstance(item, Message)
                if isinstance(item, Heard):
                    arrived.append(item)
                yield item

        engine.exchange = listen  # type: ignore[method-assign]
        run(algorithm, engine, 1)
    assert len(arrived) == 3


def test_evaluation_of_bicubic_equals_direct_computation() -> None:
    """By numpy, frame by frame, then clips."""
    federation = scenes(scale=4)
    task = SuperResolution(scale=4, metrics=("psnr", "psnr_y"))
    pair = federation.test.batch(torch.tensor([0]))
    big = (enlarge(pair["x"], 4).clamp(0, 1) * 255).round()[0].double().numpy()
    true = (pair["y"][0] * 255).round().double().numpy()
    luma = np.array([65.481, 128.553, 24.966]).reshape(3, 1, 1) / 255
    rgb = np.mean(
        [10 * np.log10(255**2 / ((a - b) ** 2).mean()) for a, b in zip(big, true, strict=True)]
    )
    y = np.mean(
        [
            10 * np.log10(255**2 / (((a - b) * luma).sum(0) ** 2).mean())
            for a, b in zip(big, true, strict=True)
        ]
    )
    found = task.evaluate(Bicubic(4), federation.test)
    assert found["psnr"] == pytest.approx(rgb, abs=1e-4) and found["psnr_y"] == pytest.approx(
        y, abs=1e-4
    )


def test_tiles_equal_the_whole() -> None:
    """A network that sees 3 pixels and one frame either way: with more context than that, tiles
    change nothing.
    """
    torch.manual_seed(0)
    model = LightVSR(2, 4, 0)
    nn.init.normal_(model.upsample.last.weight, std=0.05)
    with torch.no_grad():
        model.trunk[0].weight[:, 4:] = 0  # forget the past, so that the reach is finite in time
    clip = torch.rand(7, 3, 33, 41)
    with torch.no_grad():
        whole = (model(clip[None])[0].clamp(0, 1) * 255).round()
    tiles = Tiles(2, tile=8, margin=4, window=3, overlap=1)
    parts = list(tiles.run(model, lambda a, b: clip[a:b], 7))
    assert [len(p) for p in parts] == [3, 3, 1] and parts[0].dtype == torch.uint8
    assert (torch.cat(parts).float() - whole).abs().max() <= 1
    assert ((torch.cat(parts).float() - whole).abs() > 0).float().mean() < 1e-3


def saved(task: SuperResolution, folder: Path) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    task.save(Message({"model": task.model().state_dict()}), folder)
    return folder


def test_apply_to_a_film_keeps_its_sound(tmp_path: Path, data_pack: Path) -> None:
    """Untrained, the light network is bicubic enlargement, so the result must look like it; the
    sound is copied packet by packet.
    """
    av = pytest.importorskip("av")
    source = data_pack / "video_samples" / "R6llTwEh07w.mp4"
    short = tmp_path / "short.mp4"
    with av.open(str(source)) as given, av.open(str(short), "w") as out:
        streams = {
            s: out.add_stream_from_template(s)
            for s in (given.streams.video[0], given.streams.audio[0])
        }
        for packet in given.demux(*streams):
            if packet.dts is not None and packet.pts * packet.time_base < 0.6:
                packet.stream = streams[packet.stream]
                out.mux(packet)
    task = SuperResolution("light", scale=2, options={"width": 4, "blocks": 1}, tile=200)
    run_folder = saved(task, tmp_path / "run")
    told = task.apply(run_folder, short, tmp_path / "large.mp4", progress=False)
    before, after = FileFrames(short), FileFrames(tmp_path / "large.mp4")
    assert "340x256 became 680x512" in told
    assert len(after) == len(before) and after.size == (512, 680) and after.sound
    assert [t * after.base for t in after.times] == [t * before.base for t in before.times]
    want = enlarge(before.read(0, 4).float() / 255, 2).clamp(0, 1)
    assert (after.read(0, 4).float() / 255 - want).abs().mean() < 0.02

    def sound(path: Path) -> list[bytes]:
        with av.open(str(path)) as container:
            return [bytes(p) for p in container.demux(container.streams.audio[0]) if p.size]

    assert sound(short) == sound(tmp_path / "large.mp4")


def test_apply_to_a_folder_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for k in range(3):
        Image.fromarray(
            np.random.default_rng(k).integers(0, 255, (10, 14, 3)).astype(np.uint8)
        ).save(tmp_path / "in" / f"shot{k}.png")
    task = SuperResolution("light", scale=3, options={"width": 4, "blocks": 1})
    run_folder = saved(task, tmp_path / "run")
    task.apply(run_folder, tmp_path / "in", tmp_path / "out", progress=False)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "shot0.png",
        "shot1.png",
        "shot2.png",
    ]
    assert open_frames(tmp_path / "out").size == (30, 42)
    task.apply(run_folder, tmp_path / "in" / "shot0.png", tmp_path / "one.png", progress=False)
    assert open_frames(tmp_path / "one.png").size == (30, 42)
    with pytest.raises(ValueError, match="no option 'colour'"):
        task.apply(run_folder, tmp_path / "in", tmp_path / "out", colour="red")
    with pytest.raises(ValueError, match=r"quality is for video files, and one\.jpg is none"):
        task.apply(run_folder, tmp_path / "in" / "shot0.png", tmp_path / "one.jpg", quality=3)


def test_odd_sides_can_be_written(tmp_path: Path) -> None:
    frames = ArrayFrames(torch.full((3, 3, 15, 21), 90, dtype=torch.uint8), rate=Fraction(10))
    with writer(tmp_path / "odd.mp4", frames, frames.size) as write:
        write(frames.array)
    back = open_frames(tmp_path / "odd.mp4")
    assert back.size == (15, 21) and (back.read(0, 3).float() - 90).abs().max() <= 2


def test_pictures(tmp_path: Path) -> None:
    federation = scenes(scale=2)
    task = SuperResolution("light", scale=2, options={"width": 4, "blocks": 1})
    pictures = task.pictures(task.model().eval(), federation)
    assert [p.kind for p in pictures] == ["compare", "compare", "map", "strip"]
    assert (
        all(i.shape == pictures[0].images[0].shape for i in pictures[0].images)
        and pictures[0].labels[-1] == "reference"
    )
    save_pictures(pictures, tmp_path)


def test_error_maps_share_one_scale(tmp_path: Path) -> None:
    """Maps that reach 1 and 2: on one scale the first ends at half of 255, on its own at 255; the
    ends are told with it.
    """
    maps = [torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 2.0]]])]
    save_pictures(
        [Picture("together", maps, kind="map", one_scale=True), Picture("alone", maps, kind="map")],
        tmp_path,
    )
    levels = [
        [np.asarray(Image.open(tmp_path / f"0{k}-0{j}.png")).tolist() for j in range(2)]
        for k in range(2)
    ]
    assert levels == [[[[0, 128]], [[64, 255]]], [[[0, 255]], [[0, 255]]]]
    together, alone = json.loads((tmp_path / "index.json").read_text())
    assert together["ranges"] == [[0, 2], [0, 2]] and alone["ranges"] == [[0, 1], [0.5, 2]]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no network 'lihgt'"):
        SuperResolution("lihgt")
    with pytest.raises(ValueError, match=r"task\.metrics must be a list, each one of psnr, ssim"):
        from_table("task", "SuperResolution", metrics=["pnsr"])
    with pytest.raises(ValueError, match="has no argument 'depth'"):
        SuperResolution("light", options={"depth": 3})
    with pytest.raises(ValueError, match=r"task\.scale must be one of 1, 2, 3, 4, not 5"):
        from_table("task", "SuperResolution", scale=5)
    with pytest.raises(ValueError, match=r"task\.tile must be .* at least 8 or none, not 4"):
        from_table("task", "SuperResolution", tile=4)
    with pytest.raises(ValueError, match=r"there is no module no\.such\.module"):
        SuperResolution("no.such.module:Net")
    x = torch.zeros(1, 2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"Own made .* at scale 4 it must be"):
        SuperResolution(Own, scale=4).forward(Own(), {"x": x})
    with pytest.raises(ValueError, match="must be the same"):
        SuperResolution(Own, scale=2).loss(
            Output(torch.zeros(1, 2, 3, 8, 8)), {"y": torch.zeros(1, 2, 3, 16, 16)}
        )
