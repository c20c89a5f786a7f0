"""Copying drafters inside captured rounds."""
