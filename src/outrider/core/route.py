"""A route through part of a model: which attention and MLP sublayers a pass runs.

A residual network still predicts well with some sublayers left out, so a target can draft for itself. Leaving *early*
takes all sublayers of the first E layers and nothing after them; *skipping* leaves out single ones.

    x <- x + attention_l(x)  where attention[l],        x <- x + mlp_l(x)  where mlp[l],        l = 0 .. L - 1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.errors import OptionError


@dataclass(frozen=True)
class Route:
    """Sublayers that are taken, layer by layer."""

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise OptionError(
                f"a route names {len(self.attention)} attention and {len(self.mlp)} MLP sublayers; name one of each per layer"
            )

    @staticmethod
    def first(num_taken: int, num_layers: int) -> Route:
        """The first ``num_taken`` layers of a model of ``num_layers``."""
        taken = tuple(layer < num_taken for layer in range(num_layers))
        return Route(taken, taken)

    @staticmethod
    def without(num_layers: int, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Route:
        """All layers but the named attention and MLP sublayers."""
        skipped = (frozenset(attention), frozenset(mlp))
        unknown = sorted(layer for layer in skipped[0] | skipped[1] if not 0 <= layer < num_layers)
        if unknown:
            raise OptionError(f"layer {unknown[0]} cannot be skipped; use layers of the model, 0 to {num_layers - 1}")
        taken = [tuple(layer not in part for layer in range(num_layers)) for part in skipped]
        return Route(*taken)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def depth(self) -> int:
        """Layers up to the last one that does anything."""
        taken = [layer for layer in range(self.num_layers) if self.attention[layer] or self.mlp[layer]]
        return taken[-1] + 1 if taken else 0

    @property
    def is_first(self) -> bool:
        """Whether the route is the first layers, whole, and nothing else. Its states are then the model's own."""
        return self == Route.first(self.depth, self.num_layers)

    @property
    def share(self) -> float:
        """Share of the model's sublayers that run."""
        return (sum(self.attention) + sum(self.mlp)) / (2 * self.num_layers)
