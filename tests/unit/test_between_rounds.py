"""Drafters on the host beside captured rounds: a round holds what they guess, and they learn what it did."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.core.device_round import CapturedShape, Frame
from outrider.core.interfaces import Drafter, Observation
from outrider.core.params import SamplingParams
from outrider.core.plan import Plan
from outrider.core.request import Request, RequestState
from outrider.core.tree import TokenTree
from outrider.drafters.copying.suffix import SuffixDecoding, SuffixOptions
from outrider.drafters.copying.suffix_memory import SuffixMemory
from outrider.drafters.itself.token_recycling import TokenRecycling
from outrider.engine.between_rounds import BetweenRounds
from outrider.methods import compose
from outrider.models.attention.tree_triton import pack_words
from outrider.models.decoder import Decoder
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights

TREES, CHAINS = CapturedShape({2: 6, 4: 15}), CapturedShape({2: 2, 4: 4, 6: 6})
CONFIG = tiny_config()


def target() -> FastDecoder:
    return FastDecoder(CONFIG, tiny_weights(CONFIG, device=str(DEVICE)))


def request(prompt: Sequence[int], said: Sequence[int] = ()) -> RequestState:
    state = RequestState.of(Request(list(prompt), SamplingParams(max_tokens=60)))
    state.tokens.extend(said)
    return state


def plan(batch_size: int, depth: int) -> Plan:
    return Plan((depth,) * batch_size, (99,) * batch_size)


def played(twin: BetweenRounds, depth: int, *, batch_size: int = 3) -> torch.Tensor:
    """[B, N] the nodes that a round of so many guesses along a path holds."""
    nodes = torch.zeros(batch_size, twin.num_nodes(depth), dtype=torch.int64, device=DEVICE)
    twin.propose(Frame.empty(batch_size, 64, DEVICE), nodes, depth)
    return nodes.cpu()


@pytest.mark.parametrize("seed", range(4))
def test_trees_are_the_hosts_and_shorter_rounds_hold_their_first_nodes(seed: int) -> None:
    rng = random.Random(seed)
    states = {slot: request([rng.randrange(3) for _ in range(rng.randint(20, 40))]) for slot in (0, 2)}
    host = SuffixDecoding(SuffixOptions(tree=True, offset=4.0, min_token_prob=0.0))
    twin = BetweenRounds(host, TREES, target())
    assert twin.ready(states, plan(3, 4), 4, batch_size=3) == 4
    for slot, state in states.items():
        tokens, parents = host.copied(host.start([state.tokens], {}), [state.tokens], Plan((4,), (15,)))[0]
        expected = TokenTree.of_rows([(tokens, parents)])
        for depth in (2, 4):
            shapes, got = twin.trees(3, depth), played(twin, depth)[slot]
            count = min(len(tokens), twin.num_nodes(depth))
            assert shapes is not None and shapes.parents[slot, :count].tolist() == parents[:count]
            assert shapes.depths[slot, :count].tolist() == expected.depths[0, :count].tolist()
            assert torch.equal(shapes.words[slot, :count, 0].cpu(), pack_words(expected.ancestors)[0, :count, 0])
            kept = [t if d <= depth else -1 for t, d in zip(tokens, expected.depths[0].tolist(), strict=True)]
            assert got[1:count].tolist() == kept[1:count] and set(got[count:].tolist()) <= {-1}
            for node in range(count):
                path = [0, *expected.path(0, node)]
                assert shapes.paths[slot, node, : len(path)].tolist() == path
    assert set(played(twin, 4)[1, 1:].tolist()) == {-1}, "nobody sits there"


def test_chains_ask_for_no_longer_round_than_they_fill() -> None:
    twin, known = BetweenRounds(SuffixDecoding(SuffixOptions(min_token_prob=0.0)), CHAINS, target()), [9, 8, 7, 6, 5, 4, 3]
    state = request(known, [9, 8, 7])
    assert twin.trees(3, 4) is None
    assert twin.ready({1: state}, plan(3, 6), 6, batch_size=3) == 4, "three match, three follow"
    assert played(twin, 4)[1].tolist() == [0, 6, 5, 4, -1] and set(played(twin, 4)[0, 1:].tolist()) == {-1}
    state.tokens.append(1)
    assert twin.ready({1: state}, plan(3, 6), 6, batch_size=3) == 0, "nothing like it was said"
    assert twin.ready({}, plan(3, 6), 6, batch_size=3) == 0


def test_what_is_known_of_a_text_moves_and_leaves_with_it() -> None:
    memory = SuffixMemory.of(None, vocab_size=CONFIG.vocab_size, max_tokens=100_000, max_match=8)
    twin = BetweenRounds(SuffixDecoding(SuffixOptions(min_token_prob=0.0), memory=memory), CHAINS, target())
    state = request([1, 2], [3])
    twin.ready({2: state}, plan(3, 2), 2, batch_size=3)
    twin.move(3, 1, [2])
    state.tokens.extend([4, 5, 6])
    twin.finish({0: state})
    twin.finish({3: request([1, 9], [8, 8, 7, 7, 7])})
    assert memory.num_tokens >= 9, "what was said is remembered, by those too who were never asked about"
    twin.release([0], batch_size=1)
    assert twin.ready({0: request([7, 8, 3, 4])}, plan(1, 2), 2, batch_size=1) == 2
    assert played(twin, 2, batch_size=1)[0, 1:].tolist() == [5, 6], "another request is helped by it"


def test_it_learns_what_the_round_did() -> None:
    inner = compose("token-recycling", target(), policy="fixed").drafter
    assert isinstance(inner, TokenRecycling)
    seen = list[Observation]()
    inner.observe = lambda state, observation: seen.append(observation)  # type: ignore[method-assign]
    twin, model, state = BetweenRounds(inner, TREES, target()), CONFIG.vocab_size, request([3, 5])
    assert twin.ready({1: state}, plan(2, 2), 2, batch_size=2) == 0 and twin.listens, "it knows nothing, and wants to learn"
    logits = torch.randn(2, 1, model + 3, device=DEVICE)
    twin.took({1: [1, 0, 0, 0, 4]}, logits)
    assert seen[0].paths == [[0]] and torch.equal(seen[0].scores.logits[0], logits[1, :, :model]) and not twin.listens
    inner.table.write(torch.tensor([5, 6], device=DEVICE), torch.eye(model, device=DEVICE)[[6, 8]])
    depth = twin.ready({1: state}, plan(2, 2), 2, batch_size=2)
    first = int(played(twin, depth, batch_size=2)[1, 1])
    logits = torch.randn(2, twin.num_nodes(depth), model + 3, device=DEVICE)
    twin.took({0: [0, 0, 0, 0], 1: [2, 5, 1, 0, first, 1]}, logits)
    told = seen[1]
    assert told.paths == [[0, 1]] and told.num_accepted == [1] and told.plan is not None
    count = min(told.draft.tree.num_nodes, logits.shape[1])
    assert torch.equal(told.scores.logits[0, :count], logits[1, :count, :model])
    twin.took({1: [1, 0, 0, 0, 4]}, None)
    assert len(seen) == 2, "a round that was not drafted for teaches nothing"


@pytest.mark.parametrize("name", ["jacobi", "lookahead", "hybrid", "draft-tree", "s2d"])
def test_drafters_of_every_kind_go_on_after_rounds_they_had_no_part_in(name: str) -> None:
    """Some rounds accept, some do not, and between them tokens are added that the drafter was not told of."""
    model, rng = target(), random.Random(3)
    draft = Decoder(CONFIG, tiny_weights(CONFIG, device=str(DEVICE))) if name in ("hybrid", "draft-tree", "s2d") else None
    drafter: Drafter = compose(name, model, draft=draft, policy="fixed").drafter
    twin, states = BetweenRounds(drafter, TREES, model), {0: request([1, 2, 3]), 1: request([4, 5])}
    for _ in range(6):
        if twin.ready(states, plan(2, 4), 4, batch_size=2):
            nodes, notes = played(twin, 4, batch_size=2), dict[int, list[int]]()
            for slot, state in states.items():
                agreed = rng.randint(0, 1) if int(nodes[slot, 1]) >= 0 else 0
                said = [*[int(nodes[slot, 1])][:agreed], rng.randrange(CONFIG.vocab_size)]
                notes[slot] = [len(said), 4, agreed, 0, *said]
                state.tokens.extend(said)
            twin.took(notes, torch.randn(2, twin.num_nodes(4), CONFIG.vocab_size, device=DEVICE))
        for state in states.values():
            state.tokens.extend(rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(0, 2)))
    assert twin.reads_logits == drafter.reads_logits


def test_who_leaves_while_a_round_is_on_its_way_harms_nobody() -> None:
    twin = BetweenRounds(SuffixDecoding(SuffixOptions(min_token_prob=0.0)), CHAINS, target())
    states = {slot: request([9, 8, 7, 6, 9, 8]) for slot in range(3)}
    assert twin.ready(states, plan(3, 2), 2, batch_size=3) == 2
    twin.release([1], batch_size=3)
    twin.took({slot: [1, 2, 0, 0, 5] for slot in (0, 2)}, None)
    other = request([3, 2, 1, 3, 2])
    assert twin.ready({0: states[0], 1: other, 2: states[2]}, plan(3, 2), 2, batch_size=3) == 2
    assert played(twin, 2)[:, 1].tolist() == [7, 1, 7]
    assert twin.ready({1: other}, plan(3, 2), 2, batch_size=3) == 2, "the round before was thrown away"
    assert played(twin, 2)[:, 1].tolist() == [-1, 1, -1]
