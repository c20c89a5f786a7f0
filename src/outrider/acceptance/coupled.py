"""The coupled rule: a guess is right when it is the token the target itself would have drawn.

The target's token at an output position is its Gumbel-max choice with that position's noise, so the text is fixed by
the seed and the model before anything is drafted; the walk follows the branch that holds this text and adds the
target's next choice. Nothing is assumed about the guesses: they may be sampled, copied, or made with the very same
noise, and the better they use it the more are right. At temperature 0 the choice is the argmax: the rule is then
greedy verification.

    y(s) = argmax_v log p(v | s) + g_position(v);    follow the child x of s that equals y(s);    end with y(s)

Same seed, same text, whatever was drafted. Gumbel coupling of draft and target: Daliri, Musco & Suresh 2024, arXiv
2408.07978. Lossless for every way of drawing: y ~ p at every position, and the guesses only decide how many positions
a round covers.
"""

from __future__ import annotations

from typing import ClassVar, final

from outrider.acceptance.paths import chain_verdict, deepest, first_run, path_of, tree_verdict
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@final
class Coupled(AcceptanceRule):
    """Follow the target's own choice."""

    exact_for: ClassVar = (Draws.DETERMINISTIC, Draws.IID, Draws.WITHOUT_REPLACEMENT, Draws.BEAM)
    shape: ClassVar = Shape.TREE
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        reached, depth = [0], 0
        while True:
            choices = {node: source.target_choice(row.p[node], depth) for node in reached}
            below = [child for node in reached for child in row.children(node) if row.tokens[child] == choices[node]]
            if not below:
                end = min(reached)
                return RowVerdict(path_of(row, end), choices[end], rejected=bool(row.children(end)))
            reached, depth = below, depth + 1

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        del noise  # the law's choices are made with it
        tree, choices = draft.tree, law.choices
        if tree.is_chain:
            num_accepted = first_run(tree, tree.tokens[:, 1:] == choices[:, :-1])
            return chain_verdict(tree, num_accepted, choices.gather(1, num_accepted[:, None])[:, 0])
        ends = deepest(tree, tree.tokens[:, 1:] == choices.gather(1, tree.parents[:, 1:]))
        return tree_verdict(tree, ends, choices.gather(1, ends[:, None])[:, 0])
