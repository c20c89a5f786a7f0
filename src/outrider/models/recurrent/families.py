"""The families of recurrent models by their ``model_type``. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ModelError
from outrider.models.recurrent import bamba, falcon_h1, mamba2, qwen3_next
from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.family import RecurrentFamily

FAMILIES: dict[str, RecurrentFamily] = {
    "mamba2": mamba2.FAMILY,
    "bamba": bamba.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
}


def recurrent_config(raw: Mapping[str, Any]) -> RecurrentConfig | None:
    """The description of a checkpoint with recurrent layers; None if it has none, or needs something that is not here."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None or raw.get("quantization_config"):
        return None
    try:
        return family.describe(raw)
    except ModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"config.json cannot be read ({type(error).__name__}: {error}); fetch the file again") from error
