"""Which way a metric is good, in one list; the page has a copy because it is another language."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fedlens
from fedlens.core.direction import SMALLER_IS_BETTER, smaller_is_better


def test_the_page_has_the_same_list() -> None:
    page = Path(fedlens.__file__).parent / "report" / "page" / "draw.js"
    found = re.search(r"const WORSE = (\[.*?\]);", page.read_text())
    assert found and tuple(json.loads(found.group(1))) == SMALLER_IS_BETTER


def test_by_the_words_of_a_name() -> None:
    assert all(map(smaller_is_better, ("loss", "denoising_loss", "lpips", "client_error_worst")))
    assert not any(map(smaller_is_better, ("accuracy", "psnr", "recall_at_1", "glossy", "pck_8x8")))
