"""The target layers that heads read, and how other engines number them. Only this file converts between the two.

Here a tap i is the residual stream *entering* layer i, and i = L the last layer's output. The engine vLLM counts the same way.
SGLang, and DFlash's plain format, count layer *outputs*, so that our i is their i - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def default_taps(num_taps: int, num_layers: int) -> tuple[int, ...]:
    """The last layer's output, or three layers (low, middle, high), as in other engines."""
    if num_taps == 1:
        return (num_layers,)
    low, middle, high = min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)
    return (low, middle, high) if low < middle < high else (0, num_layers // 2, num_layers)


def as_outputs(taps: Sequence[int]) -> list[int]:
    """Our taps, counted by layer outputs; -1 is the embedding."""
    return [tap - 1 for tap in taps]


def from_outputs(layers: Sequence[int]) -> list[int]:
    """Layer outputs as our taps."""
    return [layer + 1 for layer in layers]


def both_spellings(taps: Sequence[int]) -> dict[str, Any]:
    """Keys of an EAGLE ``config.json`` that name the layers in both ways of counting, one for each engine."""
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": as_outputs(taps)}
    return {"eagle_aux_hidden_state_layer_ids": list(taps), "eagle_config": nested, "num_aux_hidden_states": len(taps)}
