"""The engine: the five verbs of a round, and the loop that repeats them. It knows interfaces, never methods."""
