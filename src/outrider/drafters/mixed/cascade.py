"""Staged speculation: the draft model writes its chain by speculative decoding, with a cheaper drafter of its own.

A draft model of some size spends most of a round on one pass per guess. Its text is as predictable as the target's. So an inner
drafter (an n-gram look-up, a smaller model) guesses several tokens, and one pass of the draft model checks them. The guesses it
would have made anyway are kept. So each stage is a round of speculative decoding in which the draft model is the target. The
draft is token for token that of ``draft-model``, with fewer passes. This holds because the draft model's choice at every depth
uses that depth's own random numbers, whatever was guessed. (Spector & Re 2023, "Accelerating LLM Inference with Staged
Speculative Decoding", arXiv 2308.04623; Chen et al. 2023, cascade speculative drafting, arXiv 2312.11462.)

    x_d = argmax log q(. | x_<d) + g_d,    g_d: the target's noise at that position (coupled), or the draft's own (sampled)
    a stage:  the inner drafter proposes a tree below x_1 .. x_m;  one pass gives the choices after all its nodes;
              the path that holds them is kept, and the choice after it:  m <- m + path + 1,   until m = K

Lossless under every rule that ``draft-model`` is lossless under; under ``coupled``, same seed, same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError, nearest
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.lasting_memory import LastingMemory
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.rng import Noise
from outrider.core.tree import TokenTree
from outrider.drafters.model.catch_up import fit, room

INNER = ("prompt-lookup", "suffix", "reference", "rest", "draft-model", "draft-tree", "best-first")
"""Methods that may draft for the draft model. Here they keep no memory across requests, because most of what they see is
guesses."""


@dataclass(frozen=True)
class CascadeOptions:
    """Which method drafts for the draft model. The policy's ``num_draft_tokens`` is the length of the draft model's chain."""

    inner: str = "prompt-lookup"
    """A method that copies, or one with a draft model, which is then the second model of ``draft``. Give its options
    beside this one."""
    num_inner_tokens: int = 6
    """Most guesses along one path of a stage."""
    num_inner_nodes: int | None = None
    """Most guesses of a stage in all, for inner methods that grow trees. Default: as many as along one path."""

    def __post_init__(self) -> None:
        if self.inner not in INNER:
            raise OptionError(f"inner = {self.inner!r} is not valid; {nearest(str(self.inner), INNER)}")
        for name in ("num_inner_tokens", "num_inner_nodes"):
            value = vars(self)[name]
            if not ((isinstance(value, int) and value >= 1) or (value is None and name == "num_inner_nodes")):
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least 1")


@dataclass
class CascadeState(RowState):
    """The draft model's cache, and the inner drafter's state. Between rounds both hold committed tokens only."""

    cache: Cache
    inner: Any
    base: list[int] = field(default_factory=list)
    """Committed tokens of each row in this round. Whatever follows them in the cache is guesses."""

    def fork(self, rows: Sequence[int]) -> CascadeState:
        return CascadeState(self.cache.fork(rows), self.inner.fork(rows))

    def join(self, other: CascadeState) -> CascadeState:
        return CascadeState(self.cache.join(other.cache), self.inner.join(other.inner))


@final
class Cascade(Drafter):
    """Chains from a draft model that itself uses speculative decoding."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    waits: ClassVar = "every verdict decides what its parts draft next"
    shape: ClassVar = Shape.CHAIN
    drafts_alone = True

    def __init__(
        self,
        model: Target,
        inner: Drafter,
        options: CascadeOptions | None = None,
        *,
        vocab_size: int,
        draws: Draws = Draws.DETERMINISTIC,
    ) -> None:
        if inner.draws is not Draws.DETERMINISTIC or inner.taps:
            raise CompositionError(f"{type(inner).__name__} cannot guess for a draft model; use a method that copies")
        self.model, self.inner = model, inner
        self.options = options or CascadeOptions()
        self.vocab_size, self.draws = vocab_size, draws

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return self.inner.memories

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> CascadeState:
        return CascadeState(self.model.new_cache(len(rows)), self.inner.start(rows, taps))

    def propose(self, state: CascadeState, context: Context, plan: Plan) -> Draft:
        limits = zip(context.tokens, plan.max_depth, plan.max_nodes, strict=True)
        depths = [room(self.model, tokens, min(depth, nodes)) for tokens, depth, nodes in limits]
        run = _Run([[root] for root in context.roots])
        state.base = []
        if any(depths):
            self._catch_up(state, context)
            scratch = self._scratch(state, len(depths))
            while any(run.missing(depths)):
                self._stage(run, scratch, state.cache, context, run.missing(depths))
        width = max(depths) + 1
        chains = [[*chain[: depth + 1], *[0] * (width - depth - 1)] for chain, depth in zip(run.chains, depths, strict=True)]
        tree = TokenTree.chain(torch.tensor(chains, device=context.device), [depth + 1 for depth in depths])
        has_laws = self.draws is Draws.IID and width > 1
        return Draft(tree, self.draws, run.laws_of(width, self.vocab_size, context.device) if has_laws else None)

    def observe(self, state: CascadeState, observation: Observation) -> None:
        """Drop the guesses that were not accepted."""
        if state.base:
            kept = (min(base + n, now) for base, n, now in zip(state.base, observation.num_accepted, state.cache.lengths))
            state.cache.truncate(list(kept))
            state.base = []

    def _catch_up(self, state: CascadeState, context: Context) -> None:
        """Read all committed tokens but the last, which is the root of the first stage."""
        ends = [min(len(row), self.model.max_len) - 1 for row in context.tokens]
        rows = zip(context.tokens, state.cache.lengths, ends, strict=True)
        missing = [list(row[done:end]) for row, done, end in rows]
        if any(missing):
            self.model.prefill(missing, state.cache)
        state.base = [len(row) for row in context.tokens]

    def _scratch(self, state: CascadeState, num_rows: int) -> Any:
        """A copy of the inner state that treats guesses as text. The original is unchanged."""
        rows = range(num_rows)
        twice = state.inner.fork([*rows, *rows])
        state.inner = twice.fork(list(rows))
        return twice.fork([row + num_rows for row in rows])

    def _stage(self, run: _Run, scratch: Any, cache: Cache, context: Context, missing: Sequence[int]) -> None:
        """The inner drafter guesses, and one pass of the draft model verifies. Every row that lacks tokens gets some."""
        options = self.options
        inside = replace(
            context,
            tokens=[[*tokens, *chain[1:]] for tokens, chain in zip(context.tokens, run.chains, strict=True)],
            noise=Noise(context.noise.seeds, context.noise.positions + torch.tensor(run.lengths, device=context.device)),
            cache=None,  # the target's, which knows nothing of the chain below
        )
        max_depth = tuple(min(options.num_inner_tokens, max(0, left - 1)) for left in missing)
        nodes = options.num_inner_nodes or options.num_inner_tokens
        plan = Plan(max_depth, tuple(nodes if depth else 0 for depth in max_depth))
        draft = self.inner.propose(scratch, inside, plan)
        scores = self.model.score(draft.tree, cache)
        tree, start = run.extended(draft.tree, context.device), min(run.lengths)
        logits = run.aligned(fit(scores.logits, self.vocab_size), tree, start)
        law = context.sampler.law(logits, tree, context.noise, start=start)
        choices = law.choices if self.draws is Draws.DETERMINISTIC else law.draw(tree.depths[:, start:])
        paths = run.advance(draft.tree, choices.tolist(), start=start, missing=missing)
        if self.draws is Draws.IID:
            run.keep_laws(law.probs, start=start)
        cache.commit(paths)
        accepted = [max(0, len(path) - 1) for path in paths]
        self.inner.observe(scratch, Observation(draft, scores, paths, accepted, 0.0, 0.0, plan))


class _Run:
    """The growing chains of one round, the root first."""

    def __init__(self, chains: list[list[int]]) -> None:
        self.chains = chains
        self.laws: list[list[Tensor]] = [[] for _ in chains]
        """[V] the law from which each guess was drawn, if they are sampled."""
        self._nodes: list[list[int]] = []
        """For each new guess of the last stage, the node of the whole tree after which it was chosen."""

    @property
    def lengths(self) -> list[int]:
        """Number of guesses so far."""
        return [len(chain) - 1 for chain in self.chains]

    def missing(self, depths: Sequence[int]) -> list[int]:
        return [depth - length for depth, length in zip(depths, self.lengths, strict=True)]

    def extended(self, tree: TokenTree, device: torch.device) -> TokenTree:
        """The chains with a stage's guesses below their last tokens, starting at the true root, as the sampler needs them."""
        rows: list[tuple[list[int], list[int]]] = []
        for row, chain in enumerate(self.chains):
            size, above = tree.sizes[row], len(chain) - 1
            tokens, parents = tree.tokens[row, 1:size].tolist(), tree.parents[row, 1:size].tolist()
            rows.append(([*chain, *tokens], [*range(-1, above), *(parent + above for parent in parents)]))
        return TokenTree.of_rows(rows, device)

    def aligned(self, logits: Tensor, tree: TokenTree, start: int) -> Tensor:
        """[B, N - start, V] a stage's logits [B, n, V], moved to their nodes of the whole tree. Other entries are not read."""
        shift = torch.tensor(self.lengths, device=logits.device)[:, None]
        nodes = torch.arange(start, tree.num_nodes, device=logits.device) - shift
        index = nodes.clamp(0, logits.shape[1] - 1)[..., None]
        return logits.gather(1, index.expand(-1, -1, logits.shape[2]))

    def advance(self, tree: TokenTree, choices: list[list[int]], *, start: int, missing: Sequence[int]) -> list[list[int]]:
        """Follow the choices through every row's guesses and append them. Returns the nodes to commit, the root first."""
        paths: list[list[int]] = []
        self._nodes = []
        for row, chain in enumerate(self.chains):
            size, shift = tree.sizes[row], len(chain) - 1
            tokens, parents = tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()
            below = {(parents[node], tokens[node]): node for node in range(size - 1, 0, -1)}  # of equals the first
            path: list[int] = []
            node: int | None = 0 if missing[row] > 0 else None
            while node is not None:
                path.append(node)
                chain.append(choices[row][node + shift - start])
                node = below.get((node, chain[-1]))
            paths.append(path)
            self._nodes.append([node + shift for node in path])
        return paths

    def keep_laws(self, probs: Tensor, *, start: int) -> None:
        for row, nodes in enumerate(self._nodes):
            self.laws[row] += [probs[row, node - start] for node in nodes]

    def laws_of(self, width: int, vocab_size: int, device: torch.device) -> Tensor:
        """[B, N, V] the law at every node that has a guess, zero elsewhere."""
        q = torch.zeros(len(self.laws), width, vocab_size, device=device)
        for row, laws in enumerate(self.laws):
            if laws:
                q[row, : len(laws)] = torch.stack(laws)
        return q


def build(parts: Parts) -> Drafter:
    inner = parts.drafter_of(parts.options.inner, skip_drafts=1)
    return Cascade(parts.draft_model, inner, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a draft model whose own guesses are speculated by a cheaper drafter",
    paper="Spector & Re 2023 (arXiv 2308.04623), Chen et al. 2023 (arXiv 2312.11462)",
    drafter=Cascade,
    build=build,
    options=CascadeOptions,
    defaults={"num_draft_tokens": 8, "memory_tokens": 0},
    needs_draft=True,
    parts="inner",
)
