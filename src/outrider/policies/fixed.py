"""Fixed draft length: every round asks for the same number of guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from outrider.core.device_round import CapturedShape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Observation, Plan, Policy, Stateless
from outrider.core.reason import Reason, ReasonCode


@dataclass(frozen=True)
class FixedOptions:
    """The draft length, and the size of a tree."""

    num_draft_tokens: int = 4
    """Guesses along one path, K."""
    num_tree_nodes: int | None = None
    """Guesses in all, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        if self.num_tree_nodes is not None and (not isinstance(self.num_tree_nodes, int) or self.num_tree_nodes < 1):
            raise OptionError(f"num_tree_nodes = {self.num_tree_nodes!r} is not valid; use a whole number of at least 1")
        if not isinstance(self.num_draft_tokens, int) or self.num_draft_tokens < 1:
            raise OptionError(
                f"num_draft_tokens = {self.num_draft_tokens!r} is not valid; use a whole number of at least 1, "
                "or method 'plain' to draft nothing"
            )


@final
class Fixed(Policy):
    """Plans K guesses along one path, always."""

    def __init__(self, options: FixedOptions | None = None) -> None:
        self.options = options or FixedOptions()
        self._reason = Reason(ReasonCode.GIVEN, {"length": self.options.num_draft_tokens})

    def start(self, num_rows: int) -> Stateless:
        del num_rows
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        del state
        lengths = (self.options.num_draft_tokens,) * num_rows
        nodes = self.options.num_tree_nodes
        return Plan(lengths, lengths if nodes is None else (nodes,) * num_rows, reason=self._reason)

    def captured_shape(self) -> CapturedShape:
        options = self.options
        return CapturedShape({options.num_draft_tokens: options.num_tree_nodes or options.num_draft_tokens})

    def update(self, state: Stateless, observation: Observation) -> None:
        del state, observation
