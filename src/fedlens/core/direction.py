"""Which way a metric is good. `report/page/draw.js` has the same list; a test holds it to that."""

from __future__ import annotations

SMALLER_IS_BETTER = (
    "loss", "error", "lpips", "niqe", "fid", "kid", "mse", "mae", "rmse", "nll", "distance",
    "seconds", "bytes", "memory", "spread", "epe",
)  # fmt: skip


def smaller_is_better(metric: str) -> bool:
    """By the words of its name: "denoising_loss", "lpips", "client_error_worst"."""
    return any(word in SMALLER_IS_BETTER for word in metric.lower().replace("-", "_").split("_"))
