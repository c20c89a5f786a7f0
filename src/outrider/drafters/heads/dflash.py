"""Trees from DFlash's blocks: the newest token and the open positions after it pass the layers once, and every position gives
the law of its own token. (Chen et al. 2026, arXiv 2602.06036. The trees are ours.)

    q(. | node at depth d) = softmax(W_target norm(b_{d+1}))          b: models/heads/dflash.py

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.block_drafter import BlockDrafter
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.dflash import KIND, DflashHead
from outrider.models.heads.levels import SharedLevels


@final
class Dflash(BlockDrafter):
    """Trees from blocks."""

    def __init__(self, head: DflashHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _levels(self, places: Tensor, roots: Tensor) -> SharedLevels:
        del roots
        return SharedLevels(self.head, lambda depth: places[:, depth + 1 : depth + 2])


def build(parts: Parts) -> Drafter:
    return Dflash(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="layers over a block of open places, with the target's features as keys and values (trained)",
    paper="Chen et al. 2026, DFlash (arXiv 2602.06036)",
    drafter=Dflash,
    build=build,
    defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
