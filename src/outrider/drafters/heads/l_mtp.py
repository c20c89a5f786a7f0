"""L-MTP: a few heads that predict every s-th token ahead. Evaluated at the last s positions of the text, together they guess
every token.

With stride s = 2, head i makes two guesses: from the state before the newest one the first of a pair, and from the newest one
the second. So there are twice as many guesses as heads, for a second small product. (Liu et al. 2025, arXiv 2505.17505.)

    q(. | node at depth d) = softmax(W_i res_i(h_u)),      i = d div s,   u = newest - (s - 1 - d mod s)

As with Medusa all nodes of a level share one law. Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.newest import NewestDrafter
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.l_mtp import KIND, LMtpHead
from outrider.models.heads.levels import SharedLevels


@final
class LMtp(NewestDrafter):
    """Trees from heads evaluated at the last few positions."""

    def __init__(self, head: LMtpHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head, self.num_kept = head, head.config.stride

    def _levels(self, features: Tensor, roots: Tensor) -> SharedLevels:
        del roots
        head = self.head

        def state_of(depth: int) -> Tensor:
            place = self.num_kept - 1 - head.back(depth)
            return head.state(depth, features[:, place : place + 1])

        return SharedLevels(head, state_of)


def build(parts: Parts) -> Drafter:
    return LMtp(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="heads that leap over tokens, asked at the last places together (trained)",
    paper="Liu et al. 2025, L-MTP (arXiv 2505.17505)",
    drafter=LMtp,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
