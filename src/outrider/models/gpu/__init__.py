"""The fast path on a GPU: the same Target, with fused kernels and graphs. Its oracle is ``models.decoder``."""
