"""What a drafter declares if its next round may be drafted before this one is judged (``drafters/beside.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol


class Rewinding(Protocol):
    """The part of a drafter that takes back a round that was drafted for a text which then took another turn."""

    waits: ClassVar[str] = "it reads what the target's pass computes"
    """Why its next round has to wait for the verdict. Empty if it need not. Then ``rewind`` works, and ``observe`` reads only
    the draft and the paths of an observation."""

    def rewind(self, state: Any, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` tokens of each row, between rounds. Modifies the state."""
        del state, lengths
        raise AssertionError(f"{type(self).__name__} waits for the verdict: {self.waits}")
