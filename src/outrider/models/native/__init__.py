"""The CPU fast path: a decoder pass as one native call (``decoder.cpp``), beside its PyTorch twin (``models/decoder.py``)."""

from __future__ import annotations

from outrider.core.layered_target import LayeredTarget
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.models.native.build import BUILD, ready_to_measure
from outrider.models.native.decoder import NativeDecoder, can_run
from outrider.models.native.swap import SwappingDecoder
from outrider.models.weights import Weights

__all__ = ["BUILD", "NativeDecoder", "SwappingDecoder", "can_run", "fastest_decoder", "ready_to_measure"]


def fastest_decoder(config: ModelConfig, weights: Weights, bits: int = 16) -> LayeredTarget:
    """The native decoder where it can run: at once if it was built before, after the first request if it is being built."""
    if not can_run(config, weights.embedding.dtype, weights.embedding.device):
        return Decoder(config, weights, bits=bits)
    BUILD.start()
    if BUILD.library is not None:
        return NativeDecoder(BUILD.library, config, weights, bits)
    return SwappingDecoder(config, weights, bits) if BUILD.is_running else Decoder(config, weights, bits=bits)
