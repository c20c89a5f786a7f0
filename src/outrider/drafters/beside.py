"""Drafting beside verifying: while the target checks a round, a thread drafts the next one.

The thread predicts how the round ends: the first path of its tree is accepted whole, and the draft's own next token follows.
The drafter proposes what comes after this end. If the round does end so, the next tree is ready when the pass ends. If not, the
drafter rewinds to the true text and drafts after the pass, as without this thread (*in turns*).

    in turns:  draft + pass        beside:  max(pass, end + draft),  and draft more after an end that was not foreseen

Predicting the end changes *when* a tree is drawn, never which tree. A tree that is used follows the same text as in turns, with
the same random numbers and the same plan. So every rule keeps its law, and the same seed gives the same text. (The idea of
PEARL, Liu et al. 2024, arXiv 2408.11850, for any drafter that can rewind. ``pearl`` does something else after a wrong
prediction; see there.)
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState
from outrider.core.lasting_memory import LastingMemory
from outrider.core.scores import Scores
from outrider.core.side_thread import NotCapturedError, become_side_thread, side_stream
from outrider.drafters.expected_end import after, after_context, at_the_end, cut, first_path, merged


@dataclass(frozen=True, eq=False)
class _Ahead:
    """A round that was drafted ahead."""

    texts: Sequence[Sequence[int] | None]
    """The text that each row's tree follows; None where nothing was drafted."""
    plan: Plan
    draft: Draft

    def fits(self, row: int, tokens: Sequence[int], plan: Plan, *, exactly: bool) -> bool:
        """Whether drafting in turns would give this tree, or one that begins with it. With ``exactly``, only the same plan
        counts."""
        mine = (self.plan.max_depth[row], self.plan.max_nodes[row])
        return self.texts[row] == tokens and (not exactly or mine == (plan.max_depth[row], plan.max_nodes[row]))


@dataclass(frozen=True, eq=False)
class _Flight:
    """A round that is being drafted while another is verified."""

    work: Future[_Ahead]
    again: partial[_Ahead]
    """The same work, to be done by the main thread."""
    sizes: Sequence[int]
    """Tokens of each row when the round began."""
    paths: Sequence[Sequence[int]]
    """The nodes that are expected to be accepted, without the root."""


@final
@dataclass(eq=False)
class BesideState(RowState):
    """The drafter's own state, which has read the predicted text."""

    drafter: Drafter
    inner: Any
    held: list[int]
    """Number of each row's tokens that are certain, without the predicted ones."""
    flight: _Flight | None = None
    ahead: _Ahead | None = None
    late: bool = False
    """Whether some row's text is still being read piece by piece."""

    def settle(self) -> None:
        """Rewind to the true text and drop what was drafted ahead, so that rows can join and leave."""
        if self.ahead is not None:
            self.end_round(self.ahead.draft, [()] * len(self.held))
            self.drafter.rewind(self.inner, self.held)
            self.ahead = None

    def end_round(self, draft: Draft, paths: Sequence[Sequence[int]]) -> None:
        """Tell the drafter that nodes ``paths`` of its guesses are accepted, without the root."""
        whole = [[0, *path] for path in paths]
        nothing = Scores(torch.empty(0))
        self.drafter.observe(self.inner, Observation(draft, nothing, whole, [len(path) for path in paths], 0.0, 0.0))

    def fork(self, rows: Sequence[int]) -> BesideState:
        self.settle()
        return BesideState(self.drafter, self.inner.fork(rows), [self.held[row] for row in rows])

    def narrow(self, rows: Sequence[int]) -> BesideState:
        self.settle()
        return BesideState(self.drafter, self.inner.narrow(rows), [self.held[row] for row in rows])

    def join(self, other: BesideState) -> BesideState:
        self.settle()
        other.settle()
        return BesideState(self.drafter, self.inner.join(other.inner), [*self.held, *other.held])


class Beside(Drafter, ABC):
    """Another drafter, which drafts one round ahead of the target whenever possible."""

    offers: ClassVar = tuple(Draws)
    shape: ClassVar = Shape.CHAIN
    waits: ClassVar = "it drafts beside the target already"
    goes_on: ClassVar[bool] = False
    """After a wrong prediction: run a pass without guesses and predict again, instead of drafting in turns."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.draws = inner, inner.draws
        self._thread = ThreadPoolExecutor(1, "outrider-draft", initializer=become_side_thread)
        self._exactly = inner.draws is not Draws.DETERMINISTIC and inner.shape is Shape.TREE

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return self.inner.memories

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> BesideState:
        return BesideState(self.inner, self.inner.start(rows, taps), [0] * len(rows))

    def read_up(self, state: BesideState, context: Context, most: int) -> Sequence[int]:
        if state.ahead is not None and not state.late:  # every row was drafted for in the last round
            return ()
        state.settle()
        late = self.inner.read_up(state.inner, context, most)
        state.late = bool(late)
        return late

    def propose(self, state: BesideState, context: Context, plan: Plan) -> Draft:
        if state.late or not self._can_foresee(context, plan):
            state.settle()
            return self.inner.propose(state.inner, context, plan)
        ahead = state.ahead
        pairs = enumerate(context.tokens)
        fits = [ahead is not None and ahead.fits(row, tokens, plan, exactly=self._exactly) for row, tokens in pairs]
        if ahead is not None and all(fits):
            draft = cut(ahead.draft, plan)
            paths = [first_path(draft.tree, row) for row in range(len(fits))]
            state.end_round(draft, paths)
        else:
            draft, paths = self._in_turns(state, context, plan, fits)
        state.ahead = None
        self._take_off(state, context, plan, draft, paths)
        return draft

    def observe(self, state: BesideState, observation: Observation) -> None:
        flight, state.flight = state.flight, None
        if flight is None:
            state.settle()
            state.drafter.observe(state.inner, observation)
            return
        try:
            state.ahead = flight.work.result()
        except NotCapturedError:  # once for every shape of the draft's passes
            state.ahead = flight.again()
        accepted = [path[1:] for path in observation.paths]
        pairs = zip(flight.sizes, accepted, flight.paths, strict=True)
        state.held = [size + _num_shared(path, foreseen) for size, path, foreseen in pairs]

    def finish(self, state: BesideState, row: int, tokens: Sequence[int]) -> None:
        self.inner.finish(state.inner, row, tokens)

    def _can_foresee(self, context: Context, plan: Plan) -> bool:
        """Whether the round can be drafted ahead. Grammars and processors must run on one thread, and a stop rule must see its
        own round."""
        return context.sampler.tempering is not None and (plan.stop is None or self.draws is Draws.DETERMINISTIC)

    def _in_turns(
        self, state: BesideState, context: Context, plan: Plan, fits: Sequence[bool]
    ) -> tuple[Draft, list[Sequence[int]]]:
        """Draft for the rows whose end was predicted wrongly; the others keep their trees. Also returns the path that each row
        is expected to take. The drafter has seen that path."""
        texts, paths, kept = list(context.tokens), [()] * len(fits), None
        if state.ahead is not None:
            kept = cut(state.ahead.draft, plan)
            paths = [first_path(kept.tree, row) if fit else () for row, fit in enumerate(fits)]
            state.end_round(kept, paths)
            texts = [after(kept.tree, row, tokens, paths[row]) for row, tokens in enumerate(context.tokens)]
            held = [len(text) if fit else size for text, fit, size in zip(texts, fits, state.held, strict=True)]
            self.inner.rewind(state.inner, held)
        missed = plan.clipped([0 if fit or self.goes_on else depth for fit, depth in zip(fits, plan.max_depth, strict=True)])
        draft = context.without_guesses(self.draws)
        if any(missed.max_depth):
            draft = self.inner.propose(state.inner, replace(context, tokens=texts), missed)
            found = [() if fit else first_path(draft.tree, row) for row, fit in enumerate(fits)]
            state.end_round(draft, found)
            paths = [path or new for path, new in zip(paths, found, strict=True)]
        return draft if kept is None else merged(kept, draft, fits), list(paths)

    def _take_off(self, state: BesideState, context: Context, plan: Plan, draft: Draft, paths: Sequence[Sequence[int]]) -> None:
        """Start to draft, on the thread, what follows ``paths``."""
        texts = [after(draft.tree, row, tokens, paths[row]) for row, tokens in enumerate(context.tokens)]
        sizes = [len(tokens) for tokens in context.tokens]
        again = partial(self._again, state, context, texts, replace(plan, stop=None))
        device = context.device
        stream = side_stream(device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        work = self._thread.submit(self._foresee, state, context, texts, replace(plan, stop=None), stream)
        state.flight = _Flight(work, again, sizes, paths)

    def _foresee(
        self,
        state: BesideState,
        context: Context,
        texts: Sequence[Sequence[int]],
        plan: Plan,
        stream: torch.cuda.Stream | None = None,
    ) -> _Ahead:
        with torch.inference_mode(), torch.cuda.stream(stream):
            self.inner.rewind(state.inner, [len(text) - 1 for text in texts])  # the last one is read for what follows it
            one = plan.clipped([min(1, depth) for depth in plan.max_depth])
            one = Plan(one.max_depth, one.max_depth)
            end = self.inner.asked(state.inner, at_the_end(context, texts, self.draws), one)
            steps = [first_path(end.tree, row) for row in range(len(texts))]
            state.end_round(end, steps)
            whole = [after(end.tree, row, text, step) for row, (text, step) in enumerate(zip(texts, steps, strict=True))]
            plan = plan.clipped([depth if step else 0 for step, depth in zip(steps, plan.max_depth, strict=True)])
            draft = self.inner.asked(state.inner, after_context(context, whole), plan)
            return _Ahead([text if step else None for text, step in zip(whole, steps, strict=True)], plan, draft)

    def _again(self, state: BesideState, context: Context, texts: Sequence[Sequence[int]], plan: Plan) -> _Ahead:
        """Do the thread's work again from the beginning, because the thread could not finish it."""
        state.end_round(context.without_guesses(self.draws), [()] * len(texts))
        return self._foresee(state, context, texts, plan)


@final
class BesideChains(Beside):
    """Chains, one round ahead."""


@final
class BesideTrees(Beside):
    """Trees, one round ahead."""

    shape: ClassVar = Shape.TREE


def beside(name: str, drafter: Drafter) -> Drafter:
    """The drafter of method ``name`` beside the target. Refused if its next round has to wait for the verdict."""
    if drafter.waits:
        raise CompositionError(
            f"method {name!r} cannot draft beside the target: {drafter.waits}; leave 'beside' out, or use 'draft-model', "
            "'best-first' or another row with a draft model"
        )
    return (BesideTrees if drafter.shape is Shape.TREE else BesideChains)(drafter)


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(first, second)) if x != y), min(len(first), len(second)))
