"""Step-level routing (LOSSY): a draft writes whole steps, and a router decides which of them the target writes again."""
