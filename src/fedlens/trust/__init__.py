"""What leaves a client: written down, limited by its owner, provable, and added up under masks."""

from __future__ import annotations

from fedlens.core.lazy import lazily

_WHERE = {"SecureSum": "secure_sum"}
PART_KINDS = {"algorithm": ("SecureSum",)}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
