"""The target drafts for itself inside captured rounds."""
