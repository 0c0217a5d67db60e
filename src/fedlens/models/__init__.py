"""Networks, by name; loaded on first use."""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {
    "BidirectionalVSR": "vsr",
    "Classifier": "classification",
    "Denoiser": "diffusion",
    "IART": "iart",
    "LightVSR": "vsr",
    "RLFN": "rlfn",
    "RVRT": "rvrt",
    "RecurrentRLFN": "recurrent_rlfn",
    "SimpleBaseline": "vitpose",
    "SpyNet": "spynet",
    "VRT": "vrt",
    "VideoBackbone": "video",
    "ViTPose": "vitpose",
    "iart_small": "iart",
    "r3d10": "video",
    "rlfn_ntire": "rlfn",
    "rlfn_s": "rlfn",
    "rvrt_small": "rvrt",
    "vrt_small": "vrt",
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
