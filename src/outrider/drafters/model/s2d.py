"""S2D: one draft model with nested exits. Each guess is made at the first exit that is sure of it (arXiv 2407.01955).

The draft is *sorted*: trained so that its first 6, 9 and 12 layers are drafts of their own, with one norm and one head
(``outrider train sorted``). A guess begins at the shallowest exit. If the exit is sure of its likeliest token the guess is
made there; if not, the same states go on to the next exit. A row stops drafting after a guess of which even the last exit
is unsure; that guess is kept (Lemma C of docs/lossless.md).

    e = first exit with  max softmax(l_e) >= threshold,  or the last one;      guess from the law of l_e

Tokens that left early have no keys and values in the layers above. They wait with the states of their exit, even across rounds,
until a guess goes deeper. Then all waiting tokens run through the missing layers in one pass. Rows of a batch share passes, so
the waiting tokens of all rows run with those of one unsure row. Each row's guess still comes from its own exit.

The exit depends on logits alone, never on the drawn token: lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, StopRule, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.drafters.model.cached_rows import CachedRows
from outrider.drafters.model.catch_up import fit, room
from outrider.drafters.trees.chain import grow_chain

_MOST_WAITING = 64
"""Most tokens of a row that may wait for the deeper layers. Longer rows, such as prompts, run through all layers."""


def exits_of(given: tuple[int, ...] | str | None, num_layers: int) -> tuple[int, ...]:
    """The nested exits of a draft of ``num_layers``, the last one at its end: those given, or the paper's 1/2, 3/4 and 1."""
    if given is None:
        return tuple(sorted({max(1, num_layers // 2), max(1, 3 * num_layers // 4), num_layers}))
    try:
        exits = tuple(int(part) for part in (given.split(",") if isinstance(given, str) else given))
    except (TypeError, ValueError):
        raise OptionError(f"exits = {given!r} is not valid; write layer numbers with commas between them") from None
    if not exits or exits[-1] != num_layers or exits[0] < 1 or list(exits) != sorted(set(exits)):
        raise OptionError(
            f"exits = {given!r} is not valid; the draft has {num_layers} layers, so use rising whole numbers from 1 that end "
            f"with {num_layers}"
        )
    return exits


@dataclass(frozen=True)
class SortedOptions:
    """Where and when a guess may exit the draft."""

    exits: tuple[int, ...] | str | None = None
    """Layers after which a guess may exit ("1,2,4" on the command line). Default: 1/2, 3/4 and all of the layers. Use
    those of training."""
    threshold: float = 0.7
    """An exit before the last makes the guess if its likeliest token has at least this probability."""
    stop_threshold: float = 0.2
    """Drafting stops after a guess whose likeliest token has less than this probability at the last exit."""

    def __post_init__(self) -> None:
        for name in ("threshold", "stop_threshold"):
            if not 0 <= vars(self)[name] <= 1:
                raise OptionError(f"{name} = {vars(self)[name]!r} is not valid; use a number from 0 to 1")


@final
@dataclass
class _State(CachedRows):
    """The cache holds tokens that passed all layers. Waiting tokens follow them, in the layers they have passed."""

    reached: list[Tensor] = field(default_factory=list)
    """[B, M, H] for every exit but the last: states of the first M waiting tokens. M falls from exit to exit."""


@final
class SortedDraft(Drafter):
    """Chains from a draft model with nested exits."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN
    waits: ClassVar = ""
    drafts_alone = True

    def __init__(
        self,
        model: LayeredTarget,
        options: SortedOptions | None = None,
        *,
        vocab_size: int,
        draws: Draws = Draws.DETERMINISTIC,
    ) -> None:
        self.model, self.vocab_size, self.draws = model, vocab_size, draws
        self.options = options or SortedOptions()
        self.exits = exits_of(self.options.exits, model.num_layers)
        self.num_guesses = [0] * len(self.exits)
        """Number of guesses made at each exit so far, for statistics."""

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State(self.model.new_cache(len(rows)))

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        wanted = [room(self.model, tokens, depth) for tokens, depth in zip(context.tokens, plan.max_depth, strict=True)]
        if not any(wanted):
            return context.without_guesses(self.draws)
        state.base = [min(len(tokens), self.model.max_len) for tokens in context.tokens]
        self._read_long(state, context)
        stop = _LastUnsure()

        def logits_after(chain: Tensor, depths: Sequence[int]) -> Tensor:
            leaving = _Leaving([depth >= chain.shape[1] for depth in depths], self.model.device)
            self._climb(state, _waiting(state, context, chain, depths), leaving)
            stop.unsure = leaving.rows.tolist()
            return fit(leaving.logits[:, None], self.vocab_size)

        return grow_chain(context, wanted, logits_after, draws=self.draws, stops=[plan.stop, stop])

    def observe(self, state: _State, observation: Observation) -> None:
        """Keep the accepted guesses, in the cache and among the waiting tokens."""
        if not state.base:
            return
        self.rewind(state, [base + count for base, count in zip(state.base, observation.num_accepted, strict=True)])
        state.base = []

    def rewind(self, state: _State, lengths: Sequence[int]) -> None:
        """Keep tokens in the cache, then among the waiting ones."""
        kept, lengths = lengths, state.cache.lengths
        waiting = max(0, min(known - length for known, length in zip(kept, lengths, strict=True)))
        state.reached = [states[:, :waiting] for states in state.reached]
        if any(known < length for known, length in zip(kept, lengths, strict=True)):
            state.cache.truncate([min(known, length) for known, length in zip(kept, lengths, strict=True)])

    def _read_long(self, state: _State, context: Context) -> None:
        """Run all of a prompt but its last token through all layers."""
        waiting = [list(tokens[done:end]) for tokens, done, end in zip(context.tokens, state.cache.lengths, state.base)]
        if max(map(len, waiting)) > _MOST_WAITING:
            self.model.prefill([tokens[:-1] for tokens in waiting], state.cache)
            state.reached = []

    def _climb(self, state: _State, waiting: Sequence[Sequence[int]], leaving: _Leaving) -> None:
        """Run from exit to exit until every row has its guess. ``waiting`` holds the tokens after each row's cache."""
        sizes, longest = [len(row) for row in waiting], max(1, *map(len, waiting))
        fed = torch.tensor([[*row, *[0] * (longest - len(row))] for row in waiting], device=self.model.device)
        tree = TokenTree.chain(fed, [max(1, size) for size in sizes])
        rows, ends = torch.arange(len(sizes), device=fed.device), torch.tensor(tree.sizes, device=fed.device) - 1
        bars = [*[self.options.threshold] * (len(self.exits) - 1), self.options.stop_threshold]
        reached = list[Tensor]()
        while leaving.rows.any() and len(reached) < len(self.exits):
            self._reach(state, tree, reached)
            before = int(leaving.rows.sum())
            leaving.take(self.model.logits(reached[-1][rows, ends]), bars[len(reached) - 1])
            is_last = len(reached) == len(self.exits)
            self.num_guesses[len(reached) - 1] += before - (0 if is_last else int(leaving.rows.sum()))
        if len(reached) == len(self.exits):
            state.cache.commit([range(size) for size in sizes])
            state.reached = []
        else:
            state.reached = [*(states[:, : min(sizes)] for states in reached), *state.reached[len(reached) :]]

    def _reach(self, state: _State, tree: TokenTree, reached: list[Tensor]) -> None:
        """Run all waiting tokens to the next exit. Those that have not passed it continue from the exit before."""
        level, below = len(reached), reached[-1] if reached else None
        known = state.reached[level] if level < len(state.reached) else None
        start = 0 if known is None else known.shape[1]
        resume = None if below is None else Resume(self.exits[level - 1], below[:, start:])
        route = Route.first(self.exits[level], self.model.num_layers)
        states = self.model.exit(tree, state.cache, route=route, start=start, begun=resume)
        reached.append(states if known is None else torch.cat((known, states), 1))


@final
class _Leaving:
    """The rows that still need a guess during one pass."""

    def __init__(self, rows: Sequence[bool], device: torch.device) -> None:
        self.rows = torch.tensor(rows, device=device)
        """[B] true for rows that no exit was confident about yet."""
        self.logits = torch.zeros(0, device=device)
        """[B, V] logits of the exit at which each row made its guess."""

    def take(self, logits: Tensor, bar: float) -> None:
        """Let rows exit whose likeliest token has at least probability ``bar`` in the exit's logits [B, V]."""
        self.logits = torch.where(self.rows[:, None], logits, self.logits) if len(self.logits) else logits
        self.rows = self.rows & (logits.float().softmax(-1).amax(-1) < bar)


@final
class _LastUnsure(StopRule):
    """Ends each row after a guess about which the last exit was uncertain."""

    unsure: Sequence[bool] = ()

    def before(self, depth: int, law: Law) -> None:
        del depth, law

    def after(self, depth: int, law: Law, guesses: Tensor) -> list[bool]:
        del depth, law, guesses
        return [not unsure for unsure in self.unsure]


def _waiting(state: _State, context: Context, chain: Tensor, depths: Sequence[int]) -> list[list[int]]:
    """The tokens of each row, guesses included, that have not passed all layers."""
    found = list[list[int]]()
    for tokens, done, base, guesses, depth in zip(
        context.tokens, state.cache.lengths, state.base, chain[:, 1:].tolist(), depths, strict=True
    ):
        found.append([*tokens[done:base], *guesses[max(0, done - base) : depth]])
    return found


def layered_draft(model: Target) -> LayeredTarget:
    """The draft as a ``LayeredTarget``; refused if its layers cannot be run apart."""
    if not isinstance(model, LayeredTarget):
        raise CompositionError(
            f"method 's2d' runs the draft's layers apart, and {type(model).__name__} runs them only together"
            f"{model.traits.why_together}; use a draft of the lean decoder (a Llama, say), or method 'draft-model'"
        )
    return model


def build(parts: Parts) -> Drafter:
    model = layered_draft(parts.draft_model)
    return SortedDraft(model, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a draft model with nested exits guesses a chain, each guess at the first exit that is sure",
    paper="Kavehzadeh et al. 2024, S2D (arXiv 2407.01955)",
    drafter=SortedDraft,
    build=build,
    needs_draft=True,
    needs_layers=True,
    options=SortedOptions,
    defaults={"num_draft_tokens": 6},
)
