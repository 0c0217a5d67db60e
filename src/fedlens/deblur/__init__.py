"""FedDeblur and all that belongs to it: one sharp scene from private, blurred views. Loaded on
first use.
"""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {
    "CenDeblur": "baselines",
    "Deblurring": "task",
    "FedAvgDeblur": "baselines",
    "FedDeblur": "feddeblur",
    "FedGDDeblur": "baselines",
    "LocDeblur": "baselines",
    "NoisyViews": "noisy_views",
    "Scene": "scenes",
}
# A room with parts of several kinds says which is which, so that looking for one does not load the
# others.
PART_KINDS = {
    "task": ("Deblurring",),
    "data": ("Scene",),
    "algorithm": (
        "CenDeblur",
        "FedAvgDeblur",
        "FedDeblur",
        "FedGDDeblur",
        "LocDeblur",
        "NoisyViews",
    ),
}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
