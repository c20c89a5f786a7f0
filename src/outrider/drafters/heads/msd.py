"""MSD: EAGLE's drafter with a layer that reads text and images in different ways.

Images enter the layer as the target's own embeddings, without the matrix that mixes features and tokens. (Lin et al. 2025,
arXiv 2505.14260; the module is ``models/heads/msd.py``, the drafter ``heads/visual.py``.)

    text column   fc [e(token) ; feature]        visual column   the image's embedding        q = softmax(W_target state)

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.drafters.heads.visual import VisualEagle
from outrider.models.heads.msd import KIND


def build(parts: Parts) -> Drafter:
    return VisualEagle(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="EAGLE for images: visual columns bypass the mixing matrix, trained text first (trained)",
    paper="Lin et al. 2025, MSD (arXiv 2505.14260)",
    drafter=VisualEagle,
    build=build,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
