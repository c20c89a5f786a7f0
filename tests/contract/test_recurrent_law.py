"""Texts of recurrent targets, by enumeration: rules that see tree-scored laws emit the law of one token at a time."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from recurrence import EXACT, FAMILIES, exact_model, fed_one_by_one, one_by_one
from toy_laws import Experiment, Pair, Text, ToyModel, by_draws, grow, output_law, text_law, total_variation

from outrider.acceptance import Coupled, Recursive, Traversal
from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule
from outrider.core.tree import TokenTree
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

VOCAB, LENGTH, PROMPT = 3, 3, [1, 2, 0, 1]


def tree_scored(model: RecurrentDecoder) -> ToyModel:
    """The law after every short text, all of them nodes of one tree, scored in one pass."""
    texts: list[Text] = [text for size in range(LENGTH + 1) for text in itertools.product(range(VOCAB), repeat=size)]
    place = {text: node for node, text in enumerate(texts)}
    parents = [place[text[:-1]] if text else -1 for text in texts]
    tree = TokenTree.of_rows([([text[-1] if text else PROMPT[-1] for text in texts], parents)])
    cache_ = model.new_cache(1)
    model.prefill([PROMPT[:-1]], cache_)
    laws = model.score(tree, cache_).logits[0].softmax(-1)
    return lambda context: laws[place[context]]


def unrolled(model: RecurrentDecoder) -> ToyModel:
    """The same, every text fed one token at a time."""

    @cache
    def law(context: Text) -> torch.Tensor:
        return one_by_one(model, [*PROMPT, *context]).softmax(-1)

    return law


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", [Coupled, Recursive, Traversal])
def test_the_emitted_law_is_that_of_one_token_at_a_time(family: str, rule: type[AcceptanceRule]) -> None:
    target = exact_model(family, vocab_size=VOCAB)
    draft = random_recurrent(tiny_raw("mamba2", vocab_size=VOCAB), seed=5, dtype=torch.float64)
    pair = Pair(tree_scored(target), tree_scored(draft), VOCAB)
    draws = Draws.DETERMINISTIC if rule is Coupled else Draws.WITHOUT_REPLACEMENT
    drafter = grow(pair, [-1, 0, 0, 1], draws, by_draws(pair, draws))
    found = output_law(rule(), Experiment(pair, drafter, LENGTH))
    expected = text_law(Pair(unrolled(target), unrolled(draft), VOCAB), LENGTH)
    assert len(expected) == VOCAB**LENGTH and total_variation(found, expected) < EXACT


def test_a_draft_that_reads_ahead_changes_nothing() -> None:
    """The law of the next token is the same after a tree was scored and only its root was kept."""
    model = exact_model("qwen3_next", vocab_size=VOCAB)
    cache_ = model.new_cache(1)
    model.prefill([PROMPT[:-1]], cache_)
    model.score(TokenTree.of_rows([([PROMPT[-1], 0, 1, 2, 2], [-1, 0, 0, 1, 2])]), cache_)
    cache_.commit([[0]])
    assert (fed_one_by_one(model, [2], cache_) - one_by_one(model, [*PROMPT, 2])).abs().max() < EXACT
