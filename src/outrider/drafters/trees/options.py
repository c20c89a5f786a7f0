"""Options of the two ways to grow a tree: of a fixed shape, and best-first."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import OptionError
from outrider.drafters.trees.shape import RankPath, TreeShape


@dataclass(frozen=True)
class DraftTreeOptions:
    """The shape. The policy's ``num_draft_tokens`` (depth) and ``num_tree_nodes`` can only cut it."""

    branching: tuple[int, ...] | str = (4, 2, 2, 1, 1)
    """Number of children at each level; "4,2,2,1,1" on the command line."""
    rank_paths: tuple[RankPath, ...] | None = None
    """Any other shape, as rank paths such as ((0,), (1,), (0, 0)). Overrides ``branching``."""

    perturb: bool = True
    """Rank candidates with the target's noise, as the coupled rule chooses. Turn off for rule ``delta``."""

    @property
    def tree(self) -> TreeShape:
        if self.rank_paths is not None:
            return TreeShape.of_paths(self.rank_paths)
        return TreeShape.of_branching(_widths(self.branching))

    def __post_init__(self) -> None:
        assert self.tree  # raises where it is not a tree


def _widths(branching: tuple[int, ...] | str) -> tuple[int, ...]:
    if not isinstance(branching, str):
        return branching
    try:
        return tuple(int(width) for width in branching.split(","))
    except ValueError:
        raise OptionError(f"branching = {branching!r} is not valid; write whole numbers with commas between them") from None


@dataclass(frozen=True)
class BestFirstOptions:
    """Width of the search. The policy sets the size of the tree (``num_draft_tokens`` deep, ``num_tree_nodes``)."""

    width: int = 4
    """Nodes expanded per level, in one pass of the draft model."""
    num_children: int = 4
    """Candidates considered below each of them."""
    tau: float = 0.9
    """Assumed distance between the draft's and the target's logits; smaller means more confident. Only the shape depends
    on it."""
    perturb: bool = True
    """Rank candidates with the target's noise, as the coupled rule chooses. Turn off for rule ``delta``."""

    def __post_init__(self) -> None:
        for name in ("width", "num_children"):
            value = vars(self)[name]
            if not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least 1")
        if not self.tau > 0:
            raise OptionError(f"tau = {self.tau!r} is not valid; use a number above 0 (1 takes the draft's word)")
