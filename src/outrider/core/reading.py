"""What a round reads of prompts beside the rows that decode."""

from __future__ import annotations

from typing import NamedTuple


class Prompts(NamedTuple):
    """What a round reads of prompts, in the same pass."""

    num_tokens: int = 0
    num_places: int = 0
    """Places of the pass that are there for them, filled or not."""
    is_full: bool = False
    """More prompt tokens wait than the round can read."""


NO_PROMPTS = Prompts()
