"""Texts that a warm-up reads, so that no request is the first to bring so many tokens at once.

Kernels are compiled when they first run, and which of them run depends on how many tokens are read together.
"""

from __future__ import annotations

from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.limits import HOPPER
from outrider.models.gpu.tiles import Kind, num_parts
from outrider.models.gpu.wide_tiles import telling_rows


def sizes_to_read(model: FastDecoder) -> list[int]:
    """Numbers of tokens whose passes together run every kernel that a pass over a text may run."""
    most = min(model.chunk_len, model.max_len - 1)
    sizes, layer = {1 << power for power in range(most.bit_length())}, model.weights.layers[0]
    if HOPPER:
        kinds = ((layer.qkv, Kind.WIDE), (layer.out, Kind.NARROW), (layer.gate_up, Kind.GATED), (layer.down, Kind.NARROW))
        for matrix, kind in kinds:
            halves = kind is Kind.GATED and model.config.gated
            outputs = matrix.shape[0] // 2 if halves else matrix.shape[0]
            sizes |= set(telling_rows(outputs, num_parts(kind), gated=halves, most=most))
    return sorted(sizes)
