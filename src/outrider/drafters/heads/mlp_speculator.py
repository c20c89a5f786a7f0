"""MLP speculator: a small recurrent state reads the guesses one by one, with a stage of its own for each.

A stage is one small product and a norm, so a node costs little and still depends on the guesses above it. The tree holds the
likeliest nodes. (Wertheimer et al. 2024, arXiv 2404.19124.)

    state(node at depth d) = gelu(norm_d(P_d state(parent) + c E_d[token of node])),      q(. | node) = softmax(W_d state(node))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from typing import final

from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.recurrent import Recurrent
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.mlp_speculator import KIND


@final
class MlpSpeculation(Recurrent):
    """Trees of the likeliest nodes."""


def build(parts: Parts) -> Drafter:
    return MlpSpeculation(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a small state that takes in the guesses one by one, a stage per guess (trained)",
    paper="Wertheimer et al. 2024 (arXiv 2404.19124), IBM's Foundation Model Stack",
    drafter=MlpSpeculation,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
