"""Byte-level models: the codec, characters of several tokens, and drafting between bytes and words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_translation import byte_level

from outrider.codecs.byte_level import byte_settings, byte_tokenizer
from outrider.codecs.text import TextCodec
from outrider.codecs.translation import TextTranslation
from outrider.codecs.unfinished import num_missing, num_settled
from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.tiny import TableModel

TEXT = "naïve café · 你好 😀 und Übermut größer als 世界, doch nirgends zweimal. "


def codec_of(**settings) -> TextCodec:
    complete = byte_settings(settings)
    assert complete is not None
    return TextCodec(byte_tokenizer(complete), settings=complete)


BYT5 = codec_of(tokenizer_class="ByT5Tokenizer")
PLAIN = codec_of(tokenizer_class="ByteTokenizer", special_tokens=["<end>"], eos_token="<end>")
WORDS = byte_level(330, TEXT)


def test_ids_are_those_of_byt5() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.ByT5Tokenizer()
    for text in (TEXT, "", "plain", "\x00\n\t"):
        assert BYT5.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    assert BYT5.eos_ids == {theirs.eos_token_id}


def test_specials_past_the_bytes_and_bad_settings() -> None:
    assert PLAIN.encode("a<end>") == [97, 256] and PLAIN.eos_ids == {256}
    assert codec_of(tokenizer_class="ByteTokenizer", byte_offset=2).encode("a") == [99]
    assert byte_settings({"tokenizer_class": "LlamaTokenizer"}) is None
    with pytest.raises(ModelError, match=r"byte_offset = -1.*id of byte 0"):
        codec_of(tokenizer_class="ByteTokenizer", byte_offset=-1)


def test_a_folder_says_that_its_tokens_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    codec = TextCodec.from_folder(tmp_path)
    assert codec.decode(codec.encode(TEXT)) == TEXT and codec.eos_ids == {1}


def test_every_cut_of_a_text_streams_whole_characters() -> None:
    ids = PLAIN.encode(TEXT)
    for cut in range(0, len(ids), 3):
        settled = num_settled(ids[:cut], [bytes([b]) for b in range(256)])
        stream = PLAIN.new_stream(ids[:settled])()
        pieces = [stream.push(token) for token in ids[settled:]]
        assert "".join(pieces) == PLAIN.decode(ids[settled:], prompt_ids=ids[:settled])
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize(
    ("data", "missing"), [(b"a", 0), ("é".encode()[:1], 1), ("你".encode()[:1], 2), ("😀".encode()[:2], 2), (b"\xff", 0)]
)
def test_bytes_a_character_still_needs(data: bytes, missing: int) -> None:
    assert num_missing(b"x" + data) == missing
    assert num_missing(b"\x80") is None and num_missing(b"\x80" * 4) == 0


# --- drafting ---------------------------------------------------------------------------------------------------------


def reciter(codec: TextCodec, text: str, certainty: float) -> Target:
    """A model that goes on with ``text`` after what it can find of it, in its own tokens."""
    ids, size = codec.encode(text * 9, add_special_tokens=False), codec.vocab_size

    def law(context: Sequence[int]) -> torch.Tensor:
        found = next((i for i in range(len(ids)) if list(context[-9:]) == ids[max(0, i - 9) : i]), 0)
        spread = torch.full((size,), (1 - certainty) / size, dtype=torch.float64)
        spread[ids[found]] += certainty
        return spread

    return TableModel(law)


def serve(target: Target, method: Method, codec: TextCodec, params: SamplingParams, prompt: str) -> RequestState:
    ids = codec.encode(prompt)
    request = Request(ids, params, codec.eos_ids, codec.new_stream(ids))
    return [step.state for step in run(Engine(target, method), [request], max_batch_size=1)][-1]


PAIRS = {"words for bytes": (PLAIN, WORDS), "bytes for words": (WORDS, PLAIN), "bytes for bytes": (PLAIN, BYT5)}


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=70), SamplingParams(max_tokens=60, temperature=1.0, seed=5)])
@pytest.mark.parametrize("name", ["reencode", "tli"])
@pytest.mark.parametrize("pair", PAIRS)
def test_drafts_across_bytes_are_exact(pair: str, name: str, params: SamplingParams) -> None:
    mine, other = PAIRS[pair]
    target, draft = reciter(mine, TEXT, 0.97), reciter(other, TEXT, 0.9)
    method = compose(name, target, draft=draft, translation=TextTranslation(mine, other), options={"num_draft_tokens": 6})
    plain = serve(target, compose("plain", target), mine, params, "naïve")
    state = serve(target, method, mine, params, "naïve")
    assert state.output_ids == plain.output_ids and state.text == plain.text
    if name == "reencode" and not params.temperature:
        assert state.stats.tokens_per_pass > 2, "the draft knows the text, inside characters too"


@pytest.mark.parametrize("stop", ["好", " 😀", "é ·"])
@pytest.mark.parametrize("name", ["plain", "reencode", "suffix"])
def test_stop_strings_inside_characters(name: str, stop: str) -> None:
    """The last byte of the stop string ends the text, also inside an accepted run."""
    target, draft = reciter(PLAIN, TEXT, 1.0), reciter(WORDS, TEXT, 1.0)
    translation = TextTranslation(PLAIN, WORDS) if name == "reencode" else None
    method = compose(name, target, draft=draft, translation=translation)
    state = serve(target, method, PLAIN, SamplingParams(max_tokens=90, stop=[stop]), "naïve")
    assert state.text == TEXT[len("naïve") : TEXT.index(stop)]
    assert PLAIN.decode(state.output_ids) == state.text + stop


def test_invalid_bytes_neither_stop_drafting_nor_change_the_text() -> None:
    """A random byte model writes what no decoder reads."""
    from outrider.models.random_decoder import tiny_config, tiny_decoder

    target, draft = (tiny_decoder(tiny_config(vocab_size=size), sharpness=6.0) for size in (257, 300))
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    small = byte_level(300, "ab")
    method = compose("reencode", target, draft=draft, translation=TextTranslation(PLAIN, small))
    plain = serve(target, compose("plain", target), PLAIN, params, "naïve")
    state = serve(target, method, PLAIN, params, "naïve")
    assert state.output_ids == plain.output_ids and state.stats.num_drafted > 0


def test_grammars_of_characters() -> None:
    pytest.importorskip("llguidance")
    from outrider.codecs.grammar import GrammarCompiler

    grammar = GrammarCompiler(PLAIN).regex("(café|你好|naïve)( 😀)+")
    target = TableModel(torch.full((257, 257), 1 / 257, dtype=torch.float64))
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, grammar=grammar)
    for name in ("plain", "suffix"):
        state = serve(target, compose(name, target), PLAIN, params, "Say ")
        text = PLAIN.decode(state.output_ids)
        assert text.startswith(("café 😀", "你好 😀", "naïve 😀")) and not text.replace(" 😀", "").strip("cafénïv你好e")


def test_a_byte_model_end_to_end(tmp_path: Path) -> None:
    """From a folder: prompts, streams, seeds and drafts of the bundled model, which has words."""
    transformers = pytest.importorskip("transformers")
    from outrider.api import LLM
    from outrider.bundled import bundled_path

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=384, eos_token_id=1, max_position_embeddings=128, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    llm = LLM(str(tmp_path), method="reencode", draft=bundled_path("draft"))
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=4)
    plain = llm.generate("Once upon é", params, method="plain")[0]
    drafted = llm.generate("Once upon é", params)[0]
    assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
    assert "".join(chunk.text for chunk in llm.stream("Once upon é", params)) == plain.text
    assert len(plain.prompt_token_ids) == len("Once upon é".encode())
