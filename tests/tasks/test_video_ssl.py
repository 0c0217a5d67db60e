"""From a recipe to a run folder and on: pretraining, retrieval over a folder, fine-tuning, a linear
probe, analyses. All on made-up shapes."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from films import make_clips
from safetensors.torch import load_file

from fedlens.algorithms import FedAvg
from fedlens.cli import main as cli
from fedlens.config import recipe as config
from fedlens.core.client import generator
from fedlens.core.facts import Facts
from fedlens.core.picture import Picture
from fedlens.data.video.frames import ArrayFrames
from fedlens.data.video.moving_shapes import ACTIONS, MovingShapes, moving_shape
from fedlens.data.video.video_set import RetrievalTest, VideoSet
from fedlens.data.video.writer import writer
from fedlens.report import page_data
from fedlens.report.reading import read_run
from fedlens.runs.job import experiment
from fedlens.runs.setup import make_setup
from fedlens.tasks.action import ActionRecognition
from fedlens.tasks.apply.search import draw_sheet, wrapped
from fedlens.tasks.ctp import CtP
from fedlens.tasks.retrieval import embed, pixel_scores, pool_maps
from fedlens.tasks.speed import Speed
from fedlens.tasks.video_clips import clip_starts, crop_square, middle_frame

SMALL = {
    "data.videos": 16,
    "data.tests": 8,
    "data.length": 12,
    "data.side": 20,
    "task.frames": 4,
    "task.size": 16,
    "task.clips": 2,
    "clients": 4,
    "cohort": 2,
    "rounds": 2,
    "evaluate_every": 1,
    "workers": 0,
}
RECIPES = [
    "fedvssl",
    "fedvssl-jhmdb",
    "fedvssl-ctp",
    "fedvssl-vcop",
    "fedvssl-speed",
    "fedvssl-central",
    "fedvssl-finetune",
    "fedvssl-probe",
]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experiment("fedvssl", out=tmp_path_factory.mktemp("runs") / "pre", **SMALL).folder


@pytest.mark.parametrize("name", [*RECIPES, "fedvssl-jhmdb-finetune"])
def test_recipes_build(name: str) -> None:
    recipe = config.read(name)
    recipe.build_source()
    algorithm = recipe.build_algorithm(recipe.build_task())
    assert type(algorithm.base).__name__ == "FedAvg"


def test_the_published_recipe_has_the_published_pretext() -> None:
    """What the demo changes so that it learns in a minute does not reach the paper's recipes."""
    published = CtP(backbone="r3d18", frames=16, size=112, clips=10)
    assert config.read("fedvssl-ctp").build_task() == published
    central = config.read("fedvssl-central")
    assert central.build_task() == published
    base = central.build_algorithm(published).base
    assert isinstance(base, FedAvg)
    assert (base.optimizer, base.lr, base.momentum, base.weight_decay, base.batch) == (
        "sgd",
        0.01,
        0.9,
        1e-4,
        32,
    )
    assert base.milestones == (30, 60)


def test_the_rows_of_table_four() -> None:
    for alpha, beta in ((0, 0), (1, 0), (0, 1), (1, 1), (0.9, 0), (0.9, 1)):
        recipe = config.read("fedvssl-ctp", algorithm=f"fedvssl-{alpha}-{beta}")
        parts = {type(p).__name__: p for p in recipe.build_algorithm(recipe.build_task()).parts()}
        assert list(parts) == ["FedAvg", "BackboneOnly", "MixedWeights", "MovingMean"]
        assert (parts["MixedWeights"].alpha, parts["MovingMean"].beta, parts["FedAvg"].lr) == (
            alpha,
            beta,
            0.01,
        )


def test_pretraining_shares_the_backbone_only(pretrained: Path) -> None:
    """The server tests retrieval without a head; what is saved and what travels is the backbone:
    228,120 parameters and its buffers (a mean and a variance for each of 8 + 16 + 48 + 96 + 192 =
    360 channels, a counter for each of 12 BatchNorms), four bytes each, counters eight: 4 x
    (228,120 + 720) + 96 = 915,456 a client."""
    saved = load_file(pretrained / "model.safetensors")
    assert {n.split(".")[0] for n in saved} == {"backbone"}
    records = [json.loads(line) for line in (pretrained / "metrics.jsonl").read_text().splitlines()]
    assert list(records[0]["metrics"]) == [f"recall_at_{k}" for k in (1, 5, 10, 20, 50)]
    size = sum(t.numel() * t.element_size() for t in saved.values())
    assert records[0]["bytes_up"] == records[0]["bytes_down"] == 2 * size == 2 * 915_456
    assert (
        sum(t.numel() for n, t in saved.items() if "running" not in n and "num_" not in n)
        == 228_120
    )
    assert {"distance_backbone_spread", "distance_head_spread"} <= records[0]["state"].keys()
    index = json.loads((pretrained / "pictures" / "index.json").read_text())
    assert [p["kind"] for p in index] == ["strip", "sheet"] and len(index[1]["files"]) == 5 * 8


def test_fine_tuning_and_probing_start_from_a_run(pretrained: Path, tmp_path: Path) -> None:
    """A probe leaves the backbone as it came, to the bit; fine-tuning does not."""
    common = {
        "data.name": "MovingShapes",
        "task.classes": 8,
        "task.backbone": "r3d10s",
        "task.stride": 1,
        **SMALL,
        "data.side": 20,
        "task.init": str(pretrained / "model.safetensors"),
        "clients": 1,
        "cohort": "none",
        "batch": 4,
    }
    before = load_file(pretrained / "model.safetensors")
    for recipe, same in (("fedvssl-probe", True), ("fedvssl-finetune", False)):
        end = experiment(recipe, out=tmp_path / recipe, **common)
        after = load_file(end.folder / "model.safetensors")
        assert all(torch.equal(t, after[n]) for n, t in before.items()) == same
        assert after["head.1.weight"].abs().max() > 0.005  # it began at N(0, .001)
        assert list(end.metrics) == ["accuracy", "accuracy_top5", "loss"]


def test_a_missing_init_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"{k}={v}" for k, v in SMALL.items()]
    assert (
        cli.invoke(
            [
                "run",
                "fedvssl",
                *small,
                "task.init=nowhere.safetensors",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 2
    )
    assert "no weights at nowhere.safetensors" in capsys.readouterr().err


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "neighbours.csv").read_text().splitlines()))


def test_retrieval_over_a_folder(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k in range(6):
        clip = ArrayFrames(moving_shape(k % 2, 10, 32, generator(k)), rate=Fraction(10))
        with writer(tmp_path / "videos" / ACTIONS[k % 2] / f"{k}.mp4", clip, (32, 32)) as write:
            write(clip.array)
    (tmp_path / "videos" / "left" / "bad.mp4").write_text("no video")
    out = tmp_path / "found"
    assert cli.invoke(["apply", str(pretrained), str(tmp_path / "videos"), str(out), "k=3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "6 videos indexed, the 3 nearest of 6" in said
        and "1 skipped (bad.mp4" in said
        and "of the same folder" in said
    )
    rows = table(out)
    assert len(rows) == 18 and all(r["query"] != r["video"] for r in rows)
    assert (out / "sheet.png").stat().st_size > 1000
    stamp = (out / "index.safetensors").stat().st_mtime_ns
    assert cli.invoke(["apply", str(pretrained), str(tmp_path / "videos"), str(out), "k=1"]) == 0
    assert "6 videos read from the index" in " ".join(capsys.readouterr().out.split())
    assert (out / "index.safetensors").stat().st_mtime_ns == stamp
    one = str(tmp_path / "videos" / "left" / "1.mp4")
    assert (
        cli.invoke(
            ["apply", str(pretrained), one, str(out), f"gallery={tmp_path / 'videos'}", "k=1"]
        )
        == 0
    )
    found = table(out)[0]
    # itself
    assert found["video"] == "left/1.mp4" and float(found["similarity"]) == pytest.approx(
        1, abs=1e-4
    )
    for bad, sentence in (
        ("kk=1", "has no option 'kk': there are gallery, k, clips"),
        ("k=few", "k is a whole number of at least 1, not 'few'"),
    ):
        assert cli.invoke(["apply", str(pretrained), one, str(out), bad]) == 2
        assert sentence in capsys.readouterr().err


def test_a_query_from_elsewhere_has_no_class_of_the_gallery(
    pretrained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folders left and right, a query from a folder that is neither: it goes by its own name,
    nothing is ticked, no share is claimed. A query that cannot be read is named itself, not what
    was skipped in the gallery. A file that changed is indexed again."""
    from fedlens.tasks.apply import search

    for k, name in enumerate(("videos/left/a", "videos/right/b", "videos/right/c", "mine/q")):
        clip = ArrayFrames(moving_shape(k % 2, 10, 32, generator(k)), rate=Fraction(10))
        with writer(tmp_path / f"{name}.mp4", clip, (32, 32)) as write:
            write(clip.array)
    (tmp_path / "videos" / "left" / "bad.mp4").write_text("no video")
    (tmp_path / "mine" / "empty.mp4").touch()
    labels: list[str] = []
    sheet = search.contact_sheet
    monkeypatch.setattr(
        search, "contact_sheet", lambda *args: labels.extend((made := sheet(*args)).labels) or made
    )
    out, gallery = str(tmp_path / "found"), f"gallery={tmp_path / 'videos'}"
    assert (
        cli.invoke(
            ["apply", str(pretrained), str(tmp_path / "mine" / "q.mp4"), out, gallery, "k=3"]
        )
        == 0
    )
    assert labels[0] == "query: q.mp4" and sorted(x.split()[1] for x in labels[1:]) == [
        "left",
        "right",
        "right",
    ]
    assert all(x.startswith("·") for x in labels[1:])
    assert (
        "same folder" not in (said := " ".join(capsys.readouterr().out.split()))
        and "1 skipped (bad.mp4: cannot be read" in said
    )
    assert "bad.mp4: cannot be read" in (tmp_path / "found" / "report.html").read_text()
    assert (
        cli.invoke(["apply", str(pretrained), str(tmp_path / "mine" / "empty.mp4"), out, gallery])
        == 2
    )
    assert (
        "could be read in" in (said := capsys.readouterr().err)
        and "(empty.mp4: cannot be read" in said
        and "bad.mp4" not in said
    )
    (tmp_path / "videos" / "left" / "a.mp4").write_bytes((tmp_path / "mine" / "q.mp4").read_bytes())
    assert (
        cli.invoke(
            ["apply", str(pretrained), str(tmp_path / "mine" / "q.mp4"), out, gallery, "k=3"]
        )
        == 0
    )
    assert "3 videos indexed" in " ".join(capsys.readouterr().out.split())
    assert table(tmp_path / "found")[0]["video"] == "left/a.mp4"


def test_what_cannot_be_decoded_is_no_result_and_a_broken_index_is_made_again(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clip whose first frame is sound and whose others are cut short looks like a video until it
    is read.
    """
    videos, out = make_clips(tmp_path / "videos", ["a", "b", "c"]), tmp_path / "found"
    for frame in sorted((videos / "c").iterdir())[1:]:
        frame.write_bytes(frame.read_bytes()[:200])
    search = ["apply", str(pretrained), str(videos), str(out), "k=2"]

    def said() -> str:
        assert cli.invoke(search) == 0
        return " ".join(capsys.readouterr().out.split())

    with pytest.warns(UserWarning, match="skipped"):
        first = said()
    assert "2 videos indexed" in first and "1 skipped (c: cannot be decoded)" in first
    assert len(load_file(out / "index.safetensors")["rows"]) == 2
    assert {r["query"] for r in table(out)} == {r["video"] for r in table(out)} == {"a", "b"}
    again = said()  # without looking at c's frames again
    assert "2 videos read from the index" in again and "1 skipped (c: cannot be decoded)" in again
    (out / "index.safetensors").write_text("junk")
    with pytest.warns(UserWarning, match="skipped"):
        assert "2 videos indexed" in said()
    assert "read from the index" in said()
    assert not list(out.glob(".*"))
    with pytest.warns(UserWarning, match="skipped"):
        assert (
            cli.invoke(
                ["apply", str(pretrained), str(videos), str(out), f"gallery={videos}", "k=1"]
            )
            == 0
        )
    assert {r["query"] for r in table(out)} == {"a", "b"}


@pytest.mark.parametrize(
    "what",
    [
        ["landscape", "--points", "3"],
        ["surface", "--points", "2"],
        ["perturbation"],
        ["target", "--value", "0"],
    ],
)
def test_analyses_end_in_the_report(
    pretrained: Path, what: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = what
    assert cli.invoke(["analyse", name, str(pretrained), *options]) == 0
    numbers = json.loads((pretrained / "analysis" / f"{name}.json").read_text())
    index = json.loads((pretrained / "pictures" / "index.json").read_text())
    assert any(f"{name}-00.png" in p["files"] for p in index)
    if name == "landscape":
        assert numbers["steps"] == [-1, 0, 1] and len(numbers["loss"]["pre"]) == 3
    if name == "target":
        # two epochs over eight clips
        assert numbers["spent"]["pre"]["rounds"] == 1 and numbers["spent"]["pre"]["examples"] == 16
    if name == "perturbation":
        summary = json.loads((pretrained / "summary.json").read_text())
        # strength 0 is the model itself
        assert numbers["values"]["pre"][0] == pytest.approx(summary["metrics"]["recall_at_1"])


def test_the_middle_of_171x128_is_112_of_its_own_pixels() -> None:
    """The papers' test protocol: scale to 171x128, cut the middle 112. Rows 8 to 119, columns
    round(59 / 2) = 30 to 141; nothing is interpolated."""
    pixels = torch.randint(256, (2, 3, 128, 171), dtype=torch.uint8, generator=generator(0))
    assert torch.equal(
        crop_square(pixels, 112, None), (pixels[..., 8:120, 30:142].float() / 255).transpose(0, 1)
    )


def test_even_distances() -> None:
    """Ten frames, clips of four: they begin between 0 and 6. Three of them: 0, 3, 6. One: the
    middle. A video of four: all on one another."""
    assert (
        clip_starts(10, 4, 3) == [0, 3, 6]
        and clip_starts(10, 4, 1) == [3]
        and clip_starts(4, 4, 3) == [0, 0, 0]
    )
    assert clip_starts(10, 4, 2, stride=2) == [0, 3]


def test_small_maps_are_not_pooled() -> None:
    assert pool_maps(torch.zeros(1, 5, 2, 7, 7)).shape == (1, 5 * 2 * 9) and pool_maps(
        torch.zeros(1, 5, 1, 2, 2)
    ).shape == (1, 20)


class Mean(torch.nn.Module):
    """Features are the mean colour: retrieval by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3, 4), keepdim=True)


def test_retrieval_by_hand() -> None:
    """Red and green films; a query of each, and one of 3 frames, too short for a clip: it is like
    nothing, and the first of the gallery counts."""

    def plain(r: int, g: int, frames: int = 6) -> ArrayFrames:
        return ArrayFrames(
            torch.tensor([r, g, 9])
            .byte()[None, :, None, None]
            .expand(frames, 3, 20, 20)
            .contiguous()
        )

    gallery = VideoSet([plain(200, 10), plain(10, 200)], [0, 1], ["a", "b"])
    queries = VideoSet(
        [plain(100, 20), plain(20, 100), plain(20, 100, 3)], [0, 1, 1], ["c", "d", "e"]
    )
    task = Speed(backbone="r3d10s", frames=4, size=16, clips=2, strides=(0, 1), majority=True)
    rows = embed(Mean(), queries, 4, 16, 2)
    assert (
        torch.allclose(rows[0], torch.tensor([100, 20, 9]) / 255, atol=1e-6) and not rows[2].any()
    )
    found = task.evaluate(Mean(), RetrievalTest(gallery, queries))
    assert (
        found["recall_at_1"] == pytest.approx(2 / 3)
        and found["recall_at_5"] == 1.0
        and found["vote_at_1"] == pytest.approx(2 / 3)
    )


def test_a_broken_video_is_skipped_and_the_batch_goes_on() -> None:
    from fedlens.data.source import DataError

    class Broken(ArrayFrames):
        def read(self, low: int, high: int) -> torch.Tensor:
            raise DataError("x.mp4 cannot be decoded after frame 3")

    fed = MovingShapes(videos=4, tests=2, length=12, side=20).federation(1, 0)
    held = fed.holdings[0]
    task = ActionRecognition(classes=8, backbone="r3d10s", frames=4, stride=1, size=16)
    bad = VideoSet([held.clips[0], Broken(held.clips[1].array)], held.labels[:2], held.sources[:2])
    data = task.admit(type(fed)([bad])).holdings[0]
    with pytest.warns(UserWarning, match=r"skipped: x.mp4"):
        assert len(data.batch(torch.tensor([0, 1]), generator(0))["x"]) == 1
    with pytest.warns(
        UserWarning, match=r"skipped: x.mp4"
    ):  # alone in its batch: the other video stands in for it
        assert torch.equal(data.batch(torch.tensor([1]))["x"], data.batch(torch.tensor([0]))["x"])
    with pytest.warns(UserWarning, match=r"skipped: x.mp4"):  # in retrieval it is like nothing
        rows = embed(Mean(), bad, 4, 16, 2)
    assert (
        bool(rows[0].any())
        and not bool(rows[1].any())
        and not bool(middle_frame(bad.clips[1]).any())
    )
    none = task.admit(type(fed)([bad.take([1])])).holdings[0]
    with (
        pytest.raises(DataError, match=r"none of the 1 videos here can be decoded"),
        pytest.warns(UserWarning),
    ):
        none.batch(torch.tensor([0]))


def test_too_many_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the data has 8 classes, but the task says 5: set task.classes=8"
    ):
        ActionRecognition(classes=5).fits(Facts(classes=tuple(ACTIONS)))


def test_a_run_shows_what_is_reached_without_learning(
    pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the summary and on the page: the fresh network's retrieval, evaluated here once more, and
    that of the mean frame's pixels.
    """
    summary = json.loads((pretrained / "summary.json").read_text())
    assert list(summary["references"]) == ["untrained weights", "mean frame's pixels"]
    setup = make_setup(config.read(pretrained))
    fresh = setup.algorithm.result(setup.algorithm.init())
    assert summary["references"]["untrained weights"] == pytest.approx(
        setup.task.evaluate(fresh, setup.federation.test)
    )
    view = page_data.run_view(read_run(pretrained), str)
    assert view["references"][0].startswith("untrained weights: recall_at_1 ")
    assert "untrained weights: recall_at_1" in (pretrained / "report.html").read_text()


def test_what_is_not_above_a_reference_is_said() -> None:
    found = {"recall_at_1": 0.25, "recall_at_5": 0.5}
    above = {"metrics": found, "references": {"pixels": {"recall_at_1": 0.2}}}
    assert page_data.reference_lines(above) == ["pixels: recall_at_1 0.2"]
    level = {
        "metrics": found,
        "references": {"pixels": {"recall_at_1": 0.25}, "untrained": {"recall_at_1": 0.3}},
    }
    assert page_data.reference_lines(level) == [
        "pixels: recall_at_1 0.25",
        "untrained: recall_at_1 0.3",
        "recall_at_1 0.25 is not better than pixels (0.25) and untrained (0.3)",
    ]
    assert page_data.reference_lines({"metrics": found}) == []
    # of a damaged summary
    assert page_data.reference_lines({"metrics": [], "references": {"a": 3}}) == ["a: "]


def test_pixels_find_what_looks_the_same() -> None:
    """Two colours: the mean frame of a red query is nearest to the red video, whatever moves."""

    def film(colour: list[int]) -> ArrayFrames:
        pixels = torch.tensor(colour, dtype=torch.uint8)[None, :, None, None]
        return ArrayFrames(pixels.expand(6, 3, 12, 12).contiguous())

    gallery = VideoSet([film([200, 0, 0]), film([0, 200, 0])], [0, 1], ["a", "b"])
    queries = VideoSet([film([90, 5, 5]), film([5, 90, 5])], [0, 1], ["c", "d"])
    assert pixel_scores(RetrievalTest(gallery, queries), 8)["recall_at_1"] == 1.0


def test_labels_on_a_sheet_are_whole_and_pictures_large_enough() -> None:
    """Every word of a label is in its lines, none wider than the picture's column; a very wide
    picture keeps a short side of 120 pixels.
    """
    long = "a_very_long_file_name_without_any_space_in_it_0123456789.mp4 and more 0.93"
    for width in (60.0, 150.0):
        lines = wrapped(long, width, lambda text: 7.0 * len(text)).split("\n")
        assert all(7.0 * len(line) <= width for line in lines)
        assert "".join(lines).replace(" ", "") == long.replace(" ", "")
    picture = Picture("", [torch.rand(3, 20, 90), torch.rand(3, 400, 30)], ["query: x", long])
    sheet = draw_sheet(picture, 2)
    assert sheet.width >= 2 * 120 and sheet.height >= 360


def test_an_analysis_goes_elsewhere_if_asked(pretrained: Path, tmp_path: Path) -> None:
    before = sorted(p.name for p in pretrained.rglob("*"))
    out = tmp_path / "out"
    command = ["analyse", "target", str(pretrained), "--value", "0.01", "--out", str(out)]
    assert cli.invoke(command) == 0
    assert {"target.json", "target-00.png", "index.json"} <= {p.name for p in out.iterdir()}
    assert sorted(p.name for p in pretrained.rglob("*")) == before


def test_a_comparison_says_what_it_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{k}={v}" for k, v in SMALL.items()]
    command = ["compare", "fedvssl", "--algorithms", "fedavg,fedvssl-0.9-1", "--seeds", "0,1"]
    out = tmp_path / "cells"
    assert cli.invoke([*command, "--dry-run", "--out", str(out), *given]) == 0
    said = capsys.readouterr().out
    assert "fedvssl-0.9-1" in said and "Nothing was run or written" in said
    assert not out.exists()
