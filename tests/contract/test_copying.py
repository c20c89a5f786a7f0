"""The drafters that copy, on a small random model and prompts worth copying: the text of plain decoding, in fewer passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from test_methods import serve as serve_all
from test_methods import tokens
from tiers import in_turn
from tiny_pair import VOCAB, tiny_model

from outrider.acceptance import Coupled, Delta
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.drafters.copying.datastore import Datastore
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.drafters.copying.ngram_cache import NgramCacheDrafter, NgramCacheOptions
from outrider.drafters.copying.ngram_memory import NgramMemory
from outrider.drafters.copying.reference import ReferenceLookup, ReferenceOptions
from outrider.drafters.copying.rest import RestDrafter
from outrider.drafters.copying.suffix import SuffixDecoding, SuffixOptions
from outrider.drafters.copying.suffix_memory import LEAD_IN, SuffixMemory
from outrider.drafters.plain import NullDrafter
from outrider.policies.fixed import Fixed, FixedOptions

EOS = frozenset({VOCAB - 1})
GREEDY = SamplingParams(max_tokens=18)
SAMPLED = SamplingParams(max_tokens=18, temperature=0.7, top_p=0.95, seed=7)
PENALISED = SamplingParams(max_tokens=18, temperature=0.9, top_k=20, repetition_penalty=1.2, frequency_penalty=0.1, seed=11)


def _prompts() -> list[list[int]]:
    """Phrases said again, patterns, one phrase in several prompts, and one prompt with nothing to copy."""
    rng = random.Random(5)
    phrase = [rng.randrange(VOCAB - 1) for _ in range(9)]
    noise = [[rng.randrange(VOCAB - 1) for _ in range(5)] for _ in range(4)]
    return [
        [*phrase, *noise[0], *phrase[:4]],
        [5, 6, 7, 8] * 3 + [5, 6],
        [*noise[1], *phrase, *noise[2], *phrase],
        [3],
        [*phrase, *noise[0], *phrase[:4]],
        [9] * 12,
        [*noise[3], *noise[3], *noise[3][:2]],
        phrase[:6],
    ]


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


@pytest.fixture(scope="module")
def texts(said) -> list[list[int]]:
    """What the model says: sources that know the answer, so that copying pays."""
    return [prompt + text for prompt, text in zip(PROMPTS, said(GREEDY), strict=True)]


@pytest.fixture(scope="module")
def store(texts, tmp_path_factory) -> Datastore:
    return build_datastore(texts, tmp_path_factory.mktemp("copying") / "store", vocab_size=VOCAB)


Build = Callable[[list[list[int]], Datastore], Drafter]
DRAFTERS: dict[str, Build] = {
    "suffix": lambda texts, store: SuffixDecoding(memory=SuffixMemory(vocab_size=VOCAB)),
    "suffix-tree": lambda texts, store: SuffixDecoding(
        SuffixOptions(tree=True, factor=3.0, min_token_prob=0.0), memory=SuffixMemory(vocab_size=VOCAB)
    ),
    "suffix-own": lambda texts, store: SuffixDecoding(SuffixOptions(memory_tokens=0, offset=1.0)),
    "ngram-cache": lambda texts, store: NgramCacheDrafter(memory=NgramMemory(vocab_size=VOCAB)),
    "ngram-cache-tree": lambda texts, store: NgramCacheDrafter(
        NgramCacheOptions(tree=True, min_token_prob=0.0), memory=NgramMemory(vocab_size=VOCAB, max_entries=200)
    ),
    "reference": lambda texts, store: ReferenceLookup(ReferenceOptions(references=texts), vocab_size=VOCAB),
    "rest": lambda texts, store: RestDrafter(datastore=store, vocab_size=VOCAB),
}


class Checked(Drafter):
    """Passes everything on, and looks at every tree."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.branched = False

    def start(self, rows, taps) -> Any:
        return self.inner.start(rows, taps)

    def observe(self, state: Any, observation: Observation) -> None:
        self.inner.observe(state, observation)

    def finish(self, state: Any, row: int, tokens: Sequence[int]) -> None:
        self.inner.finish(state, row, tokens)

    def propose(self, state: Any, context: Context, plan: Plan) -> Draft:
        draft = self.inner.propose(state, context, plan)
        assert draft.draws is Draws.DETERMINISTIC and draft.tree.batch_size == len(context.tokens)
        self.branched |= not draft.tree.is_chain
        for row, history in enumerate(context.tokens):
            size = draft.tree.sizes[row]
            guesses, parents = draft.tree.tokens[row, :size].tolist(), draft.tree.parents[row, :size].tolist()
            assert guesses[0] == history[-1] and size - 1 <= plan.max_nodes[row]
            assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
            assert parents[1:] == sorted(parents[1:]), "breadth-first"
            assert len(set(zip(parents, guesses, strict=True))) == size, "siblings differ"
            assert int(draft.tree.depths[row, :size].max()) <= plan.max_depth[row]
        return draft


@pytest.fixture(scope="module")
def said(target) -> Callable[[SamplingParams], list[list[int]]]:
    """What plain decoding says, asked once for each set of parameters."""
    known: dict[int, list[list[int]]] = {}

    def ask(params: SamplingParams) -> list[list[int]]:
        if id(params) not in known:
            known[id(params)] = tokens(serve(target, Method(NullDrafter(), Coupled(), Fixed()), params))
        return known[id(params)]

    return ask


def serve(target: Target, method: Method, params: SamplingParams, *, batch: int = 1, prompts: Sequence[list[int]] = PROMPTS):
    return serve_all(target, method, prompts, params, batch=batch)


@pytest.mark.parametrize(("name", "rule"), in_turn(DRAFTERS, (Coupled, Delta)))
def test_greedy_is_plain_greedy(target, said, texts, store, name: str, rule) -> None:
    """Cold and warm: the memory fills while the batches are served, and goes on to the next."""
    expected = said(GREEDY)
    drafter = Checked(DRAFTERS[name](texts, store))
    method = Method(drafter, rule(), Fixed(FixedOptions(6)))
    for batch, count in ((1, 2), (3, 5), (8, 8)):
        states = serve(target, method, GREEDY, batch=batch, prompts=PROMPTS[:count])
        assert tokens(states) == expected[:count]
        assert sum(state.stats.num_accepted for state in states) > 0
    assert drafter.branched == (name.endswith("-tree") or name == "rest")


@pytest.mark.parametrize(("name", "way"), in_turn(DRAFTERS, ("sampled", "penalised")))
def test_same_seed_same_text(target, said, texts, store, name: str, way: str) -> None:
    params = {"sampled": SAMPLED, "penalised": PENALISED}[way]
    expected = said(params)
    drafter = Checked(DRAFTERS[name](texts, store))
    for batch, length, count in ((1, 7, 2), (3, 2, 5), (8, 7, 8)):
        method = Method(drafter, Coupled(), Fixed(FixedOptions(length)))
        assert tokens(serve(target, method, params, batch=batch, prompts=PROMPTS[:count])) == expected[:count]


@pytest.mark.parametrize("name", ["suffix", "suffix-tree", "ngram-cache", "reference", "rest"])
def test_what_was_said_before_is_said_in_fewer_passes(target, said, texts, store, name: str) -> None:
    method = Method(DRAFTERS[name](texts, store), Coupled(), Fixed(FixedOptions(8)))
    passes = [sum(state.stats.num_passes for state in serve(target, method, GREEDY)) for _ in range(2)]
    total = sum(len(text) for text in said(GREEDY))
    assert passes[1] < 0.6 * total, "most tokens of the second run were copied"
    assert passes[1] <= passes[0]


@pytest.mark.parametrize("batch", [1, 8])
def test_memories_hear_every_request_to_its_end(target, said, batch: int) -> None:
    suffix, ngrams = SuffixMemory(vocab_size=VOCAB), NgramMemory(vocab_size=VOCAB, max_ngram=1)
    for drafter in (SuffixDecoding(memory=suffix), NgramCacheDrafter(memory=ngrams)):
        serve(target, Method(drafter, Coupled(), Fixed()), GREEDY, batch=batch)
    outputs = said(GREEDY)
    assert suffix.num_tokens == sum(
        min(LEAD_IN, len(prompt)) + len(text) for prompt, text in zip(PROMPTS, outputs, strict=True)
    )
    whole = [prompt + text for prompt, text in zip(PROMPTS, outputs, strict=True)]
    for token in {token for text in whole for token in text[:-1]}:
        followed = sum(text[:-1].count(token) for text in whole)
        assert ngrams.followers([token])[1] == followed


@pytest.mark.parametrize("name", DRAFTERS)
def test_delta_sampling_ends_where_it_should(target, texts, store, name: str) -> None:
    """The delta rule keeps the law, not the seed's text; lengths, ends and a second run with the same draft still agree."""
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)
    method = Method(Checked(DRAFTERS[name](texts, store)), Delta(), Fixed(FixedOptions(5)))
    states = serve(target, method, params, batch=8)
    assert all(state.num_output == 9 for state in states)
    assert all(state.stats.num_accepted <= state.stats.num_tested <= state.stats.num_drafted for state in states)


def test_rules_for_sampled_guesses_are_refused(texts, store) -> None:
    from outrider.acceptance import Rejection

    for build in DRAFTERS.values():
        with pytest.raises(CompositionError, match="deterministic"):
            Method(build(texts, store), Rejection(), Fixed())
