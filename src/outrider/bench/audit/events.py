"""Events that a gambler bets on: sets of tokens whose probability under the claimed law is known.

A wrong rule or drafter errs in recognisable directions. It favours what the draft favours, likely tokens (a wrong temperature)
or copies, or it avoids what was proposed before (a lost duplicate). Each event is a set of tokens, determined by the text
before. Two arbitrary sets can reveal other kinds of error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EMITTED = ("likeliest", "likelier half", "draft favours", "repeats a pair", "set 1", "set 2")
GUESSED = ("likeliest", "likelier half", "target favours", "an elder sibling", "set 1", "set 2")

Event = tuple[bool, float]


def event(law: Tensor, token: int, members: Tensor) -> Event:
    """Whether the token is among ``members`` [V], and the probability of that."""
    return bool(members[token]), min(max(float(law[members].sum()), 0.0), 1.0)


def law_events(law: Tensor, token: int) -> dict[str, Event]:
    """Events that follow from the law alone."""
    order = law.argsort(descending=True)
    half = int((law[order].cumsum(0) < 0.5).sum()) + 1
    found = {
        "likeliest": (token == int(order[0]), min(float(law[order[0]]), 1.0)),
        "likelier half": event(law, token, _members(law, order[:half])),
    }
    for number in (1, 2):
        found[f"set {number}"] = event(law, token, _arbitrary(len(law), number))
    return found


def _members(law: Tensor, tokens: Tensor) -> Tensor:
    return torch.zeros_like(law, dtype=torch.bool).index_fill(0, tokens, True)


def _arbitrary(vocab_size: int, number: int) -> Tensor:
    """An arbitrary half of all tokens, chosen by a hash of their number."""
    tokens = torch.arange(vocab_size, dtype=torch.int64)
    return ((tokens * (2654435761 + 40503 * number) >> 7) & 1).bool()


def repeated_pair(context: Sequence[int]) -> int | None:
    """The token that followed the last two tokens at their previous occurrence."""
    if len(context) < 3:
        return None
    pair = (context[-2], context[-1])
    for at in range(len(context) - 3, -1, -1):
        if (context[at], context[at + 1]) == pair:
            return context[at + 2]
    return None
