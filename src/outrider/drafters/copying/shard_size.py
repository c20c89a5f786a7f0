"""How much of a corpus is sorted at once."""

from __future__ import annotations

SHARD_TOKENS = 1 << 25
"""Tokens per shard; sorting takes about 40 bytes of memory for each."""
