"""SpecVLM: EAGLE's drafter with compressed visual columns. A gate chooses the way of compression by the question.

The ways are pruning, pooling, a convolution, learned queries, or none. The gate chooses when the prompt is read. (Huang et al.
2025, arXiv 2509.11815; the module is ``models/heads/specvlm.py``, the drafter ``heads/visual.py``.)

    state(node) = layer(fc [norm e(token of node) ; norm state(parent)]),      q(. | node) = softmax(W_target state(node))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.drafters.heads.visual import VisualEagle
from outrider.models.heads.specvlm import KIND


def build(parts: Parts) -> Drafter:
    return VisualEagle(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="EAGLE for images: a gate picks how an image is compressed, by the question (trained)",
    paper="Huang et al. 2025, SpecVLM (arXiv 2509.11815)",
    drafter=VisualEagle,
    build=build,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
