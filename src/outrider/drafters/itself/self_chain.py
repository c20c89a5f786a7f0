"""The target drafts for itself: a chain whose guesses come from part of its own layers.

The part runs on the target's cache: it reads the committed keys and values, writes those of the guesses after them, and uses
the target's own norm and head. There is no second cache, nothing is copied, and the drafter never has to catch up. If the part
is the first E whole layers, their results are exactly the target's. The verifying pass then continues after them, so the
drafted layers are not run twice.

    q = law(head(norm(route(x)))),       verification: layers E .. L - 1 for the guesses, all layers for the last one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Resume
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Cache, Context, Plan, StopRule, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.route import Route
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.drafters.trees.candidates import coupled_scores
from outrider.drafters.trees.chain import grow_chain


def layered(target: Target, method: str) -> LayeredTarget:
    """The target as a ``LayeredTarget``; refused if its layers cannot be run apart."""
    if not isinstance(target, LayeredTarget):
        raise CompositionError(
            f"method {method!r} runs the target's layers apart, and {type(target).__name__} runs them only together"
            f"{target.traits.why_together}; use a model family of the lean decoder (Llama, Mistral, Qwen, Phi-3, Gemma), "
            "or method 'prompt-lookup'"
        )
    return target


def cache_of(context: Context) -> Cache:
    """The target's cache, to which the drafter writes."""
    if context.cache is None:
        raise CompositionError(
            "this drafter runs part of the target and was not given the target's cache; use a draft model "
            "here, or a drafter that copies text"
        )
    return context.cache


LogitsOf = Callable[[Tensor, TokenTree], Tensor]
"""[B, 1, V] logits of the newest node's states [B, 1, H], given the chain so far."""


def draft_along(
    target: LayeredTarget,
    context: Context,
    plan: Plan,
    *,
    route: Route,
    draws: Draws,
    stop: StopRule | None = None,
    logits_of: LogitsOf | None = None,
) -> Draft:
    """A chain per row from the sublayers of ``route``, with the states from which the target can resume. Logits come from
    the target's own norm and head, or from ``logits_of``."""
    cache, states = cache_of(context), list[Tensor]()

    def logits_after(chain: Tensor, depths: Sequence[int]) -> Tensor:
        del depths
        tree = TokenTree.chain(chain)
        states.append(target.exit(tree, cache, route=route, start=len(states)))
        return target.logits(states[-1]) if logits_of is None else logits_of(states[-1], tree)

    depths = [min(depth, nodes) for depth, nodes in zip(plan.max_depth, plan.max_nodes, strict=True)]
    draft = grow_chain(context, depths, logits_after, draws=draws, stops=[plan.stop, stop])
    if not states or not route.is_first:
        return draft
    return replace(draft, resume=Resume(route.depth, torch.cat(states, 1)))


@final
class UnsureStop(StopRule):
    """Ends a row after a guess of which the drafter is less sure than a threshold. The guess is kept.

    Confidence is the probability that the target agrees if the drafter's logits l were its own up to Gumbel errors of scale 1
    (see trees/candidates.py). It is conditioned on the noise g of a coupled guess. Without noise it is the guess's probability.

        chance = softmax(l + T g)[guess]"""

    def __init__(self, context: Context, thresholds: Sequence[float], *, draws: Draws) -> None:
        self.thresholds = list(thresholds)
        self._context, self._coupled = context, draws is Draws.DETERMINISTIC

    def before(self, depth: int, law: Law) -> None:
        del depth, law

    def after(self, depth: int, law: Law, guesses: Tensor) -> list[bool]:
        scores = coupled_scores(law, self._context, depth=depth) if self._coupled else law.adjusted
        chances = scores[:, -1].log_softmax(-1).gather(-1, guesses[:, None])[:, 0].exp().tolist()
        return [chance >= threshold for chance, threshold in zip(chances, self.thresholds, strict=True)]
