"""Codecs: requests to tokens and tokens to what people read. One file per modality."""
