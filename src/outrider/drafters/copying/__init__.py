"""Guesses copied from text: the request's own, earlier outputs, documents, or a corpus on disk."""
