"""Tensor parallelism: one model divided among processes, with the same interface as a whole one.

``load_parallel`` starts the followers and returns the leader's target. Heads, MLP columns and vocabulary rows are divided
(``share.py``), half layers end in a sum over ranks (``joint.py``, ``link.py``), and everything above a target stays as it is.
"""

from __future__ import annotations

from outrider.core.errors import OptionError, RankError
from outrider.models.load import device_of, lean_config
from outrider.models.parallel.rank import Opening
from outrider.models.parallel.target import ParallelTarget
from outrider.models.share import Share
from outrider.models.source import Source, local_path

__all__ = ["ParallelTarget", "RankError", "load_parallel"]


def load_parallel(
    source: Source,
    size: int,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_len: int | None = None,
    fast: bool = True,
    page_len: int = 0,
) -> ParallelTarget:
    """The model divided among ``size`` processes; the others as in ``load_model``."""
    if size < 2:
        raise OptionError(f"tensor_parallel = {size} is not valid; use 2 or more, or leave it out for one process")
    place, path = device_of(device), local_path(source)
    Share(0, size).check(lean_config(path))
    opening = Opening(str(path), size, dtype, place.type, max_len, fast, page_len)
    return ParallelTarget(opening)
