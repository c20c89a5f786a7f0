"""Text to tokens and back: against transformers' tokenizers, streamed and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bundled import bundled_path
from outrider.codecs.text import TextCodec
from outrider.core.errors import ModelError, RequestError

TEXTS = ["Once upon a time, there was", "été 😀 naïve 日本語", "  two  spaces\n\ttab", "x = 12345 + 67", "", "<|user|> hi"]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_folder(Path(bundled_path("target")))


@pytest.mark.parametrize("text", TEXTS[:-2])
def test_round_trip_and_stream(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    for cut in range(len(ids)):
        stream = codec.new_stream(ids[:cut])()
        streamed = "".join(stream.push(token) for token in ids[cut:])
        whole = codec.decode(ids[cut:], prompt_ids=ids[:cut])
        assert streamed == whole or "\ufffd" in codec.decode(ids[:cut])  # a prompt cut inside a character


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(codec: TextCodec, text: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(bundled_path("target"))
    if text:
        assert codec.encode(text) == theirs(text).input_ids
    messages = [{"role": "user", "content": text}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert codec.encode_chat(messages) == theirs(rendered, add_special_tokens=False).input_ids


def test_sentencepiece_spaces(stories15m: Path) -> None:
    """The first token of a continuation keeps its space, and BOS is added once."""
    codec = TextCodec.from_folder(stories15m)
    ids = codec.encode("Once upon a time there was")
    assert ids[0] == 1 and ids.count(1) == 1
    assert codec.decode(ids[4:], prompt_ids=ids[:4]) == " time there was"


def test_an_empty_prompt_is_the_beginning_of_a_text(codec: TextCodec) -> None:
    assert codec.encode("") == [0]


def test_errors(tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{,")
    with pytest.raises(ModelError, match="JSON"):
        TextCodec.from_folder(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec(codec.tokenizer).encode_chat([{"role": "user", "content": "x"}])
    assert json.dumps(codec.settings)
