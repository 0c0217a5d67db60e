"""What `fedlens apply` does with films: weights from elsewhere, options, going on, batches."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedlens.core.message import Message
from fedlens.data.video import writer as writing
from fedlens.data.video.files import FileFrames, open_frames
from fedlens.data.video.frames import ArrayFrames, FolderFrames
from fedlens.data.video.writer import writer
from fedlens.models.vsr import Bicubic, LightVSR
from fedlens.tasks.apply import upscaling
from fedlens.tasks.super_resolution import SuperResolution
from fedlens.tasks.tiles import Tiles

SMALL = {"width": 4, "blocks": 1}


def run_of(task: SuperResolution, folder: Path) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    task.save(Message({"model": task.model().state_dict()}), folder)
    return folder


def light(tmp_path: Path, **keys: Any) -> tuple[SuperResolution, Path]:
    task = SuperResolution("light", scale=2, options=SMALL, **keys)
    return task, run_of(task, tmp_path / "run")


def film(path: Path, count: int = 20, size: tuple[int, int] = (24, 32), deep: bool = False) -> Path:
    """Smooth, because H.264 keeps that."""
    rows = torch.linspace(0, 1, size[0]).view(1, 1, -1, 1)
    times = torch.linspace(0, 0.5, count).view(-1, 1, 1, 1)
    clip = (rows * 0.5 + times).expand(count, 3, *size)
    levels = 65535 if deep else 255
    frames = (clip * levels).round().to(torch.int32 if deep else torch.uint8)
    like = ArrayFrames(torch.zeros(1, 3, *size, dtype=torch.uint8), rate=Fraction(25))
    with writer(path, like, size, quality=4, deep=deep) as write:
        write(frames)
    return path


class Stops(nn.Module):
    """Bicubic that is interrupted at a certain call."""

    calls = 0

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.inner = at, Bicubic(2)

    def forward(self, x: Tensor) -> Tensor:
        Stops.calls += 1
        if Stops.calls == self.at:
            raise KeyboardInterrupt
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", ["large.mp4", "large.avi", "frames"])
def test_an_interrupted_film_goes_on(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 4 frames, segments of 8: the fourth window is interrupted, so one segment of 8 is
    there, or the pictures of 12. Then the rest is made, 3 or 2 windows, and nothing else; the film
    is the one that is made in one go."""
    pytest.importorskip("av")
    monkeypatch.setattr(writing, "SEGMENT", 8)
    task, run = light(tmp_path, window=4)
    source = film(tmp_path / "small.mp4")
    task.apply(run, source, tmp_path / "whole" / target, progress=False)

    made = upscaling.made_ready
    monkeypatch.setattr(upscaling, "made_ready", lambda model, device: Stops(4))
    Stops.calls = 0
    with pytest.raises(KeyboardInterrupt, match="the same command goes on from there"):
        task.apply(run, source, tmp_path / target, progress=False)
    assert not (tmp_path / target).is_file()
    monkeypatch.setattr(upscaling, "made_ready", lambda model, device: Stops(-1))
    Stops.calls = 0
    done = 12 if target == "frames" else 8
    said = task.apply(run, source, tmp_path / target, progress=False)
    assert f"the first {done} were there already" in said and Stops.calls == (20 - done) // 4
    left = {p.name for p in tmp_path.rglob("*") if "plan" in p.name or "parts" in p.name}
    assert not left
    whole, again = open_frames(tmp_path / "whole" / target), open_frames(tmp_path / target)
    assert len(again) == len(whole) == 20
    assert torch.equal(whole.read(0, 20), again.read(0, 20))
    # nothing is left to go on from
    monkeypatch.setattr(upscaling, "made_ready", made)
    assert "already" not in task.apply(run, source, tmp_path / target, progress=False)


def test_ten_bits_stay_ten(tmp_path: Path) -> None:
    """A ramp of 600 levels of 1023 survives, where 8 bits could only hold a quarter of them."""
    av = pytest.importorskip("av")
    source = film(tmp_path / "deep.mp4", 3, (600, 32), deep=True)
    assert FileFrames(source).bits == 10
    task, run = light(tmp_path)
    said = task.apply(run, source, tmp_path / "large.mp4", progress=False, quality=4)
    assert "its 10 bits a colour were kept as 10" in said
    with av.open(str(tmp_path / "large.mp4")) as container:
        frame = next(container.decode(video=0))
        assert frame.format.name == "yuv420p10le"
    large = FileFrames(tmp_path / "large.mp4")
    large.deep = True
    ramp = large.read(0, 1)[0, 1].float().mean(1)
    assert len(ramp.round().unique()) > 500
    said = task.apply(run, source, tmp_path / "frames", progress=False)
    assert "its 10 bits a colour became 8" in said


@pytest.mark.parametrize(
    "name", ["light", "bidirectional", "vrt_small", "rvrt_small", "iart_small"]
)
def test_one_picture_with_every_network(name: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 24, 3), 90, np.uint8)).save(tmp_path / "a.png")
    task = SuperResolution(name, scale=4)
    run = run_of(task, tmp_path / "run")
    task.apply(run, tmp_path / "a.png", tmp_path / "b.png", progress=False)
    assert open_frames(tmp_path / "b.png").size == (80, 96)


def test_a_folder_of_films(tmp_path: Path) -> None:
    """Films and folders of frames, each to its place; what is there is left alone."""
    pytest.importorskip("av")
    (tmp_path / "in" / "shots").mkdir(parents=True)
    film(tmp_path / "in" / "a.mp4", 3)
    film(tmp_path / "in" / "b.mkv", 2)
    for k in range(2):
        Image.fromarray(np.full((8, 8, 3), 50, np.uint8)).save(tmp_path / "in/shots" / f"{k}.png")
    task, run = light(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.mkv").write_text("here before")
    said = task.apply(run, tmp_path / "in", tmp_path / "out", progress=False)
    assert said.startswith("2 films") and "1 were there already" in said
    assert len(FileFrames(tmp_path / "out" / "a.mp4")) == 3
    assert FolderFrames(tmp_path / "out" / "shots").size == (16, 16)
    assert (tmp_path / "out" / "b.mkv").read_text() == "here before"
    with pytest.raises(ValueError, match=r"holds several films: .*x\.mp4 must be a folder"):
        task.apply(run, tmp_path / "in", tmp_path / "x.mp4", progress=False)


def test_a_preview_and_its_picture(tmp_path: Path) -> None:
    """0.2 seconds of 25 frames a second are 5 of the 20, and the picture has three parts."""
    pytest.importorskip("av")
    task, run = light(tmp_path)
    source = film(tmp_path / "small.mp4")
    said = task.apply(run, source, tmp_path / "large.mp4", progress=False, preview="0.2s")
    assert said.startswith("5 frames") and "large-compared.png" in said
    assert len(FileFrames(tmp_path / "large.mp4")) == 5
    picture = np.asarray(Image.open(tmp_path / "large-compared.png").convert("RGB"))
    side = 2 * 48  # of the height, which is what there is
    assert picture.shape == (18 + side, 3 * (side + 4), 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tile": 4}, "tile is a whole number, at least 8, not 4"),
        ({"window": 1.5}, "window is a whole number, at least 1, not 1.5"),
        ({"half": "yes"}, "half is true or false, not yes"),
        ({"preview": "soon"}, "preview is a number of seconds, such as 3s, not soon"),
        ({"preview": -1}, "preview is a number of seconds"),
        ({"threads": 0}, "threads is a whole number, at least 1"),
        ({"noise": 20}, "LightVSR with these weights is not told any noise"),
        ({"noise": "much"}, "noise is a number of levels from 0 to 255, not much"),
    ],
)
def test_bad_options(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    task, run = light(tmp_path)
    with pytest.raises(ValueError, match=why):
        task.apply(run, tmp_path / "a.png", tmp_path / "b.png", progress=False, **options)


def test_options_change_the_way_and_not_the_picture(tmp_path: Path) -> None:
    """Untrained, the light network is bicubic enlargement, wherever it is cut. Half precision is as
    good as 8 bits of mantissa."""
    g = np.random.default_rng(0)
    Image.fromarray(g.integers(0, 255, (40, 40, 3)).astype(np.uint8)).save(tmp_path / "a.png")
    task, run = light(tmp_path)
    made = {}
    for name, options in {
        "plain": {},
        "cut": {"tile": 8, "margin": 8, "overlap": 0, "window": 1, "threads": 1},
        "half": {"half": True},
    }.items():
        task.apply(run, tmp_path / "a.png", tmp_path / f"{name}.png", progress=False, **options)
        made[name] = open_frames(tmp_path / f"{name}.png").read(0, 1).float()
    assert (made["cut"] - made["plain"]).abs().max() <= 1
    assert (made["half"] - made["plain"]).abs().max() <= 2


def test_memory_decides_the_tiles() -> None:
    """More room, less work twice; what is given stays; with too little room the least is taken."""
    model, size = LightVSR(4), (1080, 1920)
    chosen = [Tiles(4).fitted(model, size, room) for room in (1 << 26, 1 << 31, 1 << 36)]
    work = [t.work(model, size) for t in chosen]
    assert work == sorted(work, reverse=True) and work[-1] < work[0]
    assert all(t.memory(model, size) <= room for t, room in zip(chosen[1:], (1 << 31, 1 << 36)))
    assert chosen[0].window == 4 and chosen[-1].window == 32
    given = Tiles(4).fitted(model, size, 1 << 26, tile=200, window=9)
    assert (given.tile, given.window) == (200, 9)


def test_context_is_what_the_network_looks_at() -> None:
    """LightVSR sees one frame ahead: a window with one frame after it is as good as with four."""
    torch.manual_seed(0)
    model = LightVSR(2, 4, 1)
    nn.init.normal_(model.upsample.last.weight, std=0.05)
    assert Tiles(2).context(model) == (4, 1) and Tiles(2).context(nn.Identity()) == (4, 4)
    clip = torch.rand(9, 3, 12, 12)
    ours = torch.cat(list(Tiles(2, window=3).run(model, lambda a, b: clip[a:b], 9, levels=None)))
    del LightVSR.looks_ahead
    try:
        more = torch.cat(
            list(Tiles(2, window=3).run(model, lambda a, b: clip[a:b], 9, levels=None))
        )
    finally:
        LightVSR.looks_ahead = 1
    assert torch.equal(ours, more)
