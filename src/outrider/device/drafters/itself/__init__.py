"""Drafting with the target itself inside captured rounds."""
