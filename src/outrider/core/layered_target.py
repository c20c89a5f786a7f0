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
    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        """[B, N - start, H] states of nodes ``start``.. after the sublayers on ``route``; ``logits`` turns them into
        guesses.

        Reads the committed keys and values. Writes the nodes' keys and values in the layers whose attention it runs.
        As with ``score``, nodes before ``start`` were run by earlier calls, on the same route. ``begun`` holds the
        states of nodes ``start``.. after the layers below ``begun.layer``; the pass continues from there. What it
        writes is scratch: the next ``score`` overwrites it or continues from it (see ``Resume``).
        """
