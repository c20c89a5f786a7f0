"""Infilling: the prompt for text between two given texts, for models with the special tokens for it.

prefix-token  text before  suffix-token  text after  middle-token      (Bavarian et al. 2022, arXiv 2207.14255: the PSM order)
"""

from __future__ import annotations

from outrider.codecs.text import TextCodec
from outrider.core.errors import RequestError

_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


def infill_prompt(codec: TextCodec, before: str, after: str, *, limit: int) -> list[int]:
    """Prompt tokens after which the model writes the text between ``before`` and ``after``."""
    for names in _MARKERS:
        found = [codec.tokenizer.token_to_id(name) for name in names]
        ids = [token for token in found if token is not None]
        if len(ids) == len(names):
            texts = [codec.encode_within(text, limit, add_special_tokens=False) for text in (before, after)]
            return [ids[0], *texts[0], ids[1], *texts[1], ids[2]]
    raise RequestError("suffix needs a model that was made to fill gaps, and this one has no tokens for it; leave suffix out")
