"""Choices measured on the device at hand: tiles of products and cuts of attention, kept in a file per device.

What measured best on an H200 is built in (``tiles.py``, ``cut_for``). ``benchmarks/gpu_probe.py --save`` measures the same
candidates on this device and saves the best. The decoder uses these, and the built-in ones for everything else. Choices change
the speed, not the results: the number of parts of a sum is never among them, and invariant numerics ignore them.

    $OUTRIDER_CACHE, or ~/.cache/outrider, /gpu/<device>.json
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


def tuned_path() -> Path:
    """The file of this device."""
    home = Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return home / "gpu" / f"{''.join(c if c.isalnum() else '-' for c in name.lower())}.json"


@lru_cache
def choices() -> Mapping[str, Mapping[str, Any]]:
    """Choices measured on this device; empty if there are none, or if the file cannot be read."""
    try:
        return json.loads(tuned_path().read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def save(found: Mapping[str, Mapping[str, Any]]) -> Path:
    """Save choices beside those saved earlier."""
    path = tuned_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**choices(), **found}, indent=1))
    choices.cache_clear()
    return path


def tile_key(kind: str, num_rows: int, num_outputs: int, *, bits: int) -> str:
    sizes = (8, 16, 32, 64) if bits < 16 else (16, 32, 64)
    rows = next((size for size in sizes if num_rows <= size), 64)
    return f"product/{kind}/{rows}/{num_outputs}/{bits}"


def cut_key(batch_size: int, num_queries: int, *, num_kv_heads: int, capacity: int) -> str:
    """Sizes rounded to the nearest power of two."""
    sizes = [round(math.log2(size)) for size in (batch_size, num_queries, num_kv_heads, capacity)]
    return "attention/" + "/".join(map(str, sizes))
