"""Other engines in environments of their own, with the same weights, prompts and threads."""
