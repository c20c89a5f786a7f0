"""Images as tokens: codebooks of patches, guided image models, pictures of how an image was made."""
