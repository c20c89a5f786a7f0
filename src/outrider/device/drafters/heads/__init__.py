"""Trained heads inside captured rounds."""
