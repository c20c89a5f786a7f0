"""Models with recurrent layers as targets: Mamba-2, Bamba (Mamba-2 with attention) and Qwen3-Next (gated delta rule).

``families.py`` lists the families, ``scan.py`` is the tree scan, and ``cache/recurrent.py`` the cache.
"""

from __future__ import annotations

from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.families import recurrent_config

__all__ = ["RecurrentConfig", "RecurrentDecoder", "recurrent_config"]
