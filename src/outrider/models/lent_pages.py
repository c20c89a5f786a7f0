"""Pages of the first rank of a divided model. Followers get the page numbers before each pass and do not manage pages
themselves."""

from __future__ import annotations

from outrider.cache.paged import PagedCache
from outrider.models.rank_sums import ALONE, Joint


def lend(joint: Joint, cache: PagedCache, num_nodes: int, *, start: int = 0) -> None:
    """Tell the followers the pages of the next pass. Followers take none themselves, so enough are reserved now."""
    if joint is not ALONE:
        cache.reserve(num_nodes, start=start)
        joint.tell("lend", [list(row) for row in cache.pages], list(cache.lengths))
