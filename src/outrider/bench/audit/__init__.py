"""Is this method lossless on this model, here? Proofs where they are possible, tests with a stated error rate where not."""
