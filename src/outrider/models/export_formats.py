"""The names of what heads and draft models can be written as."""

from __future__ import annotations

FORMATS = ("vllm", "sglang", "speculators", "deepspec", "apple")
"""Folders of heads for other engines."""
GGUF = "gguf"
"""Draft models, and heads that llama.cpp runs."""
