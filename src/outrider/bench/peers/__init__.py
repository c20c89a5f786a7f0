"""Other engines, run in environments of their own, on the same weights, prompts and threads."""
