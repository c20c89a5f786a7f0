"""Draft and target at work at once: while the target checks a chain, the draft writes on behind its end.

Drafting in turns makes the target wait for the draft, and the draft for the target. Here a thread drafts behind the end of the
chain that is being checked, as if all of it were accepted (*post-verify*). If it was, and the target's next token is the first
that was drafted meanwhile, the next chain is ready when the pass ends. If not, what was drafted is dropped, and the next pass
scores the last token alone while the draft begins anew (*pre-verify*). Both are one rule: draft behind whatever is being
checked. Guesses are chosen ones, with the target's noise, so any rule that is exact for those stays exact.
(Liu et al. 2024, PEARL, arXiv 2408.11850.)

    round time = max(pass, K + 1 draft steps), not their sum;         tokens per pass as for chains of K, less after a rejection
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.guessing_target import GuessingTarget, guess_by_steps
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.rng import Noise
from outrider.core.side_thread import NotCapturedError, become_side_thread
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree


@dataclass
class _State(RowState):
    cache: Cache
    fed: list[list[int]]
    """Tokens of each row in the draft's cache."""
    begun: list[list[int]]
    """The text of each row after which it was drafted ahead: committed tokens, then the guesses being verified."""
    ahead: list[list[int]]
    """The tokens drafted after it."""
    work: Future[list[list[int]]] | None = field(default=None)
    again: Callable[[], list[list[int]]] = field(default=list)
    """The same work again, run by the waiting thread if the draft thread cannot do it."""

    def fork(self, rows: Sequence[int]) -> _State:
        return self._of(rows, self.cache.fork(rows))

    def narrow(self, rows: Sequence[int]) -> _State:
        return self._of(rows, self.cache.narrow(rows))

    def join(self, other: _State) -> _State:
        cache = self.cache.join(other.cache)
        return _State(cache, self.fed + other.fed, self.begun + other.begun, self.ahead + other.ahead)

    def finish(self) -> None:
        """Wait for the draft thread. Nothing is drafted between rounds, so rows can come and go."""
        if self.work is not None:
            work, self.work = self.work, None
            try:
                self.ahead = work.result()
            except NotCapturedError:  # once for every shape of the draft's passes
                self.ahead = self.again()

    def pending(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Guesses that still follow these committed tokens; none if the text took another turn."""
        expected = [*self.begun[row], *self.ahead[row]]
        return expected[len(tokens) :] if expected[: len(tokens)] == list(tokens) else []

    def _of(self, rows: Sequence[int], cache: Cache) -> _State:
        fed, begun, ahead = ([many[row] for row in rows] for many in (self.fed, self.begun, self.ahead))
        return _State(cache, fed, begun, ahead)


@final
class Pearl(Drafter):
    """Chains drafted while the target verifies."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.DETERMINISTIC

    def __init__(self, model: Target, *, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self._thread = ThreadPoolExecutor(1, "outrider-draft", initializer=become_side_thread)
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        nothing = [list[int]() for _ in rows]
        return _State(self.model.new_cache(len(rows)), nothing, list(nothing), list(nothing))

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        state.finish()
        chains = [state.pending(b, row)[: plan.max_depth[b]] for b, row in enumerate(context.tokens)]
        self._go_on(state, context, chains, plan)
        rows = [([root, *chain], list(range(-1, len(chain)))) for root, chain in zip(context.roots, chains, strict=True)]
        return Draft(TokenTree.of_rows(rows, context.device), self.draws)

    def observe(self, state: _State, observation: Observation) -> None:
        del observation  # what was accepted shows in the next round's tokens
        state.finish()

    def _go_on(self, state: _State, context: Context, chains: Sequence[Sequence[int]], plan: Plan) -> None:
        """Draft after the chains on the thread: one token more than planned, because the first stands for the target's
        next one."""
        state.begun = [[*row, *chain] for row, chain in zip(context.tokens, chains, strict=True)]
        limits = zip(state.begun, plan.max_depth, strict=True)
        wanted = [max(0, min(depth + 1, self.model.max_len - len(text))) if depth else 0 for text, depth in limits]
        shift = torch.tensor([len(chain) for chain in chains], device=context.noise.positions.device)
        noise = replace(context.noise, positions=context.noise.positions + shift)
        tempering = context.sampler.tempering or Tempering([row.params.temperature for row in context.sampler.rows])
        tempering = replace(tempering, counted=None)  # texts grow while the thread drafts
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.model.device))
        state.again = partial(self._draft, state, wanted, tempering, noise)
        state.work = self._thread.submit(state.again)

    def _draft(self, state: _State, wanted: Sequence[int], tempering: Tempering, noise: Noise) -> list[list[int]]:
        if not any(wanted):
            return [[] for _ in wanted]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            missing = _rewind(state, wanted)
            found = None
            if isinstance(self.model, GuessingTarget):
                plan = Plan(tuple(wanted), tuple(wanted))
                found = self.model.guess(missing, state.cache, plan=plan, tempering=tempering, noise=noise)
            if found is None:
                law = {"temperatures": tempering.temperatures, "noise": noise, "vocab_size": self.vocab_size}
                found = guess_by_steps(self.model, missing, state.cache, depths=wanted, **law)
            return _note(state, wanted, found.tokens.tolist())


def _rewind(state: _State, wanted: Sequence[int]) -> list[list[int]]:
    """Truncate the draft's cache to the wanted text. Returns the tokens it lacks: at least one for rows that want
    guesses, none for the others."""
    kept = [
        min(_num_shared(fed, text), len(text) - 1) if limit else len(fed)
        for fed, text, limit in zip(state.fed, state.begun, wanted, strict=True)
    ]
    state.cache.truncate(kept)
    state.cache.settle()
    held = state.cache.lengths
    return [text[size:] if limit else [] for text, size, limit in zip(state.begun, held, wanted, strict=True)]


def _note(state: _State, wanted: Sequence[int], guesses: Sequence[Sequence[int]]) -> list[list[int]]:
    """Record what was fed, which is all but each row's last guess. Returns each row's guesses."""
    rows = [list(row[:limit]) for row, limit in zip(guesses, wanted, strict=True)]
    state.fed = [
        [*text, *row[:-1]] if limit else fed for fed, text, row, limit in zip(state.fed, state.begun, rows, wanted, strict=True)
    ]
    return rows


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(first, second)) if x != y), min(len(first), len(second)))


def build(parts: Parts) -> Drafter:
    return Pearl(parts.draft_model, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="a draft model writes on while the target checks: neither waits for the other",
    paper="Liu et al. 2024 (arXiv 2408.11850)",
    drafter=Pearl,
    build=build,
    needs_draft=True,
)
