"""Figures and tables for papers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import write_run

from fedlens.report import figures
from fedlens.report.reading import read_run


def run_with(folder: Path, seed: int, layer: str, **metrics: float) -> Path:
    run = write_run(folder, rounds=3, clients=4, cohort=4, seed=seed, layer=layer, pictures=False)
    (run / "summary.json").write_text(json.dumps({"metrics": metrics, "rounds": 3}))
    return run


def test_table_over_seeds_by_hand(tmp_path: Path) -> None:
    """FedProx: accuracy 0.5, 0.6, 0.7 has mean 0.6 and sample deviation 0.1; loss 1, 2, 3 mean 2,
    deviation 1. LossAware alone: 0.55 and 1.5. So accuracy is best for FedProx and loss for
    LossAware."""
    runs = [
        run_with(tmp_path / f"p{k}", k, "FedProx", accuracy=0.5 + k / 10, loss=1.0 + k)
        for k in range(3)
    ]
    runs.append(run_with(tmp_path / "l", 0, "LossAware", accuracy=0.55, loss=1.5))
    read_runs = [read_run(run) for run in runs]
    rows = figures.result_rows(read_runs, figures.run_labels(read_runs))
    assert rows == [
        ["method", "runs", "accuracy", "loss"],
        ["FedAvg + FedProx", "3", "**0.6000 ± 0.1000**", "2.0000 ± 1.0000"],
        ["l", "1", "0.5500", "**1.5000**"],
    ]
    assert (
        figures.markdown_table(rows).splitlines()[2]
        == "| FedAvg + FedProx | 3 | **0.6000 ± 0.1000** | 2.0000 ± 1.0000 |"
    )
    assert (
        "FedAvg + FedProx & 3 & \\textbf{0.6000 $\\pm$ 0.1000} & 2.0000 $\\pm$ 1.0000 \\\\"
        in figures.latex_table(rows)
    )


def test_seeds_are_averaged_where_all_have_a_value() -> None:
    """Rounds 1 and 3 are common: means 2 and 6, deviations sqrt(2) and sqrt(8)."""
    x, y, spread = figures._merged([([1, 2, 3], [1.0, 9.0, 4.0]), ([1, 2, 3], [3.0, None, 8.0])])
    assert x == [1, 3] and y == [2.0, 6.0]
    assert spread == pytest.approx([2**0.5, 8**0.5])


def test_files_of_the_kinds_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=1, clients=5, cohort=4)
    line = json.loads((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text(json.dumps(line | {"metrics": {"accuracy": 0.5}}) + "\n")
    written = figures.write_figures(run, ["pdf", "PNG"])
    names = {p.name for p in written}
    assert {
        "training_loss.pdf",
        "accuracy.png",
        "weights.pdf",
        "holdings.png",
        "picture-00.pdf",
        "results.md",
        "results.tex",
    } <= names
    for path in written:
        head = path.read_bytes()[:5]
        assert (
            head.startswith({".pdf": b"%PDF-", ".png": b"\x89PNG"}.get(path.suffix, b"")) and head
        )


def test_refused_in_one_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=1, pictures=False)
    with pytest.raises(ValueError, match="no figure kind 'gif'"):
        figures.write_figures(run, ["gif"])
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no rounds to draw"):
        figures.write_figures(run, ["pdf"])


def test_which_metrics_are_better_when_higher() -> None:
    better = {
        n: figures.higher_is_better(n)
        for n in ("accuracy", "psnr", "client_loss_worst", "lpips", "FID", "glossiness", "test_mse")
    }
    assert better == {
        "accuracy": True,
        "psnr": True,
        "client_loss_worst": False,
        "lpips": False,
        "FID": False,
        "glossiness": True,
        "test_mse": False,
    }
