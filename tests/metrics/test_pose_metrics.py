"""By hand, and against COCO's own program."""

from __future__ import annotations

import numpy as np
import pytest

from fedlens.data.pose.datasets import torso
from fedlens.data.pose.skeletons import SKELETONS
from fedlens.metrics.pose import coco_ap, hits, oks, pck, pckh


def test_pck_by_hand() -> None:
    """Reference 10, threshold 0.2: 2 pixels are right, 2.1 are wrong. Two people, two joints, one
    of them invisible: 2 of 3.
    """
    truth = np.zeros((2, 2, 2))
    predicted = np.array([[[2.0, 0], [0, 2.1]], [[0, 0], [50, 0]]])
    visible = np.array([[1, 1], [1, 0]])
    assert pck(predicted, truth, visible, np.array([10.0, 10.0])) == pytest.approx(100 * 2 / 3)
    assert pck(predicted, truth, np.zeros((2, 2)), np.array([10.0, 10.0])) == 0


def test_pck_of_lsp_is_that_of_its_evaluation_program() -> None:
    """40 people and answers by formula, judged by eval_pck.m of bearpaw/eval_pose (commit f6c71b6)
    under Octave: PCK at 0.2 of ankles, knees, hips, wrists, elbows, shoulders, head, and their
    mean, to the digit that it prints. It joins left and right, and neck with head."""
    n, j = np.arange(40)[:, None], np.arange(14)[None]
    truth = np.stack([60 + 40 * np.sin(1.7 * n + 2.3 * j), 80 + 50 * np.cos(0.9 * n * j + j)], -1)
    off = np.stack([13 * np.sin(3.1 * n * n + j), 13 * np.cos(1.3 * n + 5 * j * j)], -1)
    reference = np.array([torso(joints) for joints in truth])
    right, _ = hits(truth + off, truth, np.ones((40, 14)), reference, 0.2)
    pairs = ((0, 5), (1, 4), (2, 3), (6, 11), (7, 10), (8, 9), (12, 13))
    found = [100 * right[:, pair].mean() for pair in pairs]
    printed = [55.0, 62.5, 47.5, 53.8, 55.0, 52.5, 51.2]
    assert found == pytest.approx(printed, abs=0.0501)
    mean = pck(truth + off, truth, np.ones((40, 14)), reference, 0.2)
    assert mean == pytest.approx(53.9, abs=0.0501)


def test_pckh_leaves_out_pelvis_and_thorax_and_weighs_by_count() -> None:
    """Two people, reference 10. Everything exact but: pelvis and thorax far off (not counted); the
    first person's right ankle off by 6 (wrong at 0.5), the second's invisible. 14 joints count for
    the first and 13 for the second: 26 of 27 at 0.5. At 0.1 the left wrists, off by 2, are wrong
    too: 24 of 27. Ankles: right 0 of 1, left 2 of 2: the group is the mean of 0 and 100."""
    truth, visible = np.zeros((2, 16, 2)), np.ones((2, 16))
    predicted = truth.copy()
    predicted[:, [6, 7]] = 1000
    predicted[0, 0] = [6, 0]
    visible[1, 0] = 0
    predicted[:, 15] = [0, 2]
    found = pckh(predicted, truth, visible, np.array([10.0, 10.0]))
    assert found["pckh"] == pytest.approx(100 * 26 / 27)
    assert found["pckh@0.1"] == pytest.approx(100 * 24 / 27)
    assert found["pckh_ankle"] == pytest.approx(50)
    assert found["pckh_head"] == 100


def people(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    truth = rng.uniform(0, 200, (12, 17, 2))
    visible = (rng.uniform(size=(12, 17)) < 0.8).astype(float)
    visible[:, 0] = 1
    return truth, visible, rng.uniform(8000, 30000, 12), np.arange(12) // 3


def test_similarity_is_cocos() -> None:
    pytest.importorskip("pycocotools")
    from pycocotools.cocoeval import Params

    assert np.allclose(Params("keypoints").kpt_oks_sigmas, SKELETONS["coco"].sigmas)
    truth, visible, area, _ = people(np.random.default_rng(0))
    assert np.allclose(oks(truth, truth, visible, area, SKELETONS["coco"].sigmas), 1)
    """One visible joint (nose, sigma 0.026) off by d with d^2 = 2 area (2 sigma)^2: similarity 1/e.
    """
    off = truth.copy()
    off[:, 0, 0] += np.sqrt(2 * area) * 2 * 0.026
    only = np.zeros_like(visible)
    only[:, 0] = 1
    assert np.allclose(oks(off, truth, only, area, SKELETONS["coco"].sigmas), np.exp(-1))


def test_ap_counts_who_is_similar_enough() -> None:
    """Each person alone in its image, three quarters of them exact, one quarter hopeless and with
    the lowest scores: precision 1 up to a recall of 3/4, so AP is 76 of 101 recall points at every
    threshold."""
    pytest.importorskip("pycocotools")
    truth, visible, area, _ = people(np.random.default_rng(1))
    predicted = truth.copy()
    predicted[9:] += 500
    scores = np.r_[np.full(9, 0.9), np.full(3, 0.1)]
    sigmas = SKELETONS["coco"].sigmas
    found = coco_ap(predicted, scores, truth, visible, area, np.arange(12), sigmas)
    assert found["ap"] == pytest.approx(100 * 76 / 101)
    assert found["ap50"] == pytest.approx(100 * 76 / 101)
    assert found["ar"] == pytest.approx(75)
    exact = coco_ap(truth, scores, truth, visible, area, np.arange(12), sigmas)
    assert exact["ap"] == pytest.approx(100)
