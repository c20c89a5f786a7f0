"""How much useful work a server that learns does beside two that do not, with intervals (``learn_run.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_RESAMPLES = 2000


@dataclass
class Seen:
    """What a server told in the end, and of each block."""

    told: dict[str, Any]
    blocks: list[dict[str, Any]]

    @property
    def texts(self) -> list[str]:
        return [text for block in self.blocks for text in block["texts"]]

    def parts(self, begin: int, end: int | None) -> list[tuple[float, float]]:
        """Tokens and CPU seconds of the parts of some blocks."""
        return [(part[0], part[1]) for block in self.blocks[begin:end] for part in block["parts"]]


def _goodput(sums: Any) -> Any:
    """Tokens per CPU second, of [..., 2] sums of both."""
    return sums[..., 0] / sums[..., 1]


def quotient(one: Sequence[Seen], other: Sequence[Seen], begin: int, end: int | None) -> list[float]:
    """Goodput of some servers over that of others, and its interval. Parts are drawn again."""
    rng = np.random.default_rng(0)
    sides = [np.array([part for seen in side for part in seen.parts(begin, end)]) for side in (one, other)]
    middle = _goodput(sides[0].sum(0)) / _goodput(sides[1].sum(0))
    drawn = [_goodput(side[rng.integers(0, len(side), (_RESAMPLES, len(side)))].sum(1)) for side in sides]
    low, high = np.quantile(drawn[0] / drawn[1], (0.025, 0.975))
    return [round(float(value), 4) for value in (middle, low, high)]


def compared(off: Seen, again: Seen, on: Seen) -> dict[str, Any]:
    """What learning brought back and cost."""
    count, told = len(on.blocks), dict(on.told)
    lost = told["home"] - told["before"]
    told["recovered"] = (told["after"] - told["before"]) / lost if lost > 0 else None
    told["equal_texts"] = off.texts == on.texts == again.texts
    for name, one, other in ("goodput", [on], [off, again]), ("same", [again], [off]):
        told[name], *told[f"{name}_interval"] = quotient(one, other, 0, count)
        told[f"{name}_by_block"] = [quotient(one, other, i, i + 1)[0] for i in range(count)]
        told[f"{name}_intervals"] = [quotient(one, other, i, i + 1)[1:] for i in range(count)]
    told["beside_by_block"] = [block["beside"] for block in on.blocks]
    return {**told, "so_far": [quotient([on], [off, again], 0, i)[0] for i in range(1, count + 1)]}
