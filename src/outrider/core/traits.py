"""What is true of a target, in one frozen value: a wrapper takes the inner one's and replaces what it changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetTraits:
    """Properties of a model, beside its sizes, that others must know to run it."""

    is_invariant: bool = False
    """A node's scores are the same bits whatever shares its pass: speculative text is then plain text, in every format."""
    says_all: bool = True
    """It can say every token. A draft with a reduced vocabulary cannot, and so cannot be verified against."""
    can_be_captured: bool = False
    """Its passes can be part of a round that is captured as one graph (``core/device_round.py``)."""
    reads_whole: bool = False
    """A prompt must be prefilled in one piece."""
    pads: bool = True
    """A pass costs as if every row were as wide as its widest one."""
    has_own_threads: bool = False
    """Its passes run on threads of its own, so PyTorch's threads should not spin beside them."""
    can_read_out: bool = True
    """``logits`` turns states of the last layer into scores; some models have more behind it than a norm and a head."""
    why_together: str = ""
    """Why its layers cannot be run apart, for messages; empty where there is nothing to add."""
