"""Text that grammars force, drafted by nobody: where a row's grammar knows what must follow, that is the row's draft.

The drafter is not asked for such a row, and is shown a root without guesses there. So what it keeps stays as it is in rounds
that do not draft, and the next one reads the text. Drafters that read the target's states are shown all nodes: they note
those that were committed, whoever guessed them. The text is forced and its tokens are not, since it may be split in other
ways. So they are guesses, chosen ones, which every rule tests like others. Where a model splits the text in other ways most of
the time, the drafter is asked again.
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
_PATIENCE = 4
"""Tokens that may fail before those that held must be as many."""
_WAYS = (Draws.DETERMINISTIC, Draws.IID)
"""Ways of drawing that a chosen guess goes with: as one of a law that holds nothing else, where there are laws."""


class Forced(NamedTuple):
    """What grammars force in a round: tokens of each row, none where there is a choice."""

    runs: list[tuple[int, ...]]

    @staticmethod
    def of(states: Sequence[RequestState], room: Sequence[int], draws: Draws) -> Forced:
        """At most ``room`` tokens of each row."""
        known = draws in _WAYS
        return Forced([_run_of(state, min(most, _LONGEST)) if known else () for state, most in zip(states, room, strict=True)])

    def __bool__(self) -> bool:
        return any(self.runs)

    @property
    def plan(self) -> Plan | None:
        """The plan of a round in which no other row may guess; None where there are others."""
        nothing = (0,) * len(self.runs)
        reason = Reason(ReasonCode.FORCED, {"length": max(map(len, self.runs))})
        return Plan(nothing, nothing, reason=reason) if all(self.runs) else None

    def without(self, plan: Plan) -> Plan:
        """The plan, in which these rows are not drafted for."""
        return (
            plan.clipped([0 if run else depth for run, depth in zip(self.runs, plan.max_depth, strict=True)]) if self else plan
        )

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
    """The tokens that must follow, at most so many; none where a failure of the grammar is for ``emit`` to find."""
    grammar, (tested, held) = state.params.grammar, state.forced
    if grammar is None or most <= 0 or state.grammar_state is None or tested > 2 * held + _PATIENCE:
        return ()
    try:
        return tuple(grammar.forced(state.grammar_state)[:most])
    except Exception:
        return ()
