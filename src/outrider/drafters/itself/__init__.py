"""Guesses from the target itself: its own scores, its first layers, or the target without some sublayers."""
