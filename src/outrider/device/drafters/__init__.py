"""Drafters inside captured rounds, in the same folders as on the host."""
