"""Turns the prompts and sampling parameters of a call into requests for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.codecs.text import TextCodec
from outrider.core.errors import RequestError
from outrider.core.params import SamplingParams, as_params
from outrider.core.prompts import ImagePrompt, Message, Prompt, ReadPrompt, as_prompts
from outrider.core.request import Request
from outrider.vision.messages import blind, parted
from outrider.vision.prompts import EmbeddedPrompt, Vision


@dataclass(frozen=True, eq=False)
class PromptReader:
    """Reads the prompts of one model."""

    codec: TextCodec
    vision: Vision | None
    """None for a model of text."""
    name: str
    """The model's name, for error messages."""

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """A conversation in the format of the chat template, with the images in it."""
        said, images = self.parted(messages)
        ids = self.codec.encode_chat(self.written(said))
        return {"prompt": ids, "images": images} if images else ids

    def parted(self, messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
        """Messages with bare image parts, and the images; a model of text refuses those."""
        said, images = parted(messages)
        if images and self.vision is None:
            raise blind(self.name)
        return said, images

    def written(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as the model's chat template takes them."""
        return messages if self.vision is None else self.vision.written(messages, self.codec.chat_template)

    def text(self, prompt: ReadPrompt, what: str) -> list[int]:
        """The tokens of a prompt. ``what`` names, in the error, a call that reads no images."""
        if isinstance(prompt, ImagePrompt):
            raise RequestError(f"{what} reads text only; use generate for a prompt with images")
        return token_ids_of(self.codec, prompt)

    def seen(self, prompt: ReadPrompt) -> EmbeddedPrompt:
        """A prompt's tokens, and the ids that the target reads instead if the prompt has images."""
        if not isinstance(prompt, ImagePrompt):
            return EmbeddedPrompt(token_ids_of(self.codec, prompt), [], ())
        if self.vision is None:
            raise blind(self.name)
        return self.vision.prompt(token_ids_of(self.codec, prompt.prompt), prompt.images)


def token_ids_of(codec: TextCodec, prompt: str | Sequence[int]) -> list[int]:
    """A prompt's tokens; one that is token ids already stays as it is."""
    return codec.encode(prompt) if isinstance(prompt, str) else list(prompt)


def requests_of(
    reading: PromptReader,
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
    return [_request(reading, prompt, one, streaming=streaming) for prompt, one in pairs]


def _request(reading: PromptReader, prompt: ReadPrompt, params: SamplingParams, *, streaming: bool) -> Request:
    """A request. Its text is decoded while it grows only if a stream or a stop string needs it."""
    codec, seen = reading.codec, reading.seen(prompt)
    reads = codec.has_tokenizer and (streaming or bool(params.stop))
    stream = codec.new_stream(seen.ids, skip_special_tokens=params.skip_special_tokens) if reads else None
    return Request(seen.ids, params, codec.eos_ids, stream, seen.read_ids, seen.runs)
