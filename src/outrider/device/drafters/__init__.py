"""Drafters inside captured rounds, in the rooms that they have on the host."""
