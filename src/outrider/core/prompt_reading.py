"""What a round reads of prompts beside the rows that decode."""

from __future__ import annotations

from typing import NamedTuple


class Prompts(NamedTuple):
    """The prompt tokens that a round reads in the same pass."""

    num_tokens: int = 0
    num_places: int = 0
    """Prompt tokens that the pass has room for, used or not."""
    is_full: bool = False
    """Whether more prompt tokens wait than the round can read."""


NO_PROMPTS = Prompts()
