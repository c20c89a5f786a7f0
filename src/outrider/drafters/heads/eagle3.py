"""EAGLE-3: one decoder layer drafts on the states of three target layers, and was trained on its own drafts.

It does not predict the target's features. So it has its own norm and output matrix, often over a part of the vocabulary. The
tree is best-first. The drafter is ``heads/eagle.py``. (Li et al. 2025, EAGLE-3, arXiv 2503.01840.)

    state(root) = layer(e(root), fc[low ; middle ; high]),      state(node) = layer(e(token of node), state(parent))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.eagle3 import KIND


def build(parts: Parts) -> Drafter:
    return Eagle(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a layer on three layers of the target, trained on its own drafts (trained)",
    paper="Li et al. 2025, EAGLE-3 (arXiv 2503.01840)",
    drafter=Eagle,
    build=build,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
