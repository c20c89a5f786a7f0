"""Draft models inside captured rounds."""
