"""Two tokenizers: what is shared, how a text goes from one to the other, and drafting across them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from test_methods import PROMPTS, SAMPLED, serve, tokens
from tiny_pair import VOCAB, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toy_codecs import letter_codec, pair_codec, toy_translation

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.codecs.load import load_codec
from outrider.codecs.pieces import token_bytes
from outrider.codecs.text import TextCodec
from outrider.codecs.translation import TextTranslation
from outrider.core.errors import CompositionError, ModelError
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.scores import Scores
from outrider.core.translation import Translation
from outrider.core.tree import TokenTree
from outrider.methods import compose

TEXT = (
    "Once upon a time there was a girl named Lily. She loved to play outside with her red ball. One day the ball rolled "
    "down the hill, and a friendly dog brought it back. “Thank you!” said Lily; café, naïve, 你好. "
)
SMOLLM2 = Path(os.environ.get("OUTRIDER_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
"""Where the second real tokenizer is, if it is."""


def byte_level(size: int, text: str = TEXT) -> TextCodec:
    """A trained byte-level vocabulary with an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return TextCodec(tokenizer, settings={"eos_token": "<end>"})


def sentence_piece() -> TextCodec:
    """A vocabulary that writes spaces as U+2581, has lone bytes, and begins every text with <s>."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set(TEXT.replace(" ", "")))]
    vocab = {piece: token for token, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", letter) for letter in "OoatwSbdLshr"] + [("▁t", "h"), ("▁th", "e")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextCodec(tokenizer, settings={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})


KINDS = {"byte level": byte_level(400), "small byte level": byte_level(300, TEXT[:60]), "sentence piece": sentence_piece()}
PAIRS = [(a, b) for a in KINDS for b in KINDS]


def read(translation: Translation, ids: list[int]) -> list[int] | None:
    found = translation.to_draft(ids)
    return None if found is None else found.ids


def test_bytes_of_tokens() -> None:
    for name, codec in KINDS.items():
        pieces = token_bytes(codec.tokenizer)
        ids = codec.encode(TEXT, add_special_tokens=False)
        text = b"".join(pieces[token] or b"" for token in ids).decode()
        assert text.removeprefix(" ") == TEXT, name
        assert all(pieces[token] is None for token in codec.eos_ids)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_is_read_as_the_drafts_tokenizer_cuts_it(target: str, draft: str) -> None:
    mine, other = KINDS[target], KINDS[draft]
    translation = TextTranslation(mine, other)
    ids = mine.encode(TEXT)
    assert read(translation, ids) == other.encode(TEXT)
    ended = read(translation, [*ids, *sorted(mine.eos_ids)])
    assert ended == [*other.encode(TEXT), *sorted(other.eos_ids)]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_growing_text_is_read_as_if_it_were_new(target: str, draft: str) -> None:
    mine, other = KINDS[target], KINDS[draft]
    translation, ids, known, steps = TextTranslation(mine, other), mine.encode(TEXT), None, 0
    for end in range(1, len(ids) + 1, 2):
        found = translation.to_draft(ids[:end], known)
        assert (None if found is None else found.ids) == read(translation, ids[:end])
        steps += found is not None
        known = found or known
    assert steps > len(ids) // 4


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_continuation_is_cut_as_the_targets_tokenizer_does(target: str, draft: str) -> None:
    mine, other = KINDS[target], KINDS[draft]
    translation = TextTranslation(mine, other)
    words = TEXT.split(" ")
    for size in range(3, 20, 4):
        before, after = " ".join(words[:size]), " " + " ".join(words[size : size + 3])
        ids, context = mine.encode(before), other.encode(before)
        drafted = other.encode(before + after)[len(context) :]
        assert other.encode(before + after)[: len(context)] == context
        found = translation.to_target(ids, context, drafted)
        assert [*ids, *found] == mine.encode(before + after)
        ended = translation.to_target(ids, context, [*drafted, *sorted(other.eos_ids), drafted[0]])
        assert ended == [*found, *sorted(mine.eos_ids)], "nothing follows the end"


def test_inside_a_character_the_text_before_it_is_read() -> None:
    codec, draft = KINDS["small byte level"], KINDS["byte level"]
    translation = TextTranslation(codec, draft)
    ids = codec.encode("a 你", add_special_tokens=False)
    assert read(translation, ids) == draft.encode("a 你")
    for size in (3, 4):
        assert read(translation, ids[:size]) == draft.encode("a ")
        assert translation.to_target(ids[:size], draft.encode("a "), draft.encode("你!")) == [*ids[size:], *codec.encode("!")]
        assert translation.to_target(ids[:size], draft.encode("a "), draft.encode("x你")) == [], "other bytes were said"


def test_a_continuation_inside_a_token_is_joined_or_dropped() -> None:
    """The target stopped inside a word: what follows is used if it reads the same, whatever its tokenizer prefers."""
    target, draft = KINDS["byte level"], KINDS["small byte level"]
    translation = TextTranslation(target, draft)
    ids = [*target.encode("Once upon a ti"), *target.encode("m")]
    context = draft.encode("Once upon a tim")
    drafted = draft.encode("e there", add_special_tokens=False)
    found = translation.to_target(ids, context, drafted)
    assert target.decode(found, prompt_ids=ids) == "e there"


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_have_the_same_bytes(target: str, draft: str) -> None:
    mine, other = KINDS[target], KINDS[draft]
    shared = TextTranslation(mine, other).shared().tolist()
    pieces, others = token_bytes(mine.tokenizer), token_bytes(other.tokenizer)
    for token, found in enumerate(shared):
        if others[token] is not None and found >= 0:
            assert pieces[found] == others[token]
        if found < 0 and others[token] is not None:
            assert others[token] not in pieces
    assert [shared[token] for token in other.eos_ids] == sorted(mine.eos_ids)
    if target == draft:
        assert sum(found >= 0 for found in shared) >= len(shared) - 1


# --- drafting ---------------------------------------------------------------------------------------------------------


class Renamed(Target):
    """A model whose tokens go by other ids: what a draft of the same quality with another vocabulary is."""

    def __init__(self, inner: Target, ids: torch.Tensor) -> None:
        """``ids[new]`` is the inner model's token."""
        self.inner, self.ids = inner, ids
        self.vocab_size, self.max_len, self.num_layers = len(ids), inner.max_len, inner.num_layers
        self.device, self.dtype = inner.device, inner.dtype

    def new_cache(self, batch_size: int):
        return self.inner.new_cache(batch_size)

    def prefill(self, rows, cache, *, taps=()):
        return self.inner.prefill([[int(self.ids[token]) for token in row] for row in rows], cache, taps=taps)

    def score(self, tree: TokenTree, cache, *, taps=(), start=0, resume=None) -> Scores:
        assert resume is None, "a draft model starts from tokens"
        renamed = TokenTree(self.ids[tree.tokens], tree.parents, tree.sizes, tree.is_chain)
        return Scores(self.inner.score(renamed, cache, taps=taps, start=start).logits[..., self.ids])

    def logits(self, hidden):
        return self.inner.logits(hidden)[..., self.ids]


def renamed_pair(noise: float = 0.0) -> tuple[Target, Target, Translation]:
    """The target, the same model with its letters in another order, and the way between them."""
    codec, order = letter_codec(VOCAB), torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    by_id = {token: piece for piece, token in codec.tokenizer.get_vocab().items()}
    vocab = {by_id[int(old)]: new for new, old in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return tiny_model(), Renamed(tiny_model(noise), order), TextTranslation(codec, TextCodec(tokenizer))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["tli", "reencode"])
def test_a_renamed_target_is_always_right(name: str, batch: int) -> None:
    target, draft, translation = renamed_pair()
    params = SamplingParams(max_tokens=24)
    expected = serve(target, compose("plain", target), PROMPTS, params)
    states = serve(target, compose(name, target, draft=draft, translation=translation), PROMPTS, params, batch=batch)
    assert tokens(states) == tokens(expected)
    assert all(state.stats.acceptance == 1 for state in states)


def test_tli_keeps_the_coupling_of_the_noise() -> None:
    """A sampled text too is guessed token by token: the draft's law is over the target's ids, so it can use the noise."""
    target, draft, translation = renamed_pair()
    expected = tokens(serve(target, compose("plain", target), PROMPTS, SAMPLED))
    states = serve(target, compose("tli", target, draft=draft, translation=translation), PROMPTS, SAMPLED, batch=8)
    assert tokens(states) == expected and all(state.stats.acceptance == 1 for state in states)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tli_under_rejection_accepts_its_twin(rule: str) -> None:
    target, draft, translation = renamed_pair()
    method = compose("tli", target, draft=draft, translation=translation, acceptance=rule)
    states = serve(target, method, PROMPTS, SAMPLED, batch=8)
    assert sum(s.stats.num_accepted for s in states) >= 0.99 * sum(s.stats.num_tested for s in states)


def test_the_drafts_cache_is_that_of_the_text() -> None:
    """After rejections and cut anew, what the draft has read is what its tokenizer makes of the text."""
    from outrider.core.request import Request
    from outrider.engine.step import Engine

    target, draft, translation = tiny_model(), tiny_model(0.3), toy_translation(VOCAB)
    for name in ("tli", "reencode"):
        engine = Engine(target, compose(name, target, draft=draft, translation=translation))
        batch = engine.start([Request(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in PROMPTS[2:5]])
        while batch.rows:
            engine.step(batch)
            state = batch.drafter_state
            assert state.cache.lengths == [len(read) for read in state.read]
            fresh = draft.new_cache(len(batch.rows))
            draft.prefill(state.read, fresh)
            for row, read in enumerate(state.read):
                for mine, other in zip(state.cache.keys, fresh.keys, strict=True):
                    torch.testing.assert_close(mine[row, :, : len(read)], other[row, :, : len(read)], atol=1e-5, rtol=1e-5)
            batch = batch.without_finished()


def test_forbidden_shared_tokens_end_the_draft() -> None:
    """Where a request bans every token both have, nothing is guessed, and the text is plain decoding's."""
    target, draft, translation = tiny_model(), tiny_model(0.1), toy_translation(VOCAB)
    shared = [token for token in translation.shared().tolist() if token >= 0]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4, banned_token_ids=shared)
    expected = tokens(serve(target, compose("plain", target), PROMPTS, params))
    for rule in ("coupled", "rejection"):
        method = compose("tli", target, draft=draft, translation=translation, acceptance=rule)
        states = serve(target, method, PROMPTS, params, batch=4)
        assert all(state.stats.num_drafted == 0 for state in states)
        if rule == "coupled":
            assert tokens(states) == expected


def test_what_cannot_be_composed_says_what_to_do() -> None:
    target, draft = tiny_model(), tiny_model(0.1)
    with pytest.raises(CompositionError, match=r"'tli' needs the tokenizers.*translation="):
        compose("tli", target, draft=draft)
    with pytest.raises(CompositionError, match=r"'reencode' needs a draft model"):
        compose("reencode", target, translation=toy_translation(VOCAB))
    disjoint = TextTranslation(letter_codec(8), _capitals())
    with pytest.raises(CompositionError, match=r"share no token.*reencode"):
        compose("tli", target, draft=draft, translation=disjoint)
    with pytest.raises(CompositionError, match="cannot be made of 'tli'"):
        compose("hybrid", target, draft=draft, options={"parts": "suffix,tli"})


def _capitals() -> TextCodec:
    return TextCodec(Tokenizer(models.BPE({"A": 0, "B": 1}, [])))


# --- real tokenizers --------------------------------------------------------------------------------------------------


def test_the_bundled_tokenizer_against_a_small_one() -> None:
    mine, other = load_codec(bundled_path("target")), byte_level(400)
    translation = TextTranslation(mine, other)
    assert read(translation, mine.encode(TEXT)) == other.encode(TEXT)
    assert int((translation.shared() >= 0).sum()) > 256
    assert pair_codec(VOCAB).vocab_size == VOCAB


@pytest.mark.skipif(not SMOLLM2.exists(), reason="the GGUF file is not here")
def test_two_real_models_of_different_vocabularies() -> None:
    llm = LLM(str(SMOLLM2), method="tli", draft=bundled_path("target"))
    params = SamplingParams(max_tokens=32)
    prompt = "Once upon a time, there was a little"
    plain = llm.generate(prompt, params, method=llm.compose("plain"))[0]
    for name in ("tli", "reencode"):
        output = llm.generate(prompt, params, method=llm.compose(name))[0]
        assert output.token_ids == plain.token_ids
        assert output.stats.tokens_per_pass > 1.5
    with pytest.raises(ModelError, match=r"another vocabulary.*'tli' or 'reencode'"):
        llm.compose("draft-model")
    with pytest.raises(ModelError, match=r"another vocabulary.*'tli' or 'reencode'"):
        LLM(str(SMOLLM2), method="draft-model", draft=bundled_path("target"))
