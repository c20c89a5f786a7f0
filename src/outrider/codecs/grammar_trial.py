"""Tries a grammar before it is used: compiles it and follows it for a few tokens. The file is also a program that can be
killed.

The cost of a grammar cannot be seen from its text. So a server first tries it in a separate process, with limits on memory and
processor time, and kills that process when nobody waits any more. This file imports only the matcher, so the process is small.
It is run by its path, reads one JSON object per line (the tokenizer first, then grammars) and answers each with one.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_STEPS = 12
"""Tokens for which a trial follows a grammar."""


def complaint(matcher: LLMatcher) -> str:
    """Why a grammar cannot be used; empty if it can. The matcher is unchanged."""
    walker = matcher.deep_copy()
    for _ in range(_NUM_STEPS):
        if walker.is_error():
            return walker.get_error()
        if walker.is_stopped():
            return ""
        mask = walker.compute_bitmask()
        if walker.is_error():
            return walker.get_error()
        token = _last_allowed(mask)
        if token is None:
            return "no text can satisfy it"
        if not walker.consume_token(token):
            return walker.get_error()
    return ""


def _last_allowed(mask: bytes) -> int | None:
    """The allowed token with the largest id, because longer tokens come late in most vocabularies."""
    number = int.from_bytes(mask, "little").bit_length()
    return number - 1 if number else None


def compiled(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, source, log_level=0)


def tried(tokenizer: LLTokenizer, source: str) -> dict[str, Any]:
    """The result of trying a grammar: an error or none, and its cost."""
    began, before = time.perf_counter(), _peak_bytes()
    matcher = compiled(tokenizer, source)
    error = matcher.get_error() if matcher.is_error() else complaint(matcher)
    return {"error": error, "seconds": time.perf_counter() - began, "bytes": max(0, _peak_bytes() - before)}


def _peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _limit_memory(num_bytes: int) -> None:
    """Limit memory to this many bytes beyond what is mapped already."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, ValueError, OSError):  # a system without this limit: the deadline remains
        return


def _limit_time(seconds: float) -> None:
    """End the process after this much more processor time; 0 is no limit. A busy machine does not shorten it."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    from llguidance import LLTokenizer

    first = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(first["tokenizer"], eos_token=first["end_ids"])
    _limit_memory(first["max_bytes"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        _limit_time(asked["seconds"])
        print(json.dumps(tried(tokenizer, asked["source"])), flush=True)
        _limit_time(0)


if __name__ == "__main__":
    main()
