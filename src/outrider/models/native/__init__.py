"""The fast path on a CPU: a decoder pass as one native call (``decoder.cpp``), beside its PyTorch twin
(``models/decoder.py``).
"""

from __future__ import annotations

import torch

from outrider.cache.page_pool import PAGE_LEN
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.models.native.build import BUILD, built_library, can_build, ready_to_measure
from outrider.models.native.compiler import cache_folder, processor
from outrider.models.native.decoder import NativeDecoder
from outrider.models.native.instruction_sets import has_bfloat16, isa_here
from outrider.models.native.known import can_run, multiplies_stored
from outrider.models.rank_sums import Joint
from outrider.models.weights import Weights

__all__ = [
    "BUILD",
    "NativeDecoder",
    "auto_types",
    "cache_folder",
    "can_build",
    "can_run",
    "fastest_decoder",
    "floats_kept",
    "isa_here",
    "native_decoder",
    "processor",
    "ready_to_measure",
]


def auto_types() -> frozenset[torch.dtype]:
    """Types that ``dtype="auto"`` keeps on this CPU for a checkpoint stored in them. Other types are widened to float32."""
    if can_build():
        return isa_here().auto_types
    return frozenset({torch.float32, torch.bfloat16} if has_bfloat16() else {torch.float32})


def floats_kept() -> frozenset[str]:
    """Float types of GGUF matrices that are fastest on this CPU when kept as stored."""
    isa = isa_here() if can_build() else None
    if isa is None:
        return frozenset()
    return frozenset({"F16", "BF16"} if isa.reads_halves else {"F16"} if isa.adds_halves else ())


def fastest_decoder(
    config: ModelConfig, weights: Weights, bits: int = 16, *, joint: Joint | None = None, page_len: int = 0
) -> Decoder | NativeDecoder:
    """The native decoder if it can run, otherwise PyTorch's. A model keeps the same decoder all its life."""
    native = native_decoder(config, weights, bits, joint=joint, page_len=page_len)
    return native or Decoder(config, weights, page_len, bits=bits, joint=joint)


def native_decoder(
    config: ModelConfig, weights: Weights, bits: int = 16, *, joint: Joint | None = None, page_len: int = 0
) -> NativeDecoder | None:
    """The native decoder; None if it cannot run. With ``page_len`` 0 it chooses the tokens of a page itself."""
    is_known = can_run(config, weights.dtype, weights.embedding.device) and (weights.file is None or multiplies_stored(config))
    library = built_library() if is_known else None
    return (
        None if library is None else NativeDecoder(library, config, weights, bits, joint=joint, page_len=page_len or PAGE_LEN)
    )
