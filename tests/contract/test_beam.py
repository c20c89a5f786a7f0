"""Beam search: the plain one is transformers', and the speculative one is the plain one, in fewer passes."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decoder_families import FAMILIES, make_checkpoint
from test_decoder_families import VOCAB as FAMILY_VOCAB
from tiers import repeats
from tiny_pair import VOCAB, tiny_model

from outrider import LLM
from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, OptionError, RequestError
from outrider.core.interfaces import Drafter, Target
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.model.draft_model import DraftModel
from outrider.engine.beam import BeamOptions, BeamResult, beam_search
from outrider.engine.beam_forest import DrafterForest, Forest, ModelForest
from outrider.models.load import load_model

EOS = frozenset({VOCAB - 1, 7})
PROMPTS = [[random.Random(i).randrange(VOCAB - 1) for _ in range(1 + 5 * i)] for i in range(3)]
PROMPTS.append([5, 6, 7, 8, 5, 6, 7, 8, 5, 6])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


def forests(target: Target) -> dict[str, Forest]:
    draft = tiny_model(0.1)
    return {
        "model": ModelForest(draft, width=6, depth=3),
        "model-narrow": ModelForest(draft, width=1, depth=5),
        "itself": ModelForest(target, width=8, depth=4),
        "chain": DrafterForest(DraftModel(draft, vocab_size=VOCAB), depth=3),
        "copied": DrafterForest(PromptLookup(), depth=4),
        "short context": ModelForest(tiny_model(0.1, max_len=14), width=6, depth=3),
    }


def same(mine: BeamResult, other: BeamResult) -> None:
    assert [h.token_ids for h in mine.hypotheses] == [h.token_ids for h in other.hypotheses]
    for a, b in zip(mine.hypotheses, other.hypotheses, strict=True):
        assert a.score == pytest.approx(b.score, abs=1e-4)
    assert mine.num_levels == other.num_levels


# --- plain ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Target]:
    folder: Path = tmp_path_factory.mktemp("beam")
    theirs = make_checkpoint(folder, *FAMILIES["llama3"])
    return theirs, load_model(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("end_ids", [[2], [2, 9, 31, 77], list(range(2, 60))], ids=["one end", "four", "many"])
@pytest.mark.parametrize("num_beams", [2, 3, 4])  # with 1 transformers decodes greedily: see the next test
def test_plain_is_that_of_transformers(checkpoint, num_beams: int, end_ids: list[int]) -> None:
    """Sequences and scores, for lengths, penalties and stopping rules; with many end tokens texts end all the time."""
    theirs, target = checkpoint
    early: tuple[Any, ...] = (False, True, "never")
    ended, shift = 0, num_beams + len(end_ids) // 4
    for turn in repeats(4, of=12):  # first every penalty with a rule for stopping, which take turns from case to case
        which, rule = turn % 4, (turn + turn // 4 + shift) % 3
        seed, penalty, stopping = 3 * which + rule, (1.0, 0.0, -0.7, 2.0)[which], early[rule]
        length = 1 if seed % 4 == 3 else 9
        prompt = [random.Random(seed).randrange(3, FAMILY_VOCAB) for _ in range(2 + seed % 9)]
        options: dict[str, Any] = {"length_penalty": penalty, "early_stopping": stopping, "num_beams": num_beams}
        reference = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=length, do_sample=False,
            eos_token_id=end_ids, pad_token_id=1, num_return_sequences=num_beams, return_dict_in_generate=True,
            output_scores=True, **options,
        )  # fmt: skip
        mine = beam_search(target, prompt, options=BeamOptions(max_tokens=length, **options), end_ids=frozenset(end_ids))
        assert len(mine.hypotheses) == num_beams
        for found, row, score in zip(mine.hypotheses, reference.sequences, reference.sequences_scores, strict=True):
            text = row[len(prompt) :].tolist()
            assert list(found.token_ids) == text[: len(found.token_ids)], f"{options} {length}"
            assert set(text[len(found.token_ids) :]) <= {1}, "transformers has more"
            assert found.score == pytest.approx(float(score), abs=1e-4)
            ended += found.token_ids[-1] in end_ids
    assert ended or len(end_ids) < 10


def test_one_beam_is_greedy_decoding(checkpoint) -> None:
    theirs, target = checkpoint
    prompt = [5, 6, 7]
    greedy = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    found = beam_search(target, prompt, options=BeamOptions(num_beams=1, max_tokens=12))
    assert list(found.hypotheses[0].token_ids) == greedy[0, 3:].tolist()
    assert found.num_passes == found.num_levels == 12


def test_enough_beams_find_the_best_text(target: Target) -> None:
    """With as many beams as there are texts of two tokens the search is exhaustive."""
    found = beam_search(target, PROMPTS[2], options=BeamOptions(num_beams=VOCAB, max_tokens=2, length_penalty=0.0))
    best = -float("inf")
    cache = target.new_cache(1)
    target.prefill([PROMPTS[2][:-1]], cache)
    from outrider.core.tree import TokenTree

    parents = [-1, *[0] * VOCAB]
    tree = TokenTree.of_rows([([PROMPTS[2][-1], *range(VOCAB)], parents)])
    scores = target.score(tree, cache).logits[0].log_softmax(-1)
    for first in range(VOCAB):
        best = max(best, float(scores[0, first] + scores[first + 1].max()))
    assert found.hypotheses[0].score == pytest.approx(best, abs=1e-4)


# --- speculative ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plainly(target: Target):
    """The plain search of a prompt, made once for all forests."""

    @cache
    def search(number: int, options: BeamOptions, end_ids: frozenset[int]) -> BeamResult:
        return beam_search(target, PROMPTS[number], options=options, end_ids=end_ids)

    return search


@pytest.mark.parametrize("num_beams", [1, 3, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 4))])
@pytest.mark.parametrize("name", ["model", "model-narrow", "itself", "chain", "copied", "short context"])
def test_speculative_is_plain(target: Target, plainly, name: str, num_beams: int) -> None:
    """The prompts take turns with the settings, so that each meets half of them."""
    forest = forests(target)[name]
    settings: tuple[Any, ...] = ((1, 1.0, False), (9, 0.6, False), (2, 1.0, True), (11, 1.2, "never"))
    for number, end_ids in itertools.product(range(len(PROMPTS)), (frozenset[int](), EOS)):
        for length, penalty, stopping in settings[(number + bool(end_ids)) % 2 :: 2]:
            options = BeamOptions(num_beams, length, penalty, stopping)
            plain = plainly(number, options, end_ids)
            fast = beam_search(target, PROMPTS[number], options=options, end_ids=end_ids, forest=forest)
            same(fast, plain)
            assert fast.num_passes <= plain.num_passes == plain.num_levels, f"prompt {number}"


def test_a_forest_of_the_target_itself_is_always_right(target: Target) -> None:
    """Guesses as wide as the search: every pass covers the whole depth and one level more."""
    options = BeamOptions(num_beams=4, max_tokens=25)
    found = beam_search(target, PROMPTS[1], options=options, forest=ModelForest(target, width=4, depth=4))
    assert found.num_levels == 25 and found.num_passes == 5


def test_an_end_inside_a_tree_ends_that_beam_only(target: Target) -> None:
    """Every token that plain search says first is made an end: beams then end at every level, inside the trees too."""
    free = beam_search(target, PROMPTS[2], options=BeamOptions(num_beams=3, max_tokens=12))
    end_ids = frozenset({free.hypotheses[0].token_ids[3], free.hypotheses[0].token_ids[6]})
    for stopping in (False, True):
        options = BeamOptions(num_beams=3, max_tokens=12, early_stopping=stopping)
        plain = beam_search(target, PROMPTS[2], options=options, end_ids=end_ids)
        assert any(len(h.token_ids) < 12 for h in plain.hypotheses)
        same(beam_search(target, PROMPTS[2], options=options, end_ids=end_ids, forest=forests(target)["itself"]), plain)


def test_fewer_passes_on_easy_text() -> None:
    llm = LLM(dtype="float32")
    assert llm.draft is not None
    prompt = llm.codec.encode("Once upon a time, there was a little girl named Lily. She")
    options = BeamOptions(num_beams=4, max_tokens=40)
    plain = beam_search(llm.target, prompt, options=options, end_ids=llm.codec.eos_ids)
    fast = beam_search(
        llm.target, prompt, options=options, end_ids=llm.codec.eos_ids, forest=ModelForest(llm.draft, width=8, depth=4)
    )
    same(fast, plain)
    assert fast.num_passes < 0.7 * plain.num_passes


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_context_bounds_the_length() -> None:
    short = tiny_model(max_len=16)
    found = beam_search(short, [1] * 10, options=BeamOptions(num_beams=2, max_tokens=99), forest=ModelForest(tiny_model(0.1)))
    assert all(len(hypothesis.token_ids) == 6 for hypothesis in found.hypotheses)


def test_what_cannot_be_is_refused(target: Target) -> None:
    for wrong in ({"num_beams": 0}, {"max_tokens": 0}, {"early_stopping": "always"}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            BeamOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="0 tokens"):
        beam_search(target, [], options=BeamOptions())
    with pytest.raises(OptionError, match="width = 0"):
        ModelForest(target, width=0)
    with pytest.raises(OptionError, match="depth = 0"):
        DrafterForest(PromptLookup(), depth=0)
    reader: Drafter = DraftModel(target, vocab_size=VOCAB, draws=Draws.DETERMINISTIC)
    reader.taps = (1,)
    with pytest.raises(CompositionError, match="hidden states"):
        DrafterForest(reader)
