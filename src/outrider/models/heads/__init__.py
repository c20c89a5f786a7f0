"""Trained draft heads: small modules that read the target's hidden states (Medusa, Hydra, EAGLE and others: ``KINDS``)."""

from __future__ import annotations

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.folder import load_head, new_head, save_head
from outrider.models.heads.head import Head, PackedTexts
from outrider.models.heads.kinds import HEAD_KINDS, KINDS

__all__ = ["HEAD_KINDS", "KINDS", "Head", "HeadConfig", "PackedTexts", "load_head", "new_head", "save_head"]
