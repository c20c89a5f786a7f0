"""Names of the formats in which heads and draft models can be exported."""

from __future__ import annotations

FORMATS = ("vllm", "sglang", "speculators", "deepspec", "apple")
"""Folders of heads for other engines."""
GGUF = "gguf"
"""Draft models, and heads that llama.cpp runs."""
