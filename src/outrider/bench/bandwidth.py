"""Memory bandwidth of this machine, and the bytes that a target pass has to read.

Decoding one token reads every weight once, so a pass takes at least (bytes of weights) / (peak bandwidth). The share of the
peak that a pass reaches says how far an implementation is from that floor. The peak is measured, not looked up: the best of
several sums over a buffer much larger than the caches. A model that fits into a cache can exceed it; the same sum over a buffer
of the model's own size is measured too.

    fraction = weight bytes / seconds per pass / peak
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from outrider.core.interfaces import Target
from outrider.models.config import config_of
from outrider.models.gguf import hf_config, read_gguf
from outrider.models.info import describe_model
from outrider.models.load import read_config
from outrider.models.source import local_path

_BIG = 512 << 20
_SECONDS = 0.4
"""Seconds of measurement for each size."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second."""

    peak: float
    """Bytes per second when reading a buffer larger than the caches."""
    at_model_size: float
    """Bytes per second when reading a buffer as large as the weights, again and again."""
    weight_bytes: int
    """Fewest bytes that one target pass reads."""

    def fraction(self, pass_seconds: float) -> float:
        return self.weight_bytes / pass_seconds / self.peak if pass_seconds else 0.0

    def to_json(self) -> dict[str, float]:
        return {"peak": self.peak, "at_model_size": self.at_model_size, "weight_bytes": self.weight_bytes}


def measure_bandwidth(name: str, target: Target) -> Bandwidth:
    """Measure with the model called ``name``, loaded as ``target``."""
    size = weight_bytes(name, target)
    return Bandwidth(read_speed(_BIG, target.device), read_speed(max(size, 1 << 16), target.device), size)


def weight_bytes(name: str, target: Target) -> int:
    """Bytes that one pass must read: every parameter in the type it is kept in. An embedding that is not the head counts as one
    row."""
    info, path = describe_model(name), local_path(name)
    raw = hf_config(read_gguf(str(path))) if path.suffix == ".gguf" else read_config(path)
    config = config_of(raw)
    tied = config.tied_head if config else bool(raw.get("tie_word_embeddings", False))
    unread = 0 if tied else info.vocab_size * info.hidden_size
    return (info.num_parameters - unread) * target.dtype.itemsize


def read_speed(num_bytes: int, device: torch.device) -> float:
    """Best observed bytes per second of a sum over a buffer."""
    buffer = torch.ones(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    best, deadline = 0.0, time.perf_counter() + _SECONDS
    while time.perf_counter() < deadline:
        began = _clock(device)
        buffer.sum()
        best = max(best, buffer.numel() * 4 / (_clock(device) - began))
    return best


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
