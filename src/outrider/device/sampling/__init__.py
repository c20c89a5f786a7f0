"""The stages of the sampler inside captured rounds."""
