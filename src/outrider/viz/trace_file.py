"""Trace files: one round per line, in JSON, with the words of tokens if they were known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.core.errors import OptionError
from outrider.core.request import Origin

_RECORD = "record one with `outrider chat --save-trace`, which writes a round per line"
_LISTS = ("tokens", "parents", "path", "emitted", "origins")
_NUMBERS = ("draft_seconds", "seconds")

WordsOf = Callable[[int], str]
"""Text of one token."""


def read_trace(path: Path, *, request: int | None = None, words_of: WordsOf | None = None) -> list[dict[str, Any]]:
    """Rounds of one request, the first in the file if none is named, with words for every token."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise OptionError(f"trace {path} cannot be read ({error}); check the path") from None
    rounds = [_round(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rounds:
        raise OptionError(f"trace {path} holds no rounds; {_RECORD}")
    wanted = rounds[0].get("request") if request is None else request
    chosen = [seen for seen in rounds if seen.get("request") == wanted]
    if not chosen:
        known = sorted({str(seen.get("request")) for seen in rounds})
        raise OptionError(f"trace {path} has no request {wanted}; use one of {', '.join(known)}")
    return [with_words(seen, words_of or (lambda token: f"[{token}]")) for seen in chosen]


def with_words(seen: dict[str, Any], words_of: WordsOf) -> dict[str, Any]:
    """A round with the words of its tree and of its output. Words that it already has are kept."""
    words = [words_of(token) for token in seen["tokens"]]
    pieces = [{"text": words_of(t), "origin": o} for t, o in zip(seen["emitted"], seen["origins"], strict=True)]
    return {"words": words, "pieces": pieces, **seen}


def _round(line: str, where: str) -> dict[str, Any]:
    try:
        seen = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where} is not JSON ({error}); {_RECORD}") from None
    if not isinstance(seen, dict) or not all(isinstance(seen.get(name), list) for name in _LISTS):
        raise OptionError(f"{where} is not a round, which has the lists {', '.join(_LISTS)}; {_RECORD}")
    if not all(isinstance(seen.get(name), int | float) for name in _NUMBERS):
        raise OptionError(f"{where} is not a round, which has the numbers {', '.join(_NUMBERS)}; {_RECORD}")
    size = len(seen["tokens"])
    in_order = _is_tree(seen["parents"], size) and all(isinstance(node, int) and 0 < node < size for node in seen["path"])
    known = {origin.value for origin in Origin}
    if not in_order or len(seen["origins"]) != len(seen["emitted"]) or not known.issuperset(seen["origins"]):
        raise OptionError(f"{where} is not a round, since its tree or its origins do not fit together; {_RECORD}")
    return seen


def _is_tree(parents: Sequence[Any], size: int) -> bool:
    """Whether the root comes first, and every other node after its parent."""
    return (
        len(parents) == size > 0
        and all(isinstance(p, int) and p < n for n, p in enumerate(parents))
        and min(parents[1:], default=0) >= 0
    )
