"""Guesses from a draft model: chains and trees, and draft models with another tokenizer."""
