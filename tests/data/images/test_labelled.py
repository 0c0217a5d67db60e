"""Datasets in the layouts people have, made on the spot; the data pack where it is there."""

from __future__ import annotations

import csv
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tables import from_table

from fedlens.data import (
    Cifar10,
    Cifar100,
    Csv,
    HuggingFace,
    ImageFolder,
    Npz,
    Synthetic,
    TinyImageNet,
)
from fedlens.data.images.labelled import CropFlip, skew_images, stratified
from fedlens.data.source import DataError


def pixels(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def everything(federation: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.cat([h.columns[k] for h in federation.holdings]) for k in ("x", "y"))
    order = np.lexsort(x.flatten(1).numpy().T[:8])
    return x[order], y[order]


def write_cifar10(root: Path, layout: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Five batches of 8 and a test batch of 4, in either official layout."""
    x, y = pixels(44), np.arange(44) % 10
    names = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    folder = root / ("cifar-10-batches-bin" if layout == "binary" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    for name, part in zip(names, np.split(np.arange(44), [8, 16, 24, 32, 40])):
        if layout == "binary":
            rows = np.concatenate([y[part, None].astype(np.uint8), x[part].reshape(-1, 3072)], 1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            (folder / name).write_bytes(
                pickle.dumps(
                    {b"data": x[part].reshape(-1, 3072), b"labels": y[part].tolist()}, protocol=2
                )
            )
    return x, y


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar10_layouts(tmp_path: Path, layout: str) -> None:
    x, y = write_cifar10(tmp_path, layout)
    for root in (tmp_path, next(tmp_path.iterdir())):
        federation = Cifar10(root=str(root)).federation(3, 0)
        got_x, got_y = everything(federation)
        order = np.lexsort(torch.from_numpy(x[:40]).flatten(1).numpy().T[:8])
        assert (
            torch.equal(got_x, torch.from_numpy(x[:40][order]))
            and got_y.tolist() == y[:40][order].tolist()
        )
        assert (
            torch.equal(federation.test.columns["x"], torch.from_numpy(x[40:]))
            and federation.facts.classes[3] == "cat"
        )
        assert np.array(list(federation.facts.labels)).sum(0).tolist() == [4] * 10


def test_cifar100_reads_fine_labels(tmp_path: Path) -> None:
    """Two label bytes: coarse first, fine second."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, n in (("train.bin", 12), ("test.bin", 4)):
        labels = np.stack([np.full(n, 7), np.arange(n) + 80], 1).astype(np.uint8)
        (folder / name).write_bytes(
            np.concatenate([labels, pixels(n).reshape(-1, 3072)], 1).tobytes()
        )
    (folder / "fine_label_names.txt").write_text("\n".join(f"thing{k}" for k in range(100)))
    federation = Cifar100(root=str(tmp_path)).federation(2, 0)
    assert (
        sorted(everything(federation)[1].tolist()) == list(range(80, 92))
        and federation.facts.classes[80] == "thing80"
    )


def test_a_pickle_with_anything_else_in_it_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path, "python")
    evil = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    evil.write_bytes(b"cposix\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(DataError, match=r"asks for posix.system"):
        Cifar10(root=str(tmp_path)).federation(2, 0)
    assert not Path("harm").exists()


def test_damaged_and_missing_cifar(tmp_path: Path) -> None:
    write_cifar10(tmp_path, "binary")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match=r"data_batch_2.bin is damaged: 1000 bytes"):
        Cifar10(root=str(tmp_path)).federation(2, 0)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match="is missing"):
        Cifar10(root=str(tmp_path)).federation(2, 0)
    with pytest.raises(
        DataError,
        match=r"no Cifar10 folder at \S+nowhere: set data.root; download=true fetches it$",
    ):  # an absolute path is looked for in one place
        Cifar10(root=str(tmp_path / "nowhere")).federation(2, 0)


def write_folders(root: Path, n: int = 6, size: int = 10) -> Path:
    for k, name in enumerate(("forest", "river", "town")):
        (root / name).mkdir(parents=True)
        for j in range(n):
            Image.fromarray(np.full((size, size, 3), 10 * j + 80 * k, np.uint8)).save(
                root / name / f"{j}.png"
            )
    return root


def test_image_folder_with_broken_files(tmp_path: Path) -> None:
    """EuroSAT-like: one folder per class, no test part. A truncated and a fake image are skipped
    and named; text files are not images.
    """
    root = write_folders(tmp_path / "sat")
    whole = (root / "river" / "2.png").read_bytes()
    (root / "river" / "2.png").write_bytes(whole[: len(whole) // 2])
    (root / "town" / "9.jpg").write_text("not an image")
    (root / "town" / "notes.txt").write_text("hello")
    federation = ImageFolder(root=str(root), test_share=0.25).federation(2, 0)
    assert list(federation.facts.classes) == ["forest", "river", "town"]
    assert sorted(s.split(":")[0] for s in list(federation.facts.skipped)) == [
        "river/2.png",
        "town/9.jpg",
    ]
    assert (
        sum(len(h) for h in federation.holdings) + len(federation.test) == 17
        and len(federation.test) == 4
    )


def test_names_give_classes_their_numbers_also_where_some_are_absent(tmp_path: Path) -> None:
    """Folders forest, river, town; by name, town is 0, lake (of which there is none here) 1, river
    2, forest 3.
    """
    write_folders(tmp_path / "a")
    federation = ImageFolder(
        root=str(tmp_path / "a"), names=("town", "lake", "river", "forest"), least=1
    ).federation(1, 0)
    assert list(federation.facts.classes) == ["town", "lake", "river", "forest"]
    assert sorted(set(federation.holdings[0].columns["y"].tolist())) == [0, 2, 3]
    with pytest.raises(
        DataError, match="has the class 'river', which is not among the names town, forest"
    ):
        ImageFolder(root=str(tmp_path / "a"), names=("town", "forest")).federation(1, 0)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="holds none of the classes town, forest"):
        ImageFolder(root=str(tmp_path / "b"), names=("town", "forest")).federation(1, 0)
    rows = "".join(f"a/{name}/{k}.png,{name}\n" for name in ("town", "forest") for k in (0, 1))
    (tmp_path / "table.csv").write_text("path,label\n" + rows)
    table = Csv(
        file=str(tmp_path / "table.csv"), names=("town", "river", "forest"), least=1
    ).federation(1, 0)
    assert sorted(set(table.holdings[0].columns["y"].tolist())) == [0, 2]


def test_image_folder_with_a_test_part_and_other_sizes(tmp_path: Path) -> None:
    write_folders(tmp_path / "a" / "train")
    write_folders(tmp_path / "a" / "val", n=2)
    Image.fromarray(np.zeros((7, 9), np.uint8)).save(tmp_path / "a" / "train" / "town" / "odd.png")
    with pytest.raises(DataError, match=r"odd.png is 9x7, others are 10x10: set size=N"):
        ImageFolder(root=str(tmp_path / "a")).federation(2, 0)
    federation = ImageFolder(root=str(tmp_path / "a"), size=8, gray=True).federation(2, 0)
    assert len(federation.test) == 6 and federation.holdings[0].columns["x"].shape[1:] == (1, 8, 8)


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    wnids = ["n01", "n02"]
    (tmp_path / "wnids.txt").write_text("\n".join(wnids))
    (tmp_path / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\tlemon\n")
    (tmp_path / "val" / "images").mkdir(parents=True)
    for k, w in enumerate(wnids):
        (tmp_path / "train" / w / "images").mkdir(parents=True)
        for j in range(3):
            Image.fromarray(np.full((64, 64), 50 * k + j, np.uint8)).save(
                tmp_path / "train" / w / "images" / f"{w}_{j}.JPEG"
            )
        Image.fromarray(np.full((64, 64, 3), 50 * k, np.uint8)).save(
            tmp_path / "val" / "images" / f"val_{k}.JPEG"
        )
    (tmp_path / "val" / "val_annotations.txt").write_text(
        "val_0.JPEG\tn01\t0\t0\t1\t1\nval_1.JPEG\tn02\t0\t0\t1\t1\n"
    )
    federation = TinyImageNet(root=str(tmp_path)).federation(2, 0)
    assert list(federation.facts.classes) == ["goldfish", "lemon"] and federation.test.columns[
        "y"
    ].tolist() == [0, 1]
    assert (
        federation.test.columns["x"].shape == (2, 3, 64, 64)
        and abs(int(federation.test.columns["x"][1].float().mean()) - 50) <= 1
    )
    (tmp_path / "wnids.txt").unlink()
    with pytest.raises(DataError, match=r"is not Tiny-ImageNet: wnids.txt is missing"):
        TinyImageNet(root=str(tmp_path)).federation(2, 0)


def test_csv_with_groups(tmp_path: Path) -> None:
    """Groups are hospitals: partition natural keeps them whole."""
    write_folders(tmp_path / "images")
    with (tmp_path / "table.csv").open("w", newline="") as f:
        w = csv.writer(f)
        w.writerow(["path", "label", "split", "group"])
        for k, name in enumerate(("forest", "river", "town")):
            for j in range(6):
                w.writerow(
                    [
                        f"images/{name}/{j}.png",
                        name,
                        "test" if j == 5 else "train",
                        f"hospital {(k + j) % 4}",
                    ]
                )
    federation = Csv(file=str(tmp_path / "table.csv"), partition="natural").federation(4, 0)
    assert len(federation.test) == 3 and sum(len(h) for h in federation.holdings) == 15
    for holding in federation.holdings:
        shade = holding.columns["x"][:, 0, 0, 0].long()  # 80 k + 10 j
        assert len(set((shade // 80 + shade % 80 // 10).remainder(4).tolist())) == 1
    with pytest.raises(
        DataError, match="has no column 'diagnosis'; it has path, label, split, group"
    ):
        Csv(file=str(tmp_path / "table.csv"), label="diagnosis").federation(2, 0)


@pytest.mark.parametrize("row", ["a/town/0.png", "a/town/0.png,", "a/town/0.png, ,train"])
def test_a_row_without_a_label_is_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "table.csv").write_text(f"path,label,split\na/town/0.png,town\n{row}\n")
    with pytest.raises(DataError, match=r"table.csv, line 3: there is no label"):
        Csv(file=str(tmp_path / "table.csv")).federation(1, 0)


def test_npz_as_medmnist(tmp_path: Path) -> None:
    x, y = (
        np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8),
        np.arange(12)[:, None] % 3,
    )
    parts = {"train": slice(0, 6), "val": slice(6, 8), "test": slice(8, 12)}
    np.savez(
        tmp_path / "m.npz",
        **{f"{p}_images": x[s] for p, s in parts.items()},
        **{f"{p}_labels": y[s] for p, s in parts.items()},
    )
    federation = Npz(file=str(tmp_path / "m.npz"), channels=3).federation(2, 0)
    assert sum(len(h) for h in federation.holdings) == 8 and federation.test.columns["x"].shape == (
        4,
        3,
        28,
        28,
    )
    assert torch.equal(federation.test.columns["x"][0, 1], torch.from_numpy(x[8])) and list(
        federation.facts.classes
    ) == ["0", "1", "2"]
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"bad.npz cannot be read as .npz"):
        Npz(file=str(tmp_path / "bad.npz")).federation(2, 0)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:3000])
    (tmp_path / "text.npz").write_text("path,label\n")
    np.savez(tmp_path / "objects.npz", train_images=np.array([{}]), train_labels=y)
    np.save(tmp_path / "one.npy", x)
    for name in ("cut.npz", "text.npz", "objects.npz", "one.npy"):
        with pytest.raises(DataError, match=f"{name} cannot be read as .npz: (?!.*allow_pickle)"):
            Npz(file=str(tmp_path / name)).federation(2, 0)
    np.savez(tmp_path / "none.npz", a=x)
    with pytest.raises(DataError, match="has no array 'train_images'; it has a"):
        Npz(file=str(tmp_path / "none.npz")).federation(2, 0)


def test_huggingface_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pictures, the k-th all k: five of each class come back with the pixels they had, saved by
    `datasets` and as folders it reads.
    """
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for k in range(10):
        folder = tmp_path / "folders" / "train" / ("no", "yes")[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(folder / f"{k}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its fingerprints grumble about a class of pyarrow's
        datasets.load_dataset(str(tmp_path / "folders")).save_to_disk(str(tmp_path / "saved"))
        for root in ("saved", "folders"):
            federation = HuggingFace(root=str(tmp_path / root)).federation(2, 0)
            assert list(federation.facts.classes) == ["no", "yes"] and len(federation.test) == 2
            x = torch.cat(
                [*(h.columns["x"] for h in federation.holdings), federation.test.columns["x"]]
            )
            y = torch.cat(
                [*(h.columns["y"] for h in federation.holdings), federation.test.columns["y"]]
            )
            values = (
                x[:, 0, 0, 0] if x.dtype == torch.uint8 else (x[:, 0, 0, 0] * 255).round().long()
            )
            assert sorted(values.tolist()) == list(range(10)) and y.tolist() == [
                int(v) % 2 for v in values
            ]


def test_without_its_package_a_huggingface_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package datasets"):
        HuggingFace(root=str(tmp_path)).federation(2, 0)


def test_holdout_limit_and_label_counts() -> None:
    federation = Synthetic(
        images=200, test_images=50, limit=100, test_limit=20, holdout=0.25
    ).federation(4, 0)
    assert sum(map(sum, list(federation.facts.labels))) == 100 and len(federation.test) == 20
    assert np.array(list(federation.facts.labels)).sum(0).tolist() == [10] * 10
    sizes = [
        (len(h), len(federation.held_out_of(i) or ())) for i, h in enumerate(federation.holdings)
    ]
    assert all(a + b == 25 and b in (6, 7) for a, b in sizes)


def test_stratified_takes_its_share_of_every_class() -> None:
    """0.25 of 8, 4 and 2: 2, 1 and one half, which what was left over rounds to one or none; in all
    3 or 4.
    """
    stay, cut = stratified(
        torch.tensor([0] * 8 + [1] * 4 + [2] * 2), 0.25, np.random.default_rng(0)
    )
    assert (
        sorted(stay + cut) == list(range(14))
        and sum(i < 8 for i in cut) == 2
        and sum(8 <= i < 12 for i in cut) == 1
    )


def test_augmentation_moves_and_mirrors_but_invents_nothing() -> None:
    """Every output is a window of the reflected image, mirrored or not: checked against all 81
    windows of both.
    """
    x = torch.rand(6, 2, 12, 12, generator=torch.Generator().manual_seed(1))
    out = CropFlip()(x, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect")
    for k in range(6):
        windows = [padded[k, :, i : i + 12, j : j + 12] for i in range(9) for j in range(9)]
        assert any(torch.equal(out[k], w) or torch.equal(out[k], w.flip(-1)) for w in windows)
    assert not torch.equal(out, x)


def test_feature_skew() -> None:
    """The last client's images are noisier than the first's, whose are untouched; blur and coarser
    pixels lower the contrast.
    """
    x = torch.from_numpy(pixels(20))
    rng = torch.Generator().manual_seed(0)
    gap = (
        skew_images(torch.full((4, 3, 32, 32), 128, dtype=torch.uint8), "noise", 20.0, rng).float()
        - 128
    ).std()
    assert float(gap) == pytest.approx(20, rel=0.05)
    assert torch.equal(skew_images(x, "noise", 0.0, rng), x)
    for kind in ("blur", "resolution"):
        assert skew_images(x, kind, 2.0, rng).float().std() < 0.5 * x.float().std()
    federation = Synthetic(images=100, test_images=20, skew="noise", strongest=60.0).federation(
        3, 0
    )
    plain = Synthetic(images=100, test_images=20).federation(3, 0)
    changed = [
        float((a.columns["x"].float() - b.columns["x"].float()).abs().mean())
        for a, b in zip(federation.holdings, plain.holdings)
    ]
    assert changed[0] == 0 < changed[1] < changed[2]
    assert (
        list(federation.facts.look) == ["noise 0", "noise 30", "noise 60"] and not plain.facts.look
    )
    with pytest.raises(DataError, match="skew=blur needs a positive strongest"):
        Synthetic(skew="blur").federation(3, 0)


def test_synthetic_is_reproducible_and_its_classes_differ() -> None:
    a, b, c = (Synthetic(images=60, test_images=20).federation(2, s) for s in (0, 0, 1))
    assert torch.equal(a.test.columns["x"], b.test.columns["x"]) and not torch.equal(
        a.test.columns["x"], c.test.columns["x"]
    )
    assert len(set(a.facts.classes)) == 10
    with pytest.raises(ValueError, match=r"data\.classes must be .* at most 20, not 21"):
        from_table("data", "Synthetic", classes=21)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"holdout": 1.0}, "data.holdout must be a number of at least 0 and below 1, not 1.0"),
        ({"test_share": 0}, "data.test_share must be a number above 0 and below 1, not 0"),
        ({"noise": -0.1}, "data.noise must be a number of at least 0, not -0.1"),
        ({"limit": 0}, "data.limit must be a whole number of at least 1 or none, not 0"),
        ({"alpha": 0}, "data.alpha must be a number above 0, not 0"),
    ],
)
def test_limits(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        from_table("data", "Synthetic", **keys)


def test_the_data_pack(data_pack: Path) -> None:
    federation = Cifar10(
        root=str(data_pack / "cifar10"),
        partition="dirichlet",
        alpha=0.1,
        limit=1000,
        test_limit=200,
    ).federation(5, 0)
    assert (
        np.array(list(federation.facts.labels)).sum(0).tolist() == [100] * 10
        and list(federation.facts.skipped) == []
    )
    assert list(federation.facts.classes) == [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]


@pytest.mark.slow
def test_synthetic_is_hard_enough_for_methods_to_differ() -> None:
    """Measured once, seed 0: FedAvg over ten IID clients 0.51 after 15 rounds, over ten clients at
    Dirichlet 0.1 still 0.11. One site with all data, at another learning rate, had 0.60 after 5
    epochs but 0.49 after 10: it is no upper bound here and is not asserted."""
    from fedlens import run
    from fedlens.algorithms import FedAvg
    from fedlens.engines.simulator import Simulator
    from fedlens.tasks import Classification

    def accuracy(**split: Any) -> float:
        federation = Synthetic(images=2000, test_images=400, **split).federation(10, 0)
        algorithm = FedAvg(
            Classification(model="niid"), lr=0.05, momentum=0.9, batch=20, device="cpu"
        )
        found: dict[str, float] = {}
        with Simulator(algorithm, federation, workers=0) as engine:
            run(
                algorithm,
                engine,
                15,
                test=federation.test,
                evaluate_every=15,
                after_round=lambda p, r: found.update(r.metrics),
            )
        return found["accuracy"]

    even, skewed = accuracy(), accuracy(partition="dirichlet", alpha=0.1)
    assert even > 0.35 and skewed < even - 0.15
