"""A window of guesses that are drawn from the target's own laws of the last pass, each with its law kept.

The base of the drafters of speculative Jacobi decoding. It keeps pending guesses between rounds, fills positions that no pass
has scored, and gives each guess its q. The drafters differ in the random numbers by which guesses are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core.draft import Draft, Shape
from outrider.core.errors import check_one_of
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.rng import Noise, Purpose
from outrider.core.tree import TokenTree
from outrider.drafters.per_row import PerRowInContext

_FILLS = ("last", "uniform", "point")


@dataclass(frozen=True)
class WindowOptions:
    """How guesses are filled in at positions that no pass has scored yet."""

    fill: str = "last"
    """"last": drawn from the law of the last scored position. "uniform": drawn uniformly. "point": drawn uniformly, but
    tested as a point mass, as published."""

    def __post_init__(self) -> None:
        check_one_of("fill", self.fill, _FILLS)


@dataclass
class _Row:
    """One request: its pending guesses with their laws, and the law of the last scored position."""

    guesses: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    """[V] the law that each guess was drawn from."""
    last: Tensor | None = None

    def copy(self) -> _Row:
        return _Row(list(self.guesses), list(self.laws), self.last)


_State = PerRowInContext[_Row]


class JacobiWindow(Drafter, ABC):
    """Chains drawn from the target's own laws of the last pass."""

    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: WindowOptions | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        """``dtype`` is the target's."""
        self.options = options or WindowOptions()
        self._dtype = dtype

    @abstractmethod
    def numbers(self, noise: Noise, row: int, places: range, *, num_nodes: int) -> tuple[Noise, Tensor]:
        """The noise [M] and lanes [M, 1] of guesses at M positions of a row. Position 1 is the tree's first guess.
        Positions past the tree's ``num_nodes`` - 1 guesses belong to the next round. Fills have ``num_nodes`` 0."""

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State([_Row() for _ in rows])

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        state.context = context
        lengths = [min(depth, nodes) for depth, nodes in zip(plan.max_depth, plan.max_nodes, strict=True)]
        anything = self._anything(context)
        for number, (row, length) in enumerate(zip(state.rows, lengths, strict=True)):
            self._fill(row, number, length, anything[number], context.noise)
        tokens = [[root, *row.guesses[:n]] for root, row, n in zip(context.roots, state.rows, lengths, strict=True)]
        tree = TokenTree.of_rows([(chain, list(range(-1, len(chain) - 1))) for chain in tokens], context.device)
        nothing = torch.zeros_like(anything[0])
        laws = [[*row.laws[:n], *[nothing] * (tree.num_nodes - n)] for row, n in zip(state.rows, lengths, strict=True)]
        return Draft(tree, self.draws, torch.stack([torch.stack(row) for row in laws]))

    def _fill(self, row: _Row, number: int, length: int, anything: Tensor, noise: Noise) -> None:
        """Guesses for the positions after the pending ones."""
        places = range(len(row.guesses) + 1, length + 1)
        if not places:
            return
        missing = len(places)
        law = row.last if self.options.fill == "last" and row.last is not None else anything
        guesses = drawn(law.expand(missing, -1), *self.numbers(noise, number, places, num_nodes=0))
        row.guesses += guesses.tolist()
        if self.options.fill == "point":
            row.laws += torch.nn.functional.one_hot(guesses, len(law)).to(law.dtype).unbind(0)
        else:
            row.laws += [law] * missing

    def _anything(self, context: Context) -> Tensor:
        """[B, V] the uniform law over the tokens that the sampler allows."""
        sampler, roots = context.sampler, torch.tensor(context.roots, device=context.device)[:, None]
        nothing = torch.zeros(*roots.shape, sampler.vocab_size, dtype=self._dtype, device=context.device)
        return sampler.law(nothing, TokenTree.chain(roots), context.noise).probs[:, 0]

    def observe(self, state: _State, observation: Observation) -> None:
        """Draw the positions after the emitted tokens again, each from this pass's law."""
        tree, context = observation.draft.tree, state.context
        if context is None:
            state.rows = [_Row() for _ in state.rows]
            return
        probs = context.sampler.law(observation.scores.logits, tree, context.noise).probs
        for number, (row, accepted, size) in enumerate(zip(state.rows, observation.num_accepted, tree.sizes, strict=True)):
            laws, places = probs[number, accepted + 1 : size], range(accepted + 2, size + 1)
            numbers = self.numbers(context.noise, number, places, num_nodes=size)
            row.guesses = drawn(laws, *numbers).tolist() if len(laws) else []
            row.laws = list(laws.unbind(0))
            row.last = probs[number, size - 1]
        state.context = None


def drawn(laws: Tensor, noise: Noise, lanes: Tensor) -> Tensor:
    """[M] a token from each of the laws [M, V], drawn with the draft noise of its row of ``noise`` and its lane [M, 1]."""
    return (laws.log() + noise.gumbel(Purpose.DRAFT, lanes, laws.shape[1])[:, 0]).argmax(-1)


def at_places(noise: Noise, row: int, positions: Tensor) -> Noise:
    """The noise of one row at several output positions [M]."""
    return Noise(noise.seeds[row].expand(len(positions)), positions, noise.stream)
