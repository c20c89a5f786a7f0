"""Best-first trees: the draft's confidence decides where the tree is deep and where it is wide.

Level by level the most promising nodes are expanded. Every candidate is stored with the probability that the text passes
through it. The best ``max_nodes`` candidates form the proposed tree. The sum of their probabilities is the expected number of
accepted guesses, so this is the best tree of its size among the candidates. (Li et al. 2024, EAGLE-2, arXiv 2406.16858, with
the draft's probability as chance; Wang et al. 2024, OPT-Tree, arXiv 2406.17276.)

    chance(child) = chance(parent) * P(target says child | parent, noise)
    coupled:   P = softmax((l + T g) / tau)      l: the draft's logits, g: the target's noise there (trees/candidates.py)
    perturb off:  P = q

With the noise known, a branch is often nearly certain even if q is flat, because the noise favours one token. So sampled text
gets trees as deep and narrow as greedy text. Candidates are chosen and pruned, never sampled: lossless under ``coupled`` (same
seed, same text) and ``delta``. A child never has a larger chance than its parent, and equal ones are ordered by age, so what is
kept is always a tree.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast, final

from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws
from outrider.core.guessing_target import GuessingTarget, TreeSearch
from outrider.core.interfaces import Context, Drafter, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.model.catch_up import missing_from
from outrider.drafters.model.draft_growth import DraftGrowth
from outrider.drafters.model.tree_drafter import TreeDrafter, TreeState
from outrider.drafters.trees.best_first import grow_pool, useful_width
from outrider.drafters.trees.children import LikelyChildren
from outrider.drafters.trees.options import BestFirstOptions


@final
class BestFirst(TreeDrafter):
    """Trees of the likeliest paths."""

    offers: ClassVar = (Draws.DETERMINISTIC,)

    def __init__(self, model: Target, options: BestFirstOptions | None = None, *, vocab_size: int) -> None:
        super().__init__(model, vocab_size=vocab_size, draws=Draws.DETERMINISTIC)
        self.options = options or BestFirstOptions()

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """Available if candidates are ranked with the target's noise."""
        del target
        if not self.model.traits.can_be_captured or not self.options.perturb:
            return None
        from outrider.device.drafters.model.best_first import DeviceBestFirst
        from outrider.device.drafters.trees.best_first import searches_of  # needs triton

        options = self.options
        searches = searches_of(shape, width=options.width, num_children=options.num_children, tau=options.tau)
        return DeviceBestFirst(cast(Any, self.model), vocab_size=self.vocab_size, searches=searches) if searches else None

    def _guessed(self, state: TreeState, context: Context, plan: Plan) -> tuple[TokenTree, Tensor] | None:
        """The tree in one call. Needs sampling without functions of the path, and candidates ranked with the noise."""
        model, tempering, options = self.model, context.sampler.tempering, self.options
        if tempering is None or not isinstance(model, GuessingTarget) or model.vocab_size > self.vocab_size:
            return None
        if not (options.perturb or context.sampler.all_greedy):
            return None
        search = TreeSearch(useful_width(options.width, plan), options.num_children, options.tau)
        rows = missing_from(model, state.cache, context)
        return model.guess_tree(rows, state.cache, search=search, plan=plan, tempering=tempering, noise=context.noise)

    def _grow(self, growth: DraftGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        width, count = useful_width(self.options.width, plan), self.options.num_children
        source = LikelyChildren(growth, self.options)
        pool = grow_pool(source, width=width, num_children=count, max_depth=max(plan.max_depth))
        tree, origin = pool.best_tree(plan)
        return Draft(tree, Draws.DETERMINISTIC), pool.numbers.gather(1, origin)


def build(parts: Parts) -> Drafter:
    return BestFirst(parts.draft_model, parts.options, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="a draft model grows its most promising branches",
    paper="Li et al. 2024, EAGLE-2's trees (arXiv 2406.16858)",
    drafter=BestFirst,
    build=build,
    options=BestFirstOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
