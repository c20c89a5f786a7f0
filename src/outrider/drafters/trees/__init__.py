"""The tree kit: shapes, tries, candidates and the ways a tree grows, shared by all rooms."""
