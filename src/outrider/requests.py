"""Prompts and sampling parameters of a call as the requests that the engine takes."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.codecs.text import TextCodec
from outrider.core.errors import RequestError
from outrider.core.params import SamplingParams, as_params
from outrider.core.prompts import Prompt, as_prompts
from outrider.core.request import Request


def token_ids_of(codec: TextCodec, prompt: Prompt) -> list[int]:
    """A prompt's tokens; one that is token ids already stays as it is."""
    return codec.encode(prompt) if isinstance(prompt, str) else list(prompt)


def requests_of(
    codec: TextCodec,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    streaming: bool,
    n: int,
) -> list[Request]:
    """``n`` requests for each prompt, in the order of the prompts. One set of parameters serves all prompts."""
    many, each = as_prompts(prompts), as_params(params)
    each = each * len(many) if params is None or isinstance(params, SamplingParams) else each
    if len(each) != len(many):
        raise RequestError(f"{len(many)} prompts came with {len(each)} sampling parameters; give one, or one per prompt")
    pairs = [(prompt, again) for prompt, one in zip(many, each, strict=True) for again in one.repeated(n)]
    return [_request(codec, prompt, one, streaming=streaming) for prompt, one in pairs]


def _request(codec: TextCodec, prompt: Prompt, params: SamplingParams, *, streaming: bool) -> Request:
    """A request that decodes its text as it goes only where somebody reads it: a stream, or a stop string."""
    ids = token_ids_of(codec, prompt)
    reads = codec.has_tokenizer and (streaming or bool(params.stop))
    stream = codec.new_stream(ids, skip_special_tokens=params.skip_special_tokens) if reads else None
    return Request(ids, params, codec.eos_ids, stream)
