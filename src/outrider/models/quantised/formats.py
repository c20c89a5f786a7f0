"""Finds the format of a quantised checkpoint by the ``quant_method`` of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.core.errors import ModelError, nearest
from outrider.models.quantised import bitsandbytes
from outrider.models.quantised.awq import AWQ
from outrider.models.quantised.compressed import Compressed
from outrider.models.quantised.format import Format, Settings
from outrider.models.quantised.fp8 import FP8
from outrider.models.quantised.gptq import GPTQ
from outrider.models.quantised.mxfp4 import MXFP4

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "gptq": GPTQ.of,
    "awq": AWQ.of,
    "compressed-tensors": Compressed.of,
    "fp8": FP8.of,
    "fbgemm_fp8": FP8.of,
    "mxfp4": MXFP4.of,
    "bitsandbytes": bitsandbytes.of,
}


def format_of(raw: Mapping[str, Any]) -> Format | None:
    """The format that a config.json says; None where the checkpoint is not quantised."""
    settings = _settings(raw)
    if not settings:
        return None
    unknown = unknown_method(raw)
    if unknown is not None:
        raise ModelError(f"{unknown}; use a checkpoint in one of these")
    try:
        return FORMATS[method_of(raw)](settings)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        what = f"quantization_config of config.json cannot be read ({type(error).__name__}: {error})"
        raise ModelError(f"{what}; fetch the file again") from error


def unknown_method(raw: Mapping[str, Any]) -> str | None:
    """The name of a format that is not supported here, and the nearest one that is; None for supported formats."""
    method = method_of(raw)
    if not _settings(raw) or method in FORMATS:
        return None
    return f"the checkpoint is quantised as {method!r}, which is not supported; {nearest(method, FORMATS)}"


def method_of(raw: Mapping[str, Any]) -> str:
    """The ``quant_method`` of a config.json."""
    return str(_settings(raw).get("quant_method"))


def _settings(raw: Mapping[str, Any]) -> Settings:
    """The quantisation settings of a config.json; empty if the checkpoint is not quantised."""
    found = raw.get("quantization_config") or raw.get("compression_config") or {}
    return found if isinstance(found, Mapping) else {}
