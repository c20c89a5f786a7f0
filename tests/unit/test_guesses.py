"""A drafter that proposes nonsense is stopped at the seam, before a fast pass reads memory by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import pytest
import torch
from torch import Tensor

from outrider import LLM, Method, SamplingParams
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import DraftError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Stateless
from outrider.core.tree import TokenTree


@final
class Nonsense(Drafter):
    """Proposes the same children of the root whatever the text."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.tokens, self.parents = list(tokens), list(parents)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        rows = [([root, *self.tokens], [-1, *self.parents]) for root in context.roots]
        return Draft(TokenTree.of_rows(rows, context.device), self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        return None


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="plain", dtype="float32")


@pytest.mark.parametrize("token", [1 << 40, 4096, -1])
@pytest.mark.parametrize("parents", [[0, 0], [0, 1]], ids=["tree", "chain"])
def test_a_token_out_of_the_vocabulary(llm: LLM, token: int, parents: list[int]) -> None:
    fixed = llm.compose("prompt-lookup", num_draft_tokens=4)
    method = Method(Nonsense([5, token], parents), fixed.rule, fixed.policy)
    assert llm.target.vocab_size == 4096
    with pytest.raises(DraftError, match=rf"Nonsense guessed token {token}, and the vocabulary is 0 to 4095"):
        llm.generate("Once upon a time", SamplingParams(max_tokens=8), method=method)


def test_a_node_before_its_parent(llm: LLM) -> None:
    fixed = llm.compose("prompt-lookup", num_draft_tokens=4)
    method = Method(Nonsense([5, 6], [2, 0]), fixed.rule, fixed.policy)
    with pytest.raises(DraftError, match="before its parent"):
        llm.generate("Once upon a time", SamplingParams(max_tokens=8), method=method)


def test_wrong_guesses_inside_the_vocabulary_change_nothing(llm: LLM) -> None:
    fixed = llm.compose("prompt-lookup", num_draft_tokens=4)
    method = Method(Nonsense([0, 4095], [0, 0]), fixed.rule, fixed.policy)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    plain = llm.generate("Once upon a time", params)[0].token_ids
    assert llm.generate("Once upon a time", params, method=method)[0].token_ids == plain


def test_the_check_looks_at_every_row() -> None:
    rows = torch.zeros(3, 5, dtype=torch.int64)
    TokenTree.chain(rows).check(1, "nobody")
    rows[2, 4] = 1
    with pytest.raises(DraftError):
        TokenTree.chain(rows).check(1, "nobody")
