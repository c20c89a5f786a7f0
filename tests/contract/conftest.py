"""Fixtures that several contract tests share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import prepared  # noqa: F401 (before anything of the package is imported)
import pytest
import torch
from tiny_pair import tiny_model

from outrider.acceptance import transport
from outrider.core.interfaces import Target


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers: more threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of the table of planted bugs, printed at the end of the module: run with -s to copy them to docs/lossless.md."""
    rows = ["", "| bug | mean TV | max TV | correct twin, max TV |", "|---|---|---|---|"]
    yield rows
    print("\n".join(rows))


@pytest.fixture
def remembered_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enumeration meets the same laws in many branches: the plan of a coupling is made once for each."""
    make, moves, known = transport._Plan.of, transport._moves_row, dict[tuple[bytes, bytes, float], transport._Plan]()

    def of(p: torch.Tensor, q: torch.Tensor, count: torch.Tensor) -> transport._Plan:
        if p.dim() > 1:
            return make(p, q, count)
        key = p.numpy().tobytes(), q.numpy().tobytes(), float(count)
        if key not in known:
            known[key] = make(p, q, count)
        return known[key]

    monkeypatch.setattr(transport._Plan, "of", staticmethod(of))
    monkeypatch.setattr(transport, "_moves_row", cache(moves))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Target:
    return tiny_model(0.15)
