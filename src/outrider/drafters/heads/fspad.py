"""FSPAD: EAGLE's drafter with a layer that selects parts of the feature by the token, and has separate outputs for logits and
features.

Drafting is EAGLE's. Only the state differs: it is the layer's two outputs side by side. One gives the logits, and the other is
the next step's input. (Gui et al. 2024, arXiv 2408.15562; the module is ``models/heads/fspad.py``, the drafter
``heads/eagle.py``.)

    [s ; r](node) = layer(pick(e(token of node), r(parent))),      q(. | node) = softmax(W_target s(node))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.fspad import KIND


def build(parts: Parts) -> Drafter:
    return Eagle(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="EAGLE whose token picks from the feature, with separate outputs for logits and features (trained)",
    paper="Gui et al. 2024, FSPAD (arXiv 2408.15562)",
    drafter=Eagle,
    build=build,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
