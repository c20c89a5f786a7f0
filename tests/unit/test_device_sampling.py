"""The complete sampler on the device against ``core/sampling.py``: every parameter, at every node of chains and trees."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.core.device_round import Frame
from outrider.core.device_sampling import Shaping, Stages, Use, stages_for, use_of
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.device.acceptance.coupled import NOTE, RING, chain_parents, walk_and_commit
from outrider.device.sampling.adjust import Trail
from outrider.device.sampling.choose import Bests, Guessing, block_bests
from outrider.models.attention.tree_triton import pack_words
from outrider.models.gpu.uploads import sent

VOCAB = 2500
PROMPTS = ([3, 5, 9, 5], [7, 1])
OUTPUTS = ([5, 11, 12], [1, 30, 30, 2])


def params_of(generator: random.Random) -> SamplingParams:
    """Random parameters, each used about every second time."""

    def maybe(name: str, *values: Any) -> dict[str, Any]:
        return {name: generator.choice(values)} if generator.random() < 0.5 else {}

    return SamplingParams(
        max_tokens=40,
        seed=generator.randrange(1000),
        temperature=generator.choice((0.0, 0.3, 0.8, 1.0, 1.5)),
        **maybe("top_k", 1, 5, 50, 5000),
        **maybe("top_p", 0.1, 0.5, 0.95, 0.999),
        **maybe("min_p", 0.01, 0.2),
        **maybe("typical_p", 0.3, 0.9),
        **maybe("repetition_penalty", 1.1, 0.8),
        **maybe("presence_penalty", 0.5, -0.5),
        **maybe("frequency_penalty", 0.3, -0.2),
        **maybe("logit_bias", {4: 3.0, 5: -2.0}, {7: float("inf"), 8: float("inf")}, {9: float("-inf")}),
        **maybe("banned_token_ids", (1, 2, 3)),
        **maybe("min_tokens", 4, 6, 30),
    )


def states_of(params: list[SamplingParams]) -> list[RequestState]:
    states = []
    for prompt, output, one in zip(PROMPTS, OUTPUTS, params, strict=True):
        state = RequestState.of(Request(prompt, one, eos_ids=frozenset({0, 17})))
        state.tokens.extend(output)
        states.append(state)
    return states


def frame_of(states: list[RequestState]) -> Frame:
    frame = Frame.empty(len(states), 64, DEVICE)
    shaping = Shaping.empty(len(states), VOCAB, DEVICE)
    shaping.seat(range(len(states)), states, sent)
    for slot, state in enumerate(states):
        frame.tokens[slot, : len(state.tokens)] = torch.tensor(state.tokens)
        frame.lengths[slot], frame.prompt_lens[slot] = len(state.tokens), len(state.request.prompt_ids)
        frame.seeds[slot], frame.temperatures[slot], frame.limits[slot] = state.seed, state.params.temperature, 60
    return Frame(**{**vars(frame), "shaping": shaping, "stages": stages_for([state.request for state in states])})


def choices_of(bests: Bests) -> torch.Tensor:
    best = bests.values == bests.values.amax(-1, keepdim=True)
    return torch.where(best, bests.tokens, 1 << 40).amin(-1)


def law_choices(states: list[RequestState], logits: torch.Tensor, tree: TokenTree) -> torch.Tensor:
    """The oracle."""
    seeds = torch.tensor([state.seed for state in states], device=DEVICE)
    noise = Noise(seeds, torch.tensor([state.num_output for state in states], device=DEVICE))
    return Sampler(states, VOCAB, DEVICE).law(logits, tree, noise).choices


def random_logits(seed: int, num_nodes: int) -> torch.Tensor:
    logits = 3 * torch.randn(2, num_nodes, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, :, 100:140] = logits[:, :, 100:101]  # ties
    return logits.to(DEVICE)


@pytest.mark.parametrize("seed", range(12))
def test_choices_on_chains_are_those_of_the_host(seed: int) -> None:
    generator = random.Random(seed)
    states = states_of([params_of(generator), params_of(generator)])
    frame, logits = frame_of(states), random_logits(seed, 3)
    nodes = torch.tensor([[12, 5, 4], [2, 30, 7]], device=DEVICE)
    expected = law_choices(states, logits, TokenTree.chain(nodes, [3, 3]))
    assert choices_of(block_bests(logits, frame, vocab_size=VOCAB, trail=Trail(nodes))).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(24, 30))
def test_choices_on_trees_are_those_of_the_host(seed: int) -> None:
    generator = random.Random(seed)
    states = states_of([params_of(generator), params_of(generator)])
    frame, logits = frame_of(states), random_logits(seed, 4)
    nodes = torch.tensor([[12, 5, 4, 5], [2, 30, 7, 1]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]], device=DEVICE)
    tree = TokenTree(nodes, parents, [4, 4])
    words, depths = pack_words(tree.ancestors), tree.depths.int().contiguous()
    expected = law_choices(states, logits, tree)
    bests = block_bests(logits, frame, vocab_size=VOCAB, depths=depths, trail=Trail(nodes, words))
    assert choices_of(bests).tolist() == expected.tolist()


def test_a_draft_with_fewer_tokens_is_shaped_by_the_tokens_they_stand_for() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=50.0, banned_token_ids=(40,))
    states = states_of([params, params])
    frame = frame_of(states)
    ids = torch.tensor([11, 12, 30, 40, 50], device=DEVICE)
    logits = torch.tensor([[[5.0, 4.0, 3.0, 6.0, 1.0]], [[1.0, 4.0, 9.0, 12.0, 2.0]]], device=DEVICE)
    bests = block_bests(logits, frame, vocab_size=5, depths=0, guessing=Guessing(1, ids))
    assert choices_of(bests)[:, 0].tolist() == [30, 12]  # 11, 12 and 30 were said, 40 is banned


def test_penalties_follow_the_text_from_round_to_round() -> None:
    """Tokens that a round emits are counted by the next one."""
    params = [SamplingParams(temperature=0.0, frequency_penalty=1.5), SamplingParams(temperature=0.0)]
    states = states_of(params)
    frame = frame_of(states)
    ring = torch.zeros(RING, 2, NOTE + 1, dtype=torch.int64, device=DEVICE)
    rounds = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    root = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    for turn in range(6):
        logits = random_logits(7, 1)
        expected = law_choices(states, logits, TokenTree.chain(root, [1, 1]))[:, 0].tolist()
        bests = block_bests(logits, frame, vocab_size=VOCAB, trail=Trail(root))
        walk_and_commit(bests, root, frame, parents=chain_parents(2, 1, DEVICE), ring=ring, rounds=rounds)
        assert ring[turn % RING, :, NOTE].tolist() == expected
        for state, token in zip(states, expected, strict=True):
            state.tokens.append(token)
    assert len(set(states[0].tokens[-6:])) > 1 and len(set(states[1].tokens[-6:])) == 1


def test_stages_are_those_the_most_demanding_request_needs() -> None:
    def request(**options: Any) -> Request:
        return Request([1, 2], SamplingParams(**options), eos_ids=frozenset(range(20)))

    plain, cut = request(temperature=0.5), request(temperature=0.5, top_p=0.9)
    assert stages_for([plain]) == Stages.TEMPERATURE and stages_for([plain, cut]) == Stages.TOP_P
    assert stages_for([cut, request(temperature=0.5, top_k=4)]) == Stages.TOP_K
    assert stages_for([cut, request(temperature=1.0, typical_p=0.5)]) == Stages.TYPICAL
    assert stages_for([request(top_p=0.5)]) == Stages.TEMPERATURE, "a greedy choice is not truncated"
    assert stages_for([request(logprobs=20)]) == Stages.TEMPERATURE and stages_for([request(logprobs=21)]) is None
    assert stages_for([request(logits_processors=[lambda tokens, logits: logits])]) is None
    assert stages_for([request(min_tokens=3)]) is None, "more tokens end this text than a slot has room for"
    assert use_of(SamplingParams(logit_bias={1: 2.0}, frequency_penalty=1.0)) == Use.BIAS | Use.PENALTIES
