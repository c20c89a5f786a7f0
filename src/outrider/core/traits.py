"""Properties of a target in one frozen value. A wrapper copies the inner target's and replaces what it changes."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.device_round import PairedRows


@dataclass(frozen=True)
class TargetTraits:
    """Properties of a model, beside its sizes, that others must know to run it."""

    is_invariant: bool = False
    """Whether a node's scores are the same bits whatever shares its pass. Speculative text then equals plain text in
    every format."""
    says_all: bool = True
    """Whether it can produce every token. A draft with a reduced vocabulary cannot, so it cannot be a target."""
    can_be_captured: bool = False
    """Whether its passes can be part of a captured round (``core/device_round.py``)."""
    captured_pairs: PairedRows | None = None
    """How two rows of ``captured_as`` are one of this target's in captured rounds; None if each row stands for itself."""
    reads_whole: bool = False
    """Whether a prompt must be prefilled in one piece."""
    pads: bool = True
    """Whether a pass costs as if every row were as wide as the widest one."""
    has_own_threads: bool = False
    """Whether its passes run on threads of its own. PyTorch's threads should then not spin beside them."""
    can_read_out: bool = True
    """Whether ``logits`` turns states of the last layer into logits. Some models have more after it than a norm and a
    head."""
    kv_cache: str = "auto"
    """How keys and values are stored, if not in the model's own type: "fp8" and "int8" change its scores a little
    (``core/key_storage.py``)."""
    why_together: str = ""
    """Why its layers cannot be run apart, for messages; empty if there is nothing to add."""
