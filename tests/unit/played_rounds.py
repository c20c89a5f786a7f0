"""Captured rounds without a GPU: a graph is the list of its steps, and a replay runs them again under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.engine import notes, round_graph


class _Unpinned:
    """PyTorch, whose memory is never pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        del pin_memory
        return torch.zeros(*sizes, **options)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 0.0 if other is self else 1.0


def _played(steps: Sequence[Callable[[], None]], pool: Any) -> Any:
    del pool

    def replay() -> None:
        with torch.inference_mode():
            for step in steps:
                step()

    return SimpleNamespace(replay=replay)


def play_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU rounds are captured as ever."""
    if DEVICE.type == "cuda":
        return
    for module in (round_graph, notes):
        monkeypatch.setattr(module, "torch", _Unpinned())
    monkeypatch.setattr(round_graph, "_captured", _played)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
