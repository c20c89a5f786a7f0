"""The nouns and the five interfaces. Depends on torch alone."""
