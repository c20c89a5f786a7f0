"""Speculative Jacobi decoding: the target's own laws of the last pass are the draft of the next one.

One pass over a window of W guesses yields the target's law after each of them. Guesses are tested against the laws they were
drawn from; those past the first rejected one are drawn again, each from the law that this pass gave at its place, and that law
is kept as its q. Places that no pass has seen yet are filled. Plain Jacobi iteration needs a guess that equals the target's
choice; here it only has to pass the test of rejection sampling (Teng et al. 2025, arXiv 2410.01699).

    pass:   P_i = p(. | prefix, w_1 .. w_{i-1})                 accept w_i  iff  u_i q_i(w_i) < P_i(w_i)
    after:  w_j ~ P_j,  q_j <- P_j      for every place j behind the first rejection

Lossless: w_j is drawn from q_j by numbers of its own, so given all that came before it, it is a draw from q_j whatever was
accepted; rejection sampling is exact for any q. The released code draws fills from a point mass, which is kept with probability
P(w); a fill that keeps the law it was drawn from is kept with 1 - TV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.rng import Noise, Purpose
from outrider.core.tree import TokenTree
from outrider.drafters.per_row import forked

_FILLS = ("last", "uniform", "point")


@dataclass(frozen=True)
class SpeculativeJacobiOptions:
    """Where guesses come from for places that no pass has seen yet."""

    fill: str = "last"
    """"last": drawn from the law of the last place that was seen. "uniform": any token, all alike. "point": any token,
    tested as a point mass, as published."""

    def __post_init__(self) -> None:
        if self.fill not in _FILLS:
            raise OptionError(f"fill = {self.fill!r} is not valid; {nearest(str(self.fill), _FILLS)}")


@dataclass
class _Row:
    """One request: the guesses that wait with their laws, and the last law that was seen."""

    guesses: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    """[V] the law that each guess was drawn from."""
    last: Tensor | None = None

    def copy(self) -> _Row:
        return _Row(list(self.guesses), list(self.laws), self.last)


@dataclass
class _State(RowState):
    rows: list[_Row]
    context: Context | None = None
    """That of the round being scored: the target's laws are made with its sampler."""

    def fork(self, rows: Sequence[int]) -> _State:
        return _State(forked(self.rows, rows))

    def join(self, other: _State) -> _State:
        return _State([*self.rows, *other.rows])


@final
class SpeculativeJacobi(Drafter):
    """Chains drawn from the target's own laws of the last pass."""

    offers: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.IID

    def __init__(self, options: SpeculativeJacobiOptions | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        """``dtype`` is the target's."""
        self.options = options or SpeculativeJacobiOptions()
        self._dtype = dtype

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State([_Row() for _ in rows])

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        state.context = context
        lengths = [min(depth, nodes) for depth, nodes in zip(plan.max_depth, plan.max_nodes, strict=True)]
        anything = self._anything(context)
        for number, (row, length) in enumerate(zip(state.rows, lengths, strict=True)):
            self._fill(row, length, anything[number], context.noise, number)
        tokens = [[root, *row.guesses[:n]] for root, row, n in zip(context.roots, state.rows, lengths, strict=True)]
        tree = TokenTree.of_rows([(chain, list(range(-1, len(chain) - 1))) for chain in tokens], context.device)
        nothing = torch.zeros_like(anything[0])
        laws = [[*row.laws[:n], *[nothing] * (tree.num_nodes - n)] for row, n in zip(state.rows, lengths, strict=True)]
        return Draft(tree, self.draws, torch.stack([torch.stack(row) for row in laws]))

    def _fill(self, row: _Row, length: int, anything: Tensor, noise: Noise, number: int) -> None:
        """Guesses for the places behind those that wait."""
        missing = length - len(row.guesses)
        if missing <= 0:
            return
        law = row.last if self.options.fill == "last" and row.last is not None else anything
        lanes = torch.arange(1, missing + 1, device=law.device)
        guesses = drawn(law.expand(missing, -1), _of_row(noise, number), lanes)
        row.guesses += guesses.tolist()
        if self.options.fill == "point":
            row.laws += torch.nn.functional.one_hot(guesses, len(law)).to(law.dtype).unbind(0)
        else:
            row.laws += [law] * missing

    def _anything(self, context: Context) -> Tensor:
        """[B, V] all tokens alike, but for those that the sampler forbids."""
        sampler, roots = context.sampler, torch.tensor(context.roots, device=context.device)[:, None]
        nothing = torch.zeros(*roots.shape, sampler.vocab_size, dtype=self._dtype, device=context.device)
        return sampler.law(nothing, TokenTree.chain(roots), context.noise).probs[:, 0]

    def observe(self, state: _State, observation: Observation) -> None:
        """The places behind the emitted tokens are drawn again, each from the law of this pass."""
        tree, context = observation.draft.tree, state.context
        if context is None:
            state.rows = [_Row() for _ in state.rows]
            return
        probs = context.sampler.law(observation.scores.logits, tree, context.noise).probs
        for number, (row, accepted, size) in enumerate(zip(state.rows, observation.num_accepted, tree.sizes, strict=True)):
            laws = probs[number, accepted + 1 : size]
            lanes = torch.arange(size + accepted + 1, 2 * size, device=laws.device)  # those up to ``size`` were for fills
            row.guesses = drawn(laws, _of_row(context.noise, number), lanes).tolist() if len(laws) else []
            row.laws = list(laws.unbind(0))
            row.last = probs[number, size - 1]
        state.context = None


def _of_row(noise: Noise, number: int) -> Noise:
    return Noise(noise.seeds[number : number + 1], noise.positions[number : number + 1], noise.stream)


def drawn(laws: Tensor, noise: Noise, lanes: Tensor) -> Tensor:
    """[M] a token from each of the laws [M, V], by a draft number of its own lane."""
    return (laws.log() + noise.gumbel(Purpose.DRAFT, lanes[None], laws.shape[1])[0]).argmax(-1)


def build(parts: Parts) -> Drafter:
    return SpeculativeJacobi(parts.options, dtype=parts.target.dtype)


ROW = MethodRow(
    summary="the target's own laws of the last pass, drawn again and tested",
    paper="Teng et al. 2025 (arXiv 2410.01699)",
    drafter=SpeculativeJacobi,
    build=build,
    options=SpeculativeJacobiOptions,
    defaults={"num_draft_tokens": 8},
    acceptance="rejection",
)
