"""Outrider: language models generate faster without changing what they say."""
