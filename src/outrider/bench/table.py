"""The table of a bench for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bench.settings import Skipped
from outrider.bench.stats import Estimate
from outrider.bench.summary import Line

_HEADINGS = (
    "tokens/s",
    "to plain",
    "95 %",
    "tok/pass",
    "accept.",
    "wasted",
    "draft",
    "verify",
    "walk",
    "host",
    "bandw.",
    "memory",
    "same text",
)
_WIDTHS = (10, 10, 14, 10, 9, 8, 7, 8, 6, 6, 8, 10, 11)


def table(lines: Sequence[Line], skipped: Sequence[Skipped]) -> str:
    """Every line, grouped by batch size and suite: plain decoding first, then the others by speed."""
    width = max([20, *(len(line.label) for line in lines)]) + 1
    blocks: list[str] = []
    for group in dict.fromkeys((line.batch_size, line.suite) for line in lines):
        members = [line for line in lines if (line.batch_size, line.suite) == group]
        ordered = sorted(members[1:], key=lambda line: -line.speedup.value)
        title = f"{group[1]}, batch {group[0]}" if group[0] > 1 else group[1]
        head = "".join(f"{text:>{size}}" for text, size in zip(_HEADINGS, _WIDTHS, strict=True))
        blocks.append("\n".join([f"{title[:width]:<{width}}{head}", *(_row(line, width) for line in [members[0], *ordered])]))
    if skipped:
        blocks.append("\n".join(["not measured:", *(f"  {skip.label}: {skip.reason}" for skip in skipped)]))
    return "\n\n".join(blocks)


def _row(line: Line, width: int) -> str:
    same = f"{line.identical:.0%}" if line.lossless else f"{line.identical:.0%} lossy"
    cells = [f"{line.speed.value:.1f}", f"{line.speedup.value:.2f}x", interval(line.speedup), *costs(line), same]
    return f"{line.label:<{width}}" + "".join(f"{text:>{size}}" for text, size in zip(cells, _WIDTHS, strict=True))


def costs(line: Line) -> list[str]:
    """Cells of a line that say what its rounds cost: tokens per pass, accepted and wasted guesses, time, bandwidth, memory."""
    return [
        f"{line.tokens_per_pass:.2f}",
        f"{line.acceptance:.1%}" if line.by_depth else "-",
        f"{line.waste:.0%}" if line.by_depth else "-",
        *(f"{line.split[part]:.0%}" for part in ("draft", "verify", "walk", "host")),
        f"{line.bandwidth_fraction:.0%}",
        size_text(line.memory),
    ]


def interval(value: Estimate, digits: int = 2) -> str:
    return f"{value.low:.{digits}f} - {value.high:.{digits}f}"


def size_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
