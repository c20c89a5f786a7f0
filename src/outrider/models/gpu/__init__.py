"""The fast path on a GPU: the ``Target`` interface with fused kernels and CUDA graphs. Its oracle is ``models/decoder.py``."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from outrider.core.errors import OptionError, nearest
from outrider.core.layered_target import LayeredTarget
from outrider.models.decoder_weights import Weights
from outrider.models.features import ModelConfig
from outrider.models.gpu.known import missing_features
from outrider.models.rank_sums import ALONE, Joint

NUMERICS = ("auto", "invariant", "fast")
"""Modes of arithmetic. With ``invariant``, the scores of a node do not depend on what shares its pass. With ``fast``, near ties
may fall differently. ``auto`` is invariant for matrices of 16 bits, where that costs little, and fast for fewer bits."""


def gpu_decoder(
    config: ModelConfig,
    weights: Weights,
    *,
    numerics: str = "auto",
    bits: int = 16,
    page_len: int = 0,
    joint: Joint = ALONE,
) -> LayeredTarget | None:
    """The fast decoder, if model, type and device allow it, with matrices rounded to ``bits``; otherwise None. With
    ``page_len`` 0 it chooses the tokens of a page itself. With a ``joint`` it is one rank's share."""
    check_numerics(numerics)
    if not can_run(config, weights.dtype, weights.embedding.device):
        return None
    from outrider.models.gpu.decoder import FastDecoder  # needs triton
    from outrider.models.gpu.pages import PAGE_LEN

    if numerics == "auto":
        numerics = "fast" if bits < 16 or weights.rows is not None else "invariant"
    return FastDecoder(config, weights, numerics=numerics, bits=bits, page_len=page_len or PAGE_LEN, joint=joint)


def check_numerics(numerics: str) -> None:
    """Refuse an unknown name."""
    if numerics not in NUMERICS:
        raise OptionError(f"numerics = {numerics!r} is not valid; {nearest(numerics, NUMERICS)}")


def can_run(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fast decoder supports this model, and the device can run its kernels."""
    return not missing_features(config) and dtype in (torch.bfloat16, torch.float16) and runs_kernels(device)


def runs_kernels(device: torch.device) -> bool:
    """Whether the device can run the kernels here, and triton is there to compile them."""
    there = device.type == "cuda" and torch.version.hip is None and importlib.util.find_spec("triton") is not None
    return there and (not torch.cuda.is_available() or (not _is_too_old(device) and not _why_triton_fails()))


def _is_too_old(device: torch.device) -> bool:
    """Whether the device is older than Ampere, which lacks bfloat16 arithmetic and asynchronous copies."""
    return torch.cuda.get_device_capability(device) < (8, 0)


@functools.cache
def _why_triton_fails() -> str:
    """The reason why triton cannot use the device, reported once in a warning; None if it works. Triton first compiles its own
    driver binding, so it needs a C compiler and the headers of Python."""
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    try:
        driver.active.get_current_device()
    except Exception as error:  # a compiler, a header, a driver: whatever is missing, PyTorch's own kernels are there
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(
            f"the GPU's kernels cannot be compiled here ({reason}); running PyTorch's kernels, several times slower. "
            "Install gcc and the headers of this Python (python3-dev), or set CC to a C compiler.",
            stacklevel=4,
        )
        return reason
    return ""
