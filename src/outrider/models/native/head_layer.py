"""The decoder layer of heads as a native model of one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import Weights
from outrider.models.native.build import built_library
from outrider.models.native.decoder import NativeDecoder
from outrider.models.native.known import LANES, can_run

_PLAIN: dict[str, Any] = {
    **{"norm_kind": "rms", "activation": "silu", "gated": True, "parallel": False, "post_norms": False, "sinks": False},
    **{"attention_softcap": None, "final_softcap": None},
    **{"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
}
"""Features of the layers of heads, whatever their target has."""


def native_layer(layer: ModelConfig | None, weights: Weights | None) -> NativeDecoder | None:
    """The layer on a CPU; None if the native pass does not support it, or cannot run. Its tokens are those of the output
    matrix."""
    if weights is None or layer is None or layer.hidden_size % (2 * LANES) or layer.head_dim % LANES:
        return None
    config = replace(layer, vocab_size=len(weights.head), num_layers=1, windows=(None,), rope_of_layer=(0,), **_PLAIN)
    library = built_library() if can_run(config, weights.dtype, weights.embedding.device) else None
    return None if library is None else NativeDecoder(library, config, weights)
