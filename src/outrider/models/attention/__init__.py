"""Attention of tree nodes over the cache: the only code that sees a tree mask."""

from __future__ import annotations

from outrider.models.attention.sdpa import Sight, SightMaker, attend, attend_softcapped, attend_with_sinks

__all__ = ["Sight", "SightMaker", "attend", "attend_softcapped", "attend_with_sinks"]
