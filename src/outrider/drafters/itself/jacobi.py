"""Jacobi decoding: start with any K guesses, and let the target correct all of them at once in every round.

The text is the fixed point of "every token is the target's choice after the tokens before it". One pass over K guesses yields
the target's choice after each of them. The choices after the first wrong guess were made in a wrong context, but they are often
right. They become the guesses of the next round (Jacobi's iteration for a triangular system; Song et al. 2021, arXiv
2002.03629; for translation and language models Santilli et al. 2023, arXiv 2305.10427). Sampling has a fixed point too: under
the coupled rule the noise is fixed, so the choice at a position is a function of the tokens before it.

    guess[i + 1] <- choice(prefix, guess[1], ..., guess[i])      for all i in one pass; right once all before it are

Guesses are chosen, not sampled from a q: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import check_one_of
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.per_row import PerRowInContext

_FILLS = ("follow", "repeat")


@dataclass(frozen=True)
class JacobiOptions:
    """How guesses are filled in at positions that the target has not scored yet."""

    fill: str = "follow"
    """With "follow", the token that last followed the previous guess in the request's text, else the previous guess again. With
    "repeat", always the previous guess, so that only the iteration itself finds tokens."""

    def __post_init__(self) -> None:
        check_one_of("fill", self.fill, _FILLS)


@dataclass
class _Row:
    """One request: its pending guesses, and what last followed each token of its text."""

    guesses: list[int] = field(default_factory=list)
    follower: dict[int, int] = field(default_factory=dict)
    num_read: int = 0

    def read(self, history: Sequence[int]) -> None:
        for position in range(max(self.num_read, 1), len(history)):
            self.follower[history[position - 1]] = history[position]
        self.num_read = len(history)

    def chain(self, root: int, length: int) -> list[int]:
        """The root and ``length`` guesses: the pending ones, then fills."""
        chain = [root, *self.guesses[:length]]
        while len(chain) <= length:
            chain.append(self.follower.get(chain[-1], chain[-1]))
        return chain

    def copy(self) -> _Row:
        return _Row(list(self.guesses), dict(self.follower), self.num_read)


_State = PerRowInContext[_Row]


@final
class Jacobi(Drafter):
    """Chains of the target's own earlier choices."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.DETERMINISTIC
    drafts_alone = True
    reads_logits = True

    def __init__(self, options: JacobiOptions | None = None) -> None:
        self.options = options or JacobiOptions()

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State([_Row() for _ in rows])

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        state.context = context
        rows: list[tuple[list[int], list[int]]] = []
        for row, history, depth, nodes in zip(state.rows, context.tokens, plan.max_depth, plan.max_nodes, strict=True):
            if self.options.fill == "follow":
                row.read(history)
            chain = row.chain(history[-1], min(depth, nodes))
            rows.append((chain, list(range(-1, len(chain) - 1))))
        return Draft(TokenTree.of_rows(rows, context.device), self.draws)

    def observe(self, state: _State, observation: Observation) -> None:
        """The choice at the end of the accepted path was emitted. The choices after the later guesses become pending."""
        tree, context = observation.draft.tree, state.context
        begin = min(observation.num_accepted) + 1  # nobody needs the choices above
        if context is not None and begin < tree.num_nodes:
            law = context.sampler.law(observation.scores.logits[:, begin:], tree, context.noise, start=begin)
            choices: list[list[int]] = law.choices.tolist()
            for row, accepted, size, chosen in zip(state.rows, observation.num_accepted, tree.sizes, choices, strict=True):
                row.guesses = chosen[accepted + 1 - begin : size - begin]
        else:
            for row in state.rows:
                row.guesses = []
        state.context = None


def build(parts: Parts) -> Drafter:
    return Jacobi(parts.options)


ROW = MethodRow(
    summary="the target's own corrections of its last guesses",
    paper="Santilli et al. 2023 (arXiv 2305.10427)",
    drafter=Jacobi,
    build=build,
    options=JacobiOptions,
    defaults={"num_draft_tokens": 8},
)
