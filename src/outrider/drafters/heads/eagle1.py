"""EAGLE-1: one decoder layer predicts the target's next feature from the last feature and the token after it.

The layer reads the state before the target's output matrix, guesses the state one token later, and the target's own output
matrix turns it into a law. The tree is EAGLE-2's: best-first by the draft's confidence. The drafter is ``heads/eagle.py``.
(Li et al. 2024, EAGLE, arXiv 2401.15077; Li et al. 2024, EAGLE-2, arXiv 2406.16858.)

    state(node) = layer(fc[e(token of node) ; state(parent)]),      q(. | node) = softmax(W_target state(node))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.eagle1 import KIND


def build(parts: Parts) -> Drafter:
    return Eagle(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a layer that predicts the target's features, token by token (trained)",
    paper="Li et al. 2024, EAGLE (arXiv 2401.15077), EAGLE-2's trees (arXiv 2406.16858)",
    drafter=Eagle,
    build=build,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
