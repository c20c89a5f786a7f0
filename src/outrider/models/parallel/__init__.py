"""One model divided among processes, with the same interface as a whole one.

``load_parallel`` divides a target by heads, MLP columns and vocabulary rows (``share.py``). Attention and MLP each end in a sum
over ranks (``rank_sums.py``, ``link.py``). ``load_layers_apart`` divides a draft by layers, which run at once (``fuzzy.py``).
Both start the followers and return the leader's target, and everything above a target stays as it is.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Unpack

import torch

from outrider.core.errors import OptionError, RankError
from outrider.models.decoder_choice import Running
from outrider.models.dtypes import STORED
from outrider.models.features import ModelConfig
from outrider.models.layer_share import LayerShare
from outrider.models.load import device_of, lean_config
from outrider.models.parallel.rank import ByHeads, ByLayers
from outrider.models.parallel.target import ParallelTarget
from outrider.models.parallel.units import kept_by_auto, units_of
from outrider.models.share import Share
from outrider.models.source import Source, local_path

__all__ = ["ParallelTarget", "RankError", "load_layers_apart", "load_parallel"]


def load_parallel(
    source: Source,
    size: int,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_len: int | None = None,
    **running: Unpack[Running],
) -> ParallelTarget:
    """The model divided among ``size`` processes; the others as in ``load_model``."""
    if size < 2:
        raise OptionError(f"tensor_parallel = {size} is not valid; use 2 or more, or leave it out for one process")
    place, path = device_of(device), local_path(source)
    config = lean_config(path)
    Share(0, size).check(config)
    fast, page_len, numerics = running.get("fast", True), running.get("page_len", 0), running.get("numerics", "auto")
    if dtype in (None, "auto") and fast and kept_by_auto(path, place):
        dtype = _stored_or_auto(path, config, size, place)
    unit = units_of(path, config, size, dtype, place, fast=fast).columns
    return ParallelTarget(ByHeads(str(path), size, dtype, place.type, max_len, fast, page_len, numerics, unit))


def _stored_or_auto(path: Path, config: ModelConfig, size: int, place: torch.device) -> str:
    """The type of a quantised checkpoint for which none was asked: as it is stored, if every rank can have whole groups."""
    try:
        units_of(path, config, size, STORED, place, fast=True)
    except OptionError as error:
        warnings.warn(f"{path} is dequantised, since it cannot be divided as it is stored: {error}", stacklevel=4)
        return "auto"
    return STORED


def load_layers_apart(name: str, size: int, *, dtype: str | None, device: str | None, fast: bool = True) -> ParallelTarget:
    """A draft whose layers are spread over ``size`` processes and run at once, ``size`` of them; the others as in
    ``load_model``."""
    if size < 2:
        raise OptionError(f"draft_parallel = {size} is not valid; use 2 or more, or leave it out for one process")
    place, path = device_of(device), local_path(Source(name))
    LayerShare(Share(0, size)).check(lean_config(path))
    return ParallelTarget(ByLayers(str(path), size, dtype, place.type, None, fast, 0))
