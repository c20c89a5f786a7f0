"""Helpers for drafting ahead: the path expected to be accepted, the context after it, and drafts merged from two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Context, Plan
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree


def first_path(tree: TokenTree, row: int) -> tuple[int, ...]:
    """Nodes from the root's first child to a leaf, always by the first child. Siblings stand in the order of their chances."""
    path, node = list[int](), 0
    for child, parent in enumerate(tree.parents[row, : tree.sizes[row]].tolist()):
        if child > 0 and parent == node:
            path.append(child)
            node = child
    return tuple(path)


def after(tree: TokenTree, row: int, tokens: Sequence[int], path: Sequence[int]) -> list[int]:
    """The text with the tokens of a path after it."""
    return [*tokens, *tree.tokens[row, list(path)].tolist()] if path else list(tokens)


def after_context(context: Context, texts: Sequence[Sequence[int]]) -> Context:
    """The context of a later round, in which the rows have these texts."""
    longer = [len(text) - len(tokens) for text, tokens in zip(texts, context.tokens, strict=True)]
    noise = context.noise
    noise = replace(noise, positions=noise.positions + torch.tensor(longer, device=noise.positions.device))
    return Context(texts, _sampler_after(context.sampler, texts), noise, context.device)


def at_the_end(context: Context, texts: Sequence[Sequence[int]], draws: Draws) -> Context:
    """The context in which a guess predicts the token that ends this round after ``texts``. The token is chosen as the target
    chooses, with the noise of its position. For sampled guesses it is drawn as their rules draw it, with the noise of the
    round."""
    later = after_context(context, texts)
    return later if draws is Draws.DETERMINISTIC else replace(later, noise=replace(context.noise, of_the_end=True))


def cut(draft: Draft, plan: Plan) -> Draft:
    """The part of every tree that is within the plan, from the root on."""
    tree = draft.tree
    inside = tree.valid & (tree.depths <= torch.tensor(plan.max_depth, device=tree.tokens.device)[:, None])
    sizes = tuple(map(min, inside.sum(1).tolist(), (nodes + 1 for nodes in plan.max_nodes)))
    return draft if sizes == tree.sizes else _resized(draft, sizes)


def merged(one: Draft, other: Draft, first: Sequence[bool]) -> Draft:
    """Row b of ``one`` where ``first[b]``, else of ``other``."""
    sizes = tuple(one.tree.sizes[b] if mine else other.tree.sizes[b] for b, mine in enumerate(first))
    one, other = _resized(one, sizes), _resized(other, sizes)
    mine = torch.tensor(first, device=one.tree.tokens.device)
    tokens = torch.where(mine[:, None], one.tree.tokens, other.tree.tokens)
    parents = torch.where(mine[:, None], one.tree.parents, other.tree.parents)
    tree = TokenTree(tokens, parents, sizes, one.tree.is_chain and other.tree.is_chain)
    return Draft(tree, one.draws, _laws(one.q, other.q, mine))


def _resized(draft: Draft, sizes: Sequence[int]) -> Draft:
    """The draft with rows of other sizes; rows that grow get padding, which the caller replaces."""
    tree, num_nodes = draft.tree, max(sizes)
    chain = torch.arange(-1, num_nodes - 1, device=tree.tokens.device).expand(len(sizes), -1)
    parents = chain if tree.is_chain else _columns(tree.parents, num_nodes)
    cut_tree = TokenTree(_columns(tree.tokens, num_nodes), parents, tuple(sizes), tree.is_chain)
    return Draft(cut_tree, draft.draws, None if draft.q is None else _columns(draft.q, num_nodes))


def _columns(values: Tensor, count: int) -> Tensor:
    """The first ``count`` columns, with zeros where there are fewer."""
    missing = count - values.shape[1]
    return (
        torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], 1) if missing > 0 else values[:, :count]
    )


def _laws(one: Tensor | None, other: Tensor | None, mine: Tensor) -> Tensor | None:
    """The laws of the chosen rows. A draft without guesses has none."""
    if one is None or other is None:
        return other if one is None else one
    return torch.where(mine.view(-1, *[1] * (one.dim() - 1)), one, other)


def _sampler_after(sampler: Sampler, texts: Sequence[Sequence[int]]) -> Sampler:
    """The sampler of rows with these texts: the same one unless it counts tokens."""
    tempering = sampler.tempering
    if tempering is not None and tempering.minimum is None and tempering.counted is None:
        return sampler
    rows = [replace(row, tokens=list(text)) for row, text in zip(sampler.rows, texts, strict=True)]
    return Sampler(rows, sampler.vocab_size, sampler.device)
