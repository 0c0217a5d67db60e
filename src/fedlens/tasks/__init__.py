"""What is learned, one task a file; loaded on first use."""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {
    "ActionRecognition": "action",
    "Classification": "classification",
    "ClipAgreement": "agreement",
    "CtP": "ctp",
    "Custom": "custom",
    "Generation": "generation",
    "Pose": "pose",
    "Segmentation": "segmentation",
    "Speed": "speed",
    "SuperResolution": "super_resolution",
    "VCOP": "vcop",
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
