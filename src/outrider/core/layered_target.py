"""Targets whose layers can be run apart, so that part of the target can draft for the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.tree import TokenTree


class LayeredTarget(Target, ABC):
    """A target whose layers can be run apart, so that part of it can draft for the whole."""

    @abstractmethod
    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, resume: Resume | None = None) -> Tensor:
        """[B, N - start, H] nodes ``start``.. after the sublayers that ``route`` takes; ``logits`` turns it into guesses.

        Reads the committed keys and values, and writes those of the nodes in the layers whose attention it takes. As with
        ``score``, nodes before ``start`` were run by earlier calls, on the same route. What it writes is scratch: the next
        ``score`` writes over it, or (see ``Resume``) goes on from it.

        ``resume`` is of nodes ``start``..: what the first layers of ``route`` made of them in an earlier call, so that only
        the others need to run. The states are the same without it."""
