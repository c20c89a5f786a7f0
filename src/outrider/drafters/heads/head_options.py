"""User options of trained heads: their folder, and how their trees grow."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import OptionError
from outrider.drafters.trees.options import BestFirstOptions, DraftTreeOptions
from outrider.drafters.trees.shape import TreeShape
from outrider.models.heads import Head

_BEST_FIRST = "best-first"
_CHAIN = "chain"
_SPINE = "spine"
_LONGEST_CHAIN = 64


@dataclass(frozen=True)
class HeadOptions:
    """The folder of the heads, and the options of their trees."""

    heads: str | Head | None = None
    """Folder of the trained heads, or the heads themselves. The bundled target has its own."""
    target_folder: str | None = None
    """The target's folder, for published heads that use the target's embedding, norm or output matrix."""
    branching: tuple[int, ...] | str | None = None
    """Number of children at each level ("4,2,2,1") for a static tree. The value "chain" grows one path, and "spine" a static
    tree around the likeliest path. The value "best-first" (the default) grows a tree that follows the heads' confidence."""
    width: int = 8
    """Best-first: nodes expanded per level."""
    num_children: int = 8
    """Best-first: candidates considered below each of them."""
    tau: float = 0.9
    """Best-first: assumed distance between the heads' logits and the target's."""
    perturb: bool = True
    """Rank candidates with the target's noise, as the coupled rule chooses. Turn off for rule ``delta``."""
    bits: int = 16
    """Bits of the heads' matrices. 8 and 4 save memory but take longer, since weights are unpacked for every product."""

    def __post_init__(self) -> None:
        if self.bits not in (16, 8, 4):
            raise OptionError(f"bits = {self.bits!r} is not valid; use 16, 8 or 4")
        assert self.search and self.shape.tree  # raises where they are not valid

    @property
    def search(self) -> BestFirstOptions:
        return BestFirstOptions(self.width, self.num_children, self.tau, self.perturb)

    @property
    def is_best_first(self) -> bool:
        return self.branching in (None, _BEST_FIRST)

    @property
    def shape(self) -> DraftTreeOptions:
        if self.branching == _CHAIN:
            return DraftTreeOptions(branching=(1,) * _LONGEST_CHAIN, perturb=self.perturb)
        if self.branching == _SPINE:
            return DraftTreeOptions(rank_paths=TreeShape.spine(8, 8, 4).paths, perturb=self.perturb)
        branching = (4, 3, 2, 1, 1) if self.branching is None or self.branching == _BEST_FIRST else self.branching
        return DraftTreeOptions(branching=branching, perturb=self.perturb)
