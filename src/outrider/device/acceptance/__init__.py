"""Acceptance rules inside captured rounds."""
