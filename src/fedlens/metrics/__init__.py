"""How good a result is: plain functions; loaded on first use."""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {
    "coco_ap": "pose",
    "frame_psnr": "frames",
    "frame_ssim": "frames",
    "lpips": "perceptual",
    "oks": "pose",
    "pck": "pose",
    "pckh": "pose",
    "psnr": "image",
    "recall": "retrieval",
    "ssim": "image",
    "temporal_gap": "frames",
    "vmaf": "video",
    "vote": "retrieval",
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
