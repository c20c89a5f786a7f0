"""Guesses for beam search: a tree under every beam, so that the next levels can be replayed from one target pass.

A round continues to the next level only if *all* winners of a level were guessed. So the guesses must cover everything that the
search will keep, not one likely text. In ``ModelForest`` a small model runs the same beam search ahead of the target, with its
own log-probabilities. ``DrafterForest`` takes the proposals of any drafter for each beam alone, which is cheaper and covers
less. In both, guesses only decide how many levels one pass covers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, Target
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree


@dataclass(frozen=True, eq=False)
class Beams:
    """The running beams, best first; all of one length."""

    tokens: Sequence[Sequence[int]]
    """Prompt and output of each; the last token is the root of its tree."""
    scores: Tensor
    """[R] sums of log-probabilities."""
    end_ids: frozenset[int]
    vocab_size: int
    device: torch.device

    def roots(self) -> TokenTree:
        """Trees that hold only the last token of every beam."""
        return TokenTree.chain(torch.tensor([[row[-1]] for row in self.tokens], device=self.device))


class Forest(ABC):
    """Grows a tree under every beam. It is frozen; changing state is passed in and out."""

    @abstractmethod
    def start(self, prompt_ids: Sequence[int]) -> Any:
        """The state for one beam, the prompt."""

    @abstractmethod
    def propose(self, state: Any, beams: Beams, depth: int) -> TokenTree:
        """Trees of at most ``depth`` levels under the roots."""

    @abstractmethod
    def keep(self, state: Any, rows: Sequence[int], paths: Sequence[Sequence[int]], scores: Scores) -> Any:
        """The state of the new beams. Beam i continues row ``rows[i]`` along ``paths[i]``, whose first node is the root."""


@final
class NoForest(Forest):
    """Plain beam search: one level per pass."""

    def start(self, prompt_ids: Sequence[int]) -> None:
        del prompt_ids

    def propose(self, state: None, beams: Beams, depth: int) -> TokenTree:
        del state, depth
        return beams.roots()

    def keep(self, state: None, rows: Sequence[int], paths: Sequence[Sequence[int]], scores: Scores) -> None:
        del state, rows, paths, scores


@dataclass(eq=False)
class _DrafterState:
    inner: Any
    draft: Draft | None = None


@final
class DrafterForest(Forest):
    """The guesses of any drafter, made for each beam as if it were the only text, without noise."""

    def __init__(self, drafter: Drafter, *, depth: int = 4) -> None:
        if drafter.taps:
            raise CompositionError(
                f"drafter {type(drafter).__name__} reads the target's hidden states, which beam search does not keep; "
                "use a draft model or a drafter that copies text"
            )
        if depth < 1:
            raise OptionError(f"depth = {depth} is not valid; use at least 1")
        self.drafter = drafter
        self.depth = depth

    def start(self, prompt_ids: Sequence[int]) -> _DrafterState:
        return _DrafterState(self.drafter.start([list(prompt_ids)], {}))

    def propose(self, state: _DrafterState, beams: Beams, depth: int) -> TokenTree:
        if depth == 0:
            state.draft = None
            return beams.roots()
        count, most = len(beams.tokens), min(depth, self.depth)
        rows = [RequestState.of(Request(tokens, SamplingParams(), beams.end_ids)) for tokens in beams.tokens]
        zeros = torch.zeros(count, dtype=torch.int64, device=beams.device)
        sampler = Sampler(rows, beams.vocab_size, beams.device)
        context = Context(beams.tokens, sampler, Noise(zeros, zeros), beams.device)
        nodes = most if self.drafter.shape is Shape.CHAIN else 8 * most
        state.draft = self.drafter.asked(state.inner, context, Plan((most,) * count, (nodes,) * count))
        return state.draft.tree

    def keep(self, state: _DrafterState, rows: Sequence[int], paths: Sequence[Sequence[int]], scores: Scores) -> _DrafterState:
        """The state of the new beams. A drafter commits one path per row. Where several beams continue one row, it commits
        their common beginning and reads the rest as new text."""
        if state.draft is not None:
            count = state.draft.tree.batch_size
            shared = [_shared([path for row, path in zip(rows, paths, strict=True) if row == i]) for i in range(count)]
            accepted = [len(path) - 1 for path in shared]
            self.drafter.observe(state.inner, Observation(state.draft, scores, shared, accepted, 0.0, 0.0))
        return _DrafterState(state.inner.fork(rows))


def _shared(paths: Sequence[Sequence[int]]) -> list[int]:
    """The longest common beginning of the beams of each row; the root alone for a row that no beam continues."""
    common = [0]
    for nodes in list(zip(*paths, strict=True))[1:]:
        if len(set(nodes)) > 1:
            break
        common.append(nodes[0])
    return common


@dataclass(eq=False)
class _ModelState:
    cache: Cache
    num_scored: int = field(default=0)
    """Nodes of the latest trees that are in the cache."""


@dataclass(frozen=True, eq=False)
class _Level:
    """The newest nodes of all trees."""

    totals: Tensor
    """[R, M] score of each node's path: the beam's own score plus the small model's log-probabilities."""
    running: Tensor
    """[R, M] true for nodes that the small model's search continues."""

    @property
    def width(self) -> int:
        return self.totals.shape[1]


@final
class ModelForest(Forest):
    """A small model of the same vocabulary searches ahead with ``width`` beams."""

    def __init__(self, model: Target, *, width: int = 8, depth: int = 4) -> None:
        if width < 1 or depth < 1:
            raise OptionError(f"width = {width} and depth = {depth} are not valid; use at least 1")
        self.model = model
        self.width = width
        self.depth = depth

    def start(self, prompt_ids: Sequence[int]) -> _ModelState:
        cache = self.model.new_cache(1)
        self.model.prefill([list(prompt_ids)[: min(len(prompt_ids), self.model.max_len) - 1]], cache)
        return _ModelState(cache)

    def propose(self, state: _ModelState, beams: Beams, depth: int) -> TokenTree:
        tree, state.num_scored = beams.roots(), 0
        depth = min(depth, self.depth, self.model.max_len - len(beams.tokens[0]))
        if depth <= 0:
            return tree
        behind = state.cache.lengths[0]
        if len(beams.tokens[0]) - 1 > behind:  # beams are of one length, and so is what the cache lacks of them
            self.model.prefill([row[behind:-1] for row in beams.tokens], state.cache)
        level = _Level(beams.scores[:, None], torch.ones_like(beams.scores[:, None], dtype=torch.bool))
        for _ in range(depth):
            logits = self.model.score(tree, state.cache, start=tree.num_nodes - level.width).logits
            state.num_scored = tree.num_nodes
            tree, level = self._grown(tree, level, self._known(logits, beams))
        return tree

    def keep(self, state: _ModelState, rows: Sequence[int], paths: Sequence[Sequence[int]], scores: Scores) -> _ModelState:
        del scores
        cache = state.cache.fork(rows)
        cache.commit([[node for node in path if node < state.num_scored] for path in paths])
        return _ModelState(cache)

    def _known(self, logits: Tensor, beams: Beams) -> Tensor:
        """[R, M, V] log-probabilities of the tokens with which a beam can continue: those of the target's vocabulary, without
        ends of text."""
        logits = logits[..., : beams.vocab_size].float()
        logits[..., [token for token in beams.end_ids if token < logits.shape[-1]]] = -torch.inf
        return logits.log_softmax(-1)

    def _grown(self, tree: TokenTree, level: _Level, log_probs: Tensor) -> tuple[TokenTree, _Level]:
        """Grow one more level, the ``width`` best nodes of all beams. A batch is as wide as its widest row, so other rows add
        their next best nodes at no cost. Those are guesses that the search does not continue."""
        vocab_size, begin = log_probs.shape[-1], tree.num_nodes - level.width
        totals = (level.totals[..., None] + log_probs).flatten(1)
        running = totals.masked_fill(~level.running.repeat_interleave(vocab_size, 1), -torch.inf)
        best = running.topk(min(self.width, running.shape[1]), -1).values
        least = best.flatten().topk(min(self.width, best.numel())).values[-1]
        won = (running >= least) & (running > -torch.inf)
        share = int(won.sum(1).max().clamp(1, best.shape[1]))
        # Totals are at most 0, so winners come first; then by parent, so that the tree stays breadth-first.
        picked = torch.where(won, 1.0, totals).topk(share, -1).indices.sort(-1).values
        tokens = torch.cat([tree.tokens, picked % vocab_size], 1)
        parents = torch.cat([tree.parents, begin + picked // vocab_size], 1)
        sizes = (tokens.shape[1],) * tree.batch_size
        return TokenTree(tokens, parents, sizes), _Level(totals.gather(1, picked), won.gather(1, picked))
