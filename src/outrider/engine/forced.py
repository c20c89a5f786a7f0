"""Text that a grammar forces, as the draft of a row: no drafter needs to guess what must follow.

The text is forced but its tokens are not, since a model may split it in other ways. So these tokens are guesses that every rule
tests like others. While nearly all of them are accepted, the drafter is not asked for the row. If more fail, the drafter is
asked, and forced text is used only where it has no guess.

For such a row the drafter sees a root without guesses. So its caches stay as in a round that does not draft, and its next round
reads the text. Drafters that read the target's states see all nodes, because they need the states of the committed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Drafter, Observation
from outrider.core.plan import Plan
from outrider.core.reason import Reason, ReasonCode
from outrider.core.request import RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree

_LONGEST = 16
"""Most forced tokens of a row in a round."""
_SURE = 0.8
"""The drafter is not asked if at least this share of the tested tokens was accepted. One failure is not counted."""
_LIKELY = 0.3
"""Forced text replaces missing guesses if at least this share was accepted. Four failures are not counted."""
_WAYS = (Draws.DETERMINISTIC, Draws.IID)
"""Ways of drawing that allow chosen guesses. Where a draft has laws, a chosen guess gets a law with all probability on it."""


class Forced(NamedTuple):
    """The tokens that grammars force in a round, for each row; none if there is a choice."""

    runs: list[tuple[int, ...]]
    sure: list[bool]
    """Rows for which the drafter is not asked."""

    @staticmethod
    def of(states: Sequence[RequestState], room: Sequence[int], draws: Draws) -> Forced:
        """At most ``room`` tokens of each row."""
        known = draws in _WAYS
        runs = [_run_of(state, min(most, _LONGEST)) if known else () for state, most in zip(states, room, strict=True)]
        return Forced(runs, [bool(run) and _holds(state, _SURE, 1) for state, run in zip(states, runs, strict=True)])

    def __bool__(self) -> bool:
        return any(self.runs)

    @property
    def plan(self) -> Plan | None:
        """The plan of a round in which the drafter is asked for no row; None if it is asked for one."""
        nothing = (0,) * len(self.runs)
        reason = Reason(ReasonCode.FORCED, {"length": max(map(len, self.runs))})
        return Plan(nothing, nothing, reason=reason) if all(self.sure) else None

    def without(self, plan: Plan) -> Plan:
        """The plan, in which rows are not drafted for if the drafter is not asked."""
        if not any(self.sure):
            return plan
        return plan.clipped([0 if sure else depth for sure, depth in zip(self.sure, plan.max_depth, strict=True)])

    def beside(self, draft: Draft) -> Forced:
        """The forced text of the rows for which the drafter was not asked, or has no guess."""
        return self._replace(runs=[run if size == 1 else () for run, size in zip(self.runs, draft.tree.sizes, strict=True)])

    def put_into(self, draft: Draft, vocab_size: int) -> Draft:
        """The draft with forced text for its rows. What the drafter ran of the target was not run for them."""
        if not self:
            return draft
        tokens, parents = draft.tree.tokens.tolist(), draft.tree.parents.tolist()
        rows = [
            (tokens[row][:size], parents[row][:size]) if not run else ([tokens[row][0], *run], list(range(-1, len(run))))
            for row, (run, size) in enumerate(zip(self.runs, draft.tree.sizes, strict=True))
        ]
        tree = TokenTree.of_rows(rows, draft.tree.tokens.device)
        if draft.draws is Draws.DETERMINISTIC:
            return Draft(tree, draft.draws)
        none = torch.zeros(tree.batch_size, 1, vocab_size, device=tree.tokens.device)
        return Draft(tree, draft.draws, self._laws(none if draft.q is None else draft.q, tree))

    def _laws(self, q: Tensor, tree: TokenTree) -> Tensor:
        """Laws [B, N, ..., V] that hold nothing but the forced guesses, beside those of the other rows."""
        laws = q.new_zeros(q.shape[0], tree.num_nodes, *q.shape[2:])
        laws[:, : q.shape[1]] = q
        for row, run in enumerate(self.runs):
            for node, token in enumerate(run):
                laws[row, node] = 0.0
                laws[row, node, ..., token] = 1.0
        return laws

    def remember(self, states: Sequence[RequestState], seen: Observation) -> None:
        """Remember how many of these tokens held."""
        for state, run, passed in zip(states, self.runs, seen.num_accepted, strict=True):
            if run:
                tested, held = state.forced
                state.forced = tested + min(passed + 1, len(run)), held + passed

    def seen_by(self, drafter: Drafter, own: Draft, seen: Observation) -> Observation:
        """The round as the drafter sees it, whose own draft was ``own``."""
        return seen if not self or drafter.taps else self.apart(own, seen)

    def apart(self, own: Draft, seen: Observation) -> Observation:
        """The round as if nothing had been guessed for these rows."""
        if not self:
            return seen
        paths = [[0] if run else path for run, path in zip(self.runs, seen.paths, strict=True)]
        count, scores = own.tree.num_nodes, seen.scores
        shown = Scores(lambda: scores.logits[:, :count], {tap: states[:, :count] for tap, states in scores.taps.items()})
        return replace(seen, draft=own, scores=shown, paths=paths, num_accepted=[len(path) - 1 for path in paths])


def _run_of(state: RequestState, most: int) -> tuple[int, ...]:
    """The tokens that must follow, at most so many. None if the grammar fails; ``emit`` then finds the failure."""
    grammar = state.params.grammar
    if grammar is None or most <= 0 or state.grammar_state is None or not _holds(state, _LIKELY, 4):
        return ()
    try:
        return tuple(grammar.forced(state.grammar_state)[:most])
    except Exception:
        return ()


def _holds(state: RequestState, share: float, failures: int) -> bool:
    """Whether so large a share of the tested tokens was accepted, not counting a few ``failures``."""
    tested, held = state.forced
    return held >= share * (tested - failures)
