"""A chain that a model grows guess by guess: ask for logits after the newest guess, shape them into a law, draw, repeat.

The model may be a draft model or part of the target; here it is a function from the chain so far to logits. Guesses are
*coupled* (with the target's own noise of each output position, hence deterministic) or sampled independently, and then their
laws are kept. Rules that stop a row are asked before and after every guess; a guess that was drawn is kept (Lemma C of
docs/lossless.md). Rows that ended are carried along as padding until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Context, StopRule
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree

LogitsAfter = Callable[[Tensor, Sequence[int]], Tensor]
"""[B, 1, V] logits after the chain [B, N] (at first the root alone), given the planned length of each row."""


def grow_chain(
    context: Context, depths: Sequence[int], logits_after: LogitsAfter, *, draws: Draws, stops: Sequence[StopRule | None] = ()
) -> Draft:
    """A chain of at most ``depths[b]`` guesses for each row."""
    depths, rules = list(depths), [rule for rule in stops if rule is not None]
    chain = torch.tensor(context.roots, device=context.device)[:, None]
    laws: list[Law] = []
    while len(laws) < max(depths):
        logits = logits_after(chain, depths)
        law = context.sampler.law(logits, TokenTree.chain(chain), context.noise, start=len(laws))
        for rule in rules:
            depths = _ended(depths, len(laws), rule.before(len(laws), law))
        if max(depths) <= len(laws):
            break
        chain = torch.cat([chain, _guess(law, len(laws), draws)], 1)
        laws.append(law)
        for rule in rules:
            depths = _ended(depths, len(laws), rule.after(len(laws) - 1, law, chain[:, -1]))
    tree = TokenTree.chain(chain, [depth + 1 for depth in depths])
    return Draft(tree, draws, _laws_of(laws) if draws is Draws.IID and laws else None)


def _guess(law: Law, depth: int, draws: Draws) -> Tensor:
    if draws is Draws.DETERMINISTIC:
        return law.choices
    return law.draw(torch.full((law.adjusted.shape[0], 1), depth, device=law.adjusted.device))


def _laws_of(laws: Sequence[Law]) -> Tensor:
    """[B, N, V] the law at every node with a guess; the last node has none."""
    q = torch.cat([law.probs for law in laws], 1)
    return torch.cat([q, torch.zeros_like(q[:, :1])], 1)


def _ended(depths: Sequence[int], num_drawn: int, goes_on: Sequence[bool] | None) -> list[int]:
    """Planned depths, cut to the drawn guesses in the rows that end."""
    if goes_on is None:
        return list(depths)
    return [depth if more else min(depth, num_drawn) for depth, more in zip(depths, goes_on, strict=True)]
