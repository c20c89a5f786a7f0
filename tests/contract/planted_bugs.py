"""The check of a planted bug: the exact law must show it, and must find nothing in the correct twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def assert_caught(
    name: str, wrong: Sequence[float], right: float, *, table: list[str], documented: str, exact: float, biased: float
) -> None:
    """``wrong`` are distances of the bug from the target's law, ``right`` is the twin's largest one. The row of
    docs/lossless.md must have these numbers."""
    distances = torch.tensor(wrong)
    mean, largest = (f"{round(float(value), 4):.4g}" for value in (distances.mean(), distances.max()))
    measured = f"| {name} | {mean} | {largest} |"
    table.append(f"{measured} {right:.0e} |")
    assert right < exact
    assert distances.max() > biased
    assert measured in documented, (
        "docs/lossless.md has another number; run this file with -s, mend benchmarks/results and run scripts/tables.py"
    )
