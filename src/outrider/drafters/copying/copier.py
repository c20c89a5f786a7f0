"""The base of all drafters that copy. They need only the committed tokens, and ignore everything else of a round.

Their guesses are chosen, not sampled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.tree import TokenTree, TreeRow


class Copier(Drafter):
    """Proposes from the committed tokens alone."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    draws = Draws.DETERMINISTIC
    waits: ClassVar = "copying takes no time that could be hidden"
    drafts_alone = True

    @abstractmethod
    def copied(self, state: Any, texts: Sequence[Sequence[int]], plan: Plan) -> list[TreeRow]:
        """A tree after each text, within the plan. May modify the state."""

    @final
    def propose(self, state: Any, context: Context, plan: Plan) -> Draft:
        return Draft(TokenTree.of_rows(self.copied(state, context.tokens, plan), context.device), self.draws)

    @final
    def observe(self, state: Any, observation: Observation) -> None:
        """Nothing to do: ``propose`` reads the committed tokens."""
