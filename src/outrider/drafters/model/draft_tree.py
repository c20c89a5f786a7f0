"""Trees from a draft model, of a shape that is fixed in advance.

A chain ends at its first wrong guess. A tree also holds the second and third best tokens, so if the first is wrong, a sibling
is often right. All children of a level come from one pass of the draft model. How the children of a node are drawn follows from
the acceptance rule. They are *coupled* (top-k of log q + the target's noise) for the coupled rule, without replacement for
recursive rejection and traversal, and independent for k-SEQ. Fixed branching with independent children is SpecInfer's expansion
(Miao et al. 2023, arXiv 2305.09781), without replacement RSD-C (Jeon et al. 2024, arXiv 2402.14160).

    children(u) = first branching[depth(u)] of   log q(. | u) + g_position          coupled: deterministic, given the seed
                                                 log q(. | u) + Gumbel noise        without replacement, in draw order

Lossless under every rule that is exact for the draws; coupled: same seed, same text.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast, final

from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Drafter, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.model.draft_growth import DraftGrowth
from outrider.drafters.model.tree_drafter import TreeDrafter
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.options import DraftTreeOptions
from outrider.drafters.trees.static import grow_shape


@final
class DraftTree(TreeDrafter):
    """Trees of one shape."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.WITHOUT_REPLACEMENT, Draws.IID)

    def __init__(
        self, model: Target, options: DraftTreeOptions | None = None, *, vocab_size: int, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        super().__init__(model, vocab_size=vocab_size, draws=draws)
        options = options or DraftTreeOptions()
        self.tree = options.tree
        self.drawing = Drawing(draws, options.perturb)

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """Available if children are ranked with the target's noise."""
        del target
        if not self.model.traits.can_be_captured or self.draws is not Draws.DETERMINISTIC or not self.drawing.perturb:
            return None
        from outrider.device.drafters.model.draft_tree import DeviceTree  # needs triton

        within = shape.within(self.tree.max_depth).guesses
        trees = {depth: self.tree.within(count, depth) for depth, count in within.items()}
        ranked = {depth: (tree.parents, tree.ranks) for depth, tree in trees.items()}
        return DeviceTree(cast(Any, self.model), ranked, vocab_size=self.vocab_size)

    def _grow(self, growth: DraftGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        return grow_shape(growth, plan, tree=self.tree, drawing=self.drawing)


def build(parts: Parts) -> Drafter:
    return DraftTree(parts.draft_model, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a draft model guesses a tree of fixed branching",
    paper="Miao et al. 2023, SpecInfer (arXiv 2305.09781); Jeon et al. 2024, RSD-C (arXiv 2402.14160)",
    drafter=DraftTree,
    build=build,
    options=DraftTreeOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
