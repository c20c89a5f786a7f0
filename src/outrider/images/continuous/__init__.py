"""Images by continuous tokens: a token is the end of a diffusion path, and whole paths are speculated (CSpD)."""
