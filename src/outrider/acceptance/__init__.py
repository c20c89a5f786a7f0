"""Acceptance rules: each walks a scored tree and decides which guesses become text. One file, one rule.

The proofs enumerate every rule's output law exactly, and show that known mistakes are found. They are in
``tests/contract/test_rules_*.py``; the mathematics is in ``docs/lossless.md``.
"""

from __future__ import annotations

from outrider.acceptance.block import Block
from outrider.acceptance.coupled import Coupled
from outrider.acceptance.delta import Delta
from outrider.acceptance.kseq import KSeq
from outrider.acceptance.recursive import Recursive
from outrider.acceptance.rejection import Rejection
from outrider.acceptance.transport import Transport
from outrider.acceptance.traversal import Traversal

__all__ = ["Block", "Coupled", "Delta", "KSeq", "Recursive", "Rejection", "Transport", "Traversal"]
