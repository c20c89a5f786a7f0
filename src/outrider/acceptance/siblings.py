"""The target's probabilities of a tree's guesses, and what is left of its law after the children of a node were rejected.

Siblings are tried in the order they were drawn, so a guess meets only what its *elders*, the earlier children of its parent,
left over. A guess that repeats an elder's token has probability 0: the elder has used up all that p gives it.

    given(x) = p(x | parent of x);    left(x) = share - sum of given over the elders of x
"""

from __future__ import annotations

from torch import Tensor

from outrider.acceptance.paths import children_of
from outrider.core.tree import TokenTree


def given_to(tree: TokenTree, probs: Tensor) -> Tensor:
    """[B, N - 1] the probability that ``probs`` [B, N, V] gives each guess after its parent."""
    return probs.flatten(1).gather(1, tree.parents[:, 1:] * probs.shape[2] + tree.tokens[:, 1:])


def first_accepted(
    tree: TokenTree, given: Tensor, coins: Tensor, *, outright: Tensor | None = None, share: float = 1
) -> Tensor:
    """[B, N - 1] true for the first accepted guess of each parent. A guess is accepted by its random number, or
    ``outright``."""
    tokens, parents = tree.tokens[:, 1:], tree.parents[:, 1:]
    elder = (parents[:, :, None] == parents[:, None]).tril(-1)  # [b, i, j]: j is an earlier sibling of i
    repeated = (elder & (tokens[:, :, None] == tokens[:, None])).any(-1)
    given = given.masked_fill(repeated, 0)  # its elder twin has taken all that p gives the token
    left = (share - (elder * given[:, None]).sum(-1)).clamp(min=0)  # below 0 by rounding, it would let an impossible guess in
    accepted = coins * left < given
    if outright is not None:
        accepted = accepted | outright
    return accepted & ~(elder & accepted[:, None]).any(-1)


def without_children(tree: TokenTree, nodes: Tensor, p: Tensor) -> Tensor:
    """[B, V] the law after ``nodes`` without the guesses made there."""
    # A minimum per token: 0 for a rejected guess, infinity (no change) for the tokens of other nodes.
    bound = p.new_zeros(tree.tokens.shape).masked_fill(~children_of(tree, nodes), float("inf"))
    return p.scatter_reduce(1, tree.tokens, bound, "amin")
