"""Staged speculation: the draft is that of the draft model alone, in fewer of its passes."""

from __future__ import annotations

import pytest
import torch
from test_methods import EVERYTHING, PROMPTS, SAMPLED, serve, tokens
from tiny_pair import VOCAB, tiny_model

from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Plan, Target
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.mixed.cascade import Cascade, CascadeOptions
from outrider.drafters.model.draft_model import DraftModel
from outrider.drafters.model.draft_tree import DraftTree
from outrider.methods import compose

REPEATING = [3, 4, 5, 6] * 4


class Counting(Target):
    """A model that counts its passes."""

    def __init__(self, inner: Target) -> None:
        self.inner, self.num_passes = inner, 0
        self.vocab_size, self.max_len, self.num_layers = inner.vocab_size, inner.max_len, inner.num_layers
        self.device, self.dtype = inner.device, inner.dtype

    def new_cache(self, batch_size: int):
        return self.inner.new_cache(batch_size)

    def prefill(self, rows, cache, *, taps=()):
        return self.inner.prefill(rows, cache, taps=taps)

    def score(self, tree, cache, *, taps=(), start=0, resume=None):
        self.num_passes += 1
        return self.inner.score(tree, cache, taps=taps, start=start, resume=resume)

    def logits(self, hidden):
        return self.inner.logits(hidden)


def context_of(prompts, params: SamplingParams) -> Context:
    rows = [RequestState.of(Request(prompt, params)) for prompt in prompts]
    noise = Noise(torch.tensor([row.seed for row in rows]), torch.zeros(len(rows), dtype=torch.int64))
    return Context([row.tokens for row in rows], Sampler(rows, VOCAB, torch.device("cpu")), noise, torch.device("cpu"))


INNER: dict[str, Drafter] = {
    "look-up": PromptLookup(),
    "a perfect model": DraftModel(tiny_model(0.15), vocab_size=VOCAB),
    "another model": DraftModel(tiny_model(0.4), vocab_size=VOCAB),
    "a tree": DraftTree(tiny_model(0.4), vocab_size=VOCAB),
}


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, EVERYTHING], ids=["greedy", "top-p", "everything"])
@pytest.mark.parametrize("draws", [Draws.DETERMINISTIC, Draws.IID])
@pytest.mark.parametrize("inner", INNER)
def test_the_draft_is_that_of_the_model_alone(inner: str, draws: Draws, params: SamplingParams) -> None:
    model, prompts = tiny_model(0.15), [REPEATING, *PROMPTS[2:6]]
    plan = Plan((7, 5, 0, 3, 7), (7, 5, 0, 3, 7))
    alone = DraftModel(model, vocab_size=VOCAB, draws=draws)
    staged = Cascade(model, INNER[inner], CascadeOptions(num_inner_nodes=9), vocab_size=VOCAB, draws=draws)
    context = context_of(prompts, params)
    expected = alone.propose(alone.start(prompts, {}), context, plan)
    found = staged.propose(staged.start(prompts, {}), context, plan)
    assert found.tree.sizes == expected.tree.sizes and found.tree.is_chain
    for row, size in enumerate(expected.tree.sizes):
        assert found.tree.tokens[row, :size].tolist() == expected.tree.tokens[row, :size].tolist()
        if draws is Draws.IID:
            assert found.q is not None and expected.q is not None
            torch.testing.assert_close(found.q[row, : size - 1], expected.q[row, : size - 1], atol=1e-5, rtol=1e-4)


def test_an_inner_drafter_that_is_right_saves_passes() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    passes = {}
    for name, options in {"draft-model": {}, "cascade": {"inner": "draft-model", "num_inner_tokens": 7}}.items():
        target, model = tiny_model(), Counting(tiny_model(0.1))
        method = compose(name, target, draft=[model, tiny_model(0.1)], options={"num_draft_tokens": 8, **options})
        states = serve(target, method, PROMPTS[:3], params)
        passes[name] = model.num_passes, tokens(states)
    assert passes["cascade"][1] == passes["draft-model"][1]
    assert passes["cascade"][0] < 0.3 * passes["draft-model"][0]


def test_the_inner_state_never_sees_a_guess() -> None:
    """A model as inner drafter: after every round its cache holds committed text only, however wrong the draft was."""
    from outrider.engine.step import Engine

    target, small = tiny_model(), tiny_model(0.5)
    method = compose("cascade", target, draft=[tiny_model(0.6), small], options={"inner": "draft-model"})
    engine = Engine(target, method)
    batch = engine.start([Request(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in PROMPTS[2:5]])
    while batch.rows:
        engine.step(batch)
        cache = batch.drafter_state.inner.cache
        fresh = small.new_cache(len(batch.rows))
        small.prefill([state.tokens for state in batch.rows], fresh)
        for row, length in enumerate(cache.lengths):
            assert length <= len(batch.rows[row].tokens)
            torch.testing.assert_close(cache.keys[1][row, :, :length], fresh.keys[1][row, :, :length], atol=1e-5, rtol=1e-5)
        batch = batch.without_finished()


def test_a_short_context_of_the_draft_ends_the_chain() -> None:
    target, params = tiny_model(), SamplingParams(max_tokens=40, ignore_eos=True)
    expected = tokens(serve(target, compose("plain", target), PROMPTS, params, batch=8))
    for drafts in ([tiny_model(0.1, max_len=24), tiny_model(0.2)], [tiny_model(0.1), tiny_model(0.2, max_len=20)]):
        method = compose("cascade", target, draft=drafts, options={"inner": "draft-model"})
        assert tokens(serve(target, method, PROMPTS, params, batch=4)) == expected


def test_what_cannot_be_staged() -> None:
    target, draft = tiny_model(), tiny_model(0.1)
    with pytest.raises(OptionError, match=r"inner = 'jacobi'.*prompt-lookup"):
        compose("cascade", target, draft=draft, options={"inner": "jacobi"})
    with pytest.raises(OptionError, match="num_inner_tokens = 0"):
        compose("cascade", target, draft=draft, options={"num_inner_tokens": 0})
    with pytest.raises(CompositionError, match=r"draft model of its own.*one more in draft="):
        compose("cascade", target, draft=draft, options={"inner": "draft-model"})
    with pytest.raises(CompositionError, match="cannot guess for a draft model"):
        Cascade(draft, DraftModel(draft, vocab_size=VOCAB, draws=Draws.IID), vocab_size=VOCAB)


def test_three_stages_by_hand() -> None:
    """A cascade is a drafter, so it can be the inner drafter of another."""
    target, params = tiny_model(), SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    from outrider.acceptance import Coupled
    from outrider.core.method import Method
    from outrider.policies.fixed import Fixed, FixedOptions

    inner = Cascade(tiny_model(0.3), PromptLookup(), vocab_size=VOCAB)
    method = Method(Cascade(tiny_model(0.1), inner, vocab_size=VOCAB), Coupled(), Fixed(FixedOptions(num_draft_tokens=6)))
    expected = tokens(serve(target, compose("plain", target), PROMPTS, params))
    assert tokens(serve(target, method, PROMPTS, params, batch=4)) == expected
