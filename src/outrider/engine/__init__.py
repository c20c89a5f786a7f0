"""The engine: the five steps of a round, and the loop that repeats them. It knows interfaces, never methods."""
