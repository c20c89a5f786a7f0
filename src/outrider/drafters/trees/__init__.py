"""The tree kit: shapes, tries, candidates and the ways to grow a tree, shared by all drafters."""
