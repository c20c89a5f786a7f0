"""ViSpec: EAGLE's drafter with a layer that sees an image as one column, and adds a global vector of the image to its states.

Learned queries compress the image when the prompt is read, so the draft's cache holds one entry for it. (Kang et al. 2025,
arXiv 2509.15235; the module is ``models/heads/vispec.py``, the drafter ``heads/visual.py``.)

    state(node) = layer(fc [e(token of node) ; W_g [state(parent) ; g]]),      q(. | node) = softmax(W_target state(node))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.drafters.heads.visual import VisualEagle
from outrider.models.heads.vispec import KIND


def build(parts: Parts) -> Drafter:
    return VisualEagle(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="EAGLE for images: one column for an image, and a global vector beside every feature (trained)",
    paper="Kang et al. 2025, ViSpec (arXiv 2509.15235)",
    drafter=VisualEagle,
    build=build,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
