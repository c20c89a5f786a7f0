"""Open a model's tokenizer by the same names its weights go by: a folder, a hub name or a GGUF file."""

from __future__ import annotations

from outrider.codecs.text import TextCodec
from outrider.models.gguf import chat_template, gguf_tokenizer, read_gguf, special_tokens, token_ids
from outrider.models.load import read_config
from outrider.models.source import local_path


def load_codec(name: str) -> TextCodec:
    path = local_path(name)
    if path.suffix != ".gguf":
        read_config(path)  # a folder that is no model says so, rather than that it lacks a tokenizer
        return TextCodec.from_folder(path)
    file = read_gguf(str(path))
    codec = TextCodec(gguf_tokenizer(file), settings=special_tokens(file), chat_template=chat_template(file))
    codec.add_eos(token_ids(file).get("eos_token_id"))
    return codec
