"""Options of a tuning run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TuneConfig:
    """How many settings, prompts and seconds a tuning run uses."""

    methods: Sequence[str] = ()
    """Names in the method table; none means every lossless method."""
    max_tokens: int = 64
    temperature: float = 0.0
    batch_size: int = 1
    num_probe_prompts: int = 4
    num_finalists: int = 5
    num_rounds: int = 9
    seconds: float | None = None
    """Seconds for all races together, approximately."""
