"""RASD: retrieved branches are weeded by the draft model, share its beginnings, and go deeper than it does."""

from __future__ import annotations

import pytest
import torch
from markov import Markov
from test_hybrid import Fixed, context_of, texts_of
from test_methods import PROMPTS, serve, tokens
from tiny_pair import tiny_model

from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Observation, Plan
from outrider.core.params import SamplingParams
from outrider.core.scores import Scores
from outrider.drafters.mixed.rasd import Rasd, RasdOptions, RasdState
from outrider.methods import compose

SIZE = 10
TABLE = torch.full((SIZE, SIZE), -9.0)
for last in range(SIZE):  # after token t the draft expects t + 1, then t + 2
    TABLE[last, (last + 1) % SIZE] = 1.0
    TABLE[last, (last + 2) % SIZE] = 0.0


def rasd_of(*paths, **options) -> tuple[Rasd, RasdState]:
    drafter = Rasd(
        Markov(TABLE), Fixed(*paths), RasdOptions(**{"draft_depth": 2, "num_children": 2, **options}), vocab_size=SIZE
    )
    return drafter, drafter.start([[0]], {})


def test_unlikely_beginnings_are_dropped_with_all_below() -> None:
    drafter, state = rasd_of((7, 8, 9), (1, 5, 6, 7))
    texts = texts_of(drafter.propose(state, context_of(1), Plan((4,), (40,))).tree)
    assert (1, 5, 6, 7) in texts, "a tail of a likely beginning goes deeper than the draft's two levels"
    assert not any(text[0] == 7 for text in texts)


def test_equal_beginnings_are_shared_and_the_budget_holds() -> None:
    drafter, state = rasd_of((1, 2, 3, 4))
    for budget in range(1, 12):
        tree = drafter.propose(state, context_of(1), Plan((4,), (budget,))).tree
        found = [tuple(int(tree.tokens[0, n]) for n in tree.path(0, node)) for node in range(1, tree.sizes[0])]
        assert len(found) == len(set(found)) <= budget
        assert all(text[:-1] in set(found) or len(text) == 1 for text in found), "what is kept is a tree"
        state.cache = drafter.model.new_cache(1)


def test_nothing_retrieved_is_the_drafts_own_tree() -> None:
    drafter, state = rasd_of()
    texts = texts_of(drafter.propose(state, context_of(1), Plan((4,), (6,))).tree)
    assert max(map(len, texts)) == 2 and (1,) in texts and (1, 2) in texts


def test_tails_that_hold_are_trusted_further() -> None:
    drafter, state = rasd_of((1, 5, 6, 7, 8, 9))
    before = state.holds[0].chances(5)
    for _ in range(12):
        state.cache = drafter.model.new_cache(1)
        draft = drafter.propose(state, context_of(1), Plan((6,), (40,)))
        by_text = {
            tuple(int(draft.tree.tokens[0, n]) for n in draft.tree.path(0, node)): node
            for node in range(1, draft.tree.sizes[0])
        }
        path = [0, *(by_text[(1, 5, 6, 7, 8, 9)[:depth]] for depth in range(1, 7))]
        scores = Scores(torch.zeros(1, draft.tree.num_nodes, SIZE))
        drafter.observe(state, Observation(draft, scores, [path], [6], 0.0, 0.0))
    after = state.holds[0].chances(5)
    assert all(new > old for new, old in zip(after, before, strict=True)) and after[-1] > 0.9


def test_it_accepts_more_than_its_parts() -> None:
    """Text that repeats itself, and a draft that is often wrong."""
    target, draft = tiny_model(), tiny_model(0.3)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    passes, plain = {}, tokens(serve(target, compose("plain", target), PROMPTS, params, batch=8))
    for name, options in {
        "suffix": {"tree": True, "num_draft_tokens": 12, "num_tree_nodes": 24},
        "best-first": {},
        "rasd": {},
    }.items():
        given = {"num_draft_tokens": 4, "num_tree_nodes": 24} if name == "best-first" else options
        states = serve(target, compose(name, target, draft=draft, options=given), PROMPTS, params, batch=8)
        passes[name] = sum(state.stats.num_passes for state in states)
        assert tokens(states) == plain
    assert passes["rasd"] < min(passes["suffix"], passes["best-first"])


def test_options() -> None:
    target, draft = tiny_model(), tiny_model(0.1)
    with pytest.raises(OptionError, match=r"retriever = 'jacobi'.*suffix"):
        compose("rasd", target, draft=draft, options={"retriever": "jacobi"})
    for name, value in {"draft_depth": 0, "min_chance": 1.0, "width": 0, "tau": 0.0}.items():
        with pytest.raises(OptionError, match=name):
            compose("rasd", target, draft=draft, options={name: value})
    with pytest.raises(CompositionError, match="'rest' needs the option 'datastore'"):
        compose("rasd", target, draft=draft, options={"retriever": "rest"})
    method = compose("rasd", target, draft=draft, options={"retriever": "prompt-lookup", "max_ngram": 2})
    assert method.drafter.draws is Draws.DETERMINISTIC


# --- hybrids by name --------------------------------------------------------------------------------------------------


def test_parts_of_a_hybrid_are_named_and_take_their_options() -> None:
    target, draft = tiny_model(), tiny_model(0.1)
    expected = tokens(serve(target, compose("plain", target), PROMPTS, SamplingParams(max_tokens=20)))
    for parts in ("suffix,draft-model", ["prompt-lookup", "token-recycling"], ("best-first", "suffix", "ngram-cache")):
        needs_draft = "draft" in str(parts) or "best" in str(parts)
        method = compose("hybrid", target, draft=draft if needs_draft else None, options={"parts": parts})
        assert tokens(serve(target, method, PROMPTS, SamplingParams(max_tokens=20), batch=4)) == expected
    compose("hybrid", target, options={"parts": "prompt-lookup", "max_ngram": 2})
    with pytest.raises(OptionError, match="no option 'max_ngram'"):
        compose("hybrid", target, options={"parts": "suffix", "max_ngram": 2})
    with pytest.raises(OptionError, match=r"unknown method 'sufix'; did you mean 'suffix'"):
        compose("hybrid", target, options={"parts": "sufix"})
    with pytest.raises(CompositionError, match="'draft-model' needs a draft model"):
        compose("hybrid", target)
    for part in ("hybrid", "spectr", "rsd-s"):
        with pytest.raises(CompositionError, match=f"cannot be made of '{part}'"):
            compose("hybrid", target, draft=draft, options={"parts": f"suffix,{part}"})
    with pytest.raises(OptionError, match="each of them once"):
        compose("hybrid", target, options={"parts": "suffix,suffix"})


def test_a_hybrid_gives_its_places_to_the_part_that_is_right() -> None:
    """A nearly perfect draft beside a drafter that has nothing to go by: hardly a place is lost to the second."""
    target, draft, passes = tiny_model(), tiny_model(0.02), {}
    for parts in ("draft-model", "token-recycling", "token-recycling,draft-model"):
        method = compose("hybrid", target, draft=draft, options={"parts": parts, "num_tree_nodes": 8})
        states = serve(target, method, PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
        passes[parts] = sum(state.stats.num_passes for state in states)
    assert passes["token-recycling,draft-model"] < 1.15 * passes["draft-model"] < 0.5 * passes["token-recycling"]
