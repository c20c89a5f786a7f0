"""EAGLE in a captured round against its twin: the same trees, in the second round too, from what the first one left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_device_tree import frame_of
from tiny_heads import CHANGES
from triton_interpreter import DEVICE

from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.eagle import Eagle
from outrider.drafters.head_tree import HeadOptions
from outrider.models.decoder import Decoder
from outrider.models.gpu.branches import StaticTree
from outrider.models.gpu.choose import NOTE, RING
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.eagle import DeviceEagle
from outrider.models.gpu.walk import walk_and_commit
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.ends import Ends
from outrider.models.heads.folder import new_config, new_head
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.models.weights import LayerWeights, Weights

SHAPE = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
RAW = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
TEMPERATURES = [0.0, 0.9]


def small_head(kind: str) -> EagleHead:
    torch.manual_seed(1)
    config = new_config(kind, {**RAW, **SHAPE, "max_position_embeddings": 256, "rope_theta": 1e4}, **CHANGES[kind])
    ends = Ends(torch.randn(64, 32), torch.ones(32), torch.randn(64, 32) / 3, tied=False)
    head = new_head(config, ends, ids=torch.randperm(64)[: config.draft_vocab_size].sort().values)
    assert isinstance(head, EagleHead)
    return head.to(DEVICE).requires_grad_(False)


def expected(twin: Eagle, target: Decoder, rows: list[list[int]], noise: Noise) -> torch.Tensor:
    """What the drafter proposes for rows it has just met."""
    states = [RequestState.of(Request(r[:-1], SamplingParams(temperature=t))) for r, t in zip(rows, TEMPERATURES, strict=True)]
    for state, row in zip(states, rows, strict=True):
        state.output_ids.append(row[-1])
    context = Context(rows, Sampler(states, 64, DEVICE), noise, DEVICE)
    taps = target.prefill([row[:-1] for row in rows], target.new_cache(2), taps=twin.taps)
    with torch.inference_mode():
        return twin.propose(twin.start(rows, taps), context, Plan((3, 3), (9, 9))).tree.tokens


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_eagles_tree_is_that_of_its_twin(kind: str) -> None:
    config = tiny_config(**SHAPE)
    weights = tiny_weights(config, device=str(DEVICE))
    slow, fast, head = Decoder(config, weights), FastDecoder(config, weights), small_head(kind)
    twin = Eagle(head, HeadOptions(branching="3,1,1"))
    tree = twin.static_tree
    assert tree is not None
    ranks = [path[-1] if path else 0 for path in tree.paths]
    drafter = DeviceEagle(head, fast, parents=tree.parents, ranks=ranks)
    rows = [[5, 9, 1, 33, 7, 2], [2, 8, 4, 1, 6]]
    drafter.seat([0, 1], rows, batch_size=2, capacity=64)
    static = StaticTree.of(tree.parents, DEVICE)
    for _ in range(3):
        frame = frame_of(rows, TEMPERATURES)
        nodes = torch.zeros(2, len(tree.paths), dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        with torch.inference_mode():
            drafter.propose(frame, nodes)
        noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens)
        assert torch.equal(nodes, expected(twin, slow, rows, noise))
        before, ring = frame.lengths - 1, torch.zeros(RING, 2, NOTE + 4, dtype=torch.int64, device=DEVICE)
        choices = torch.randint(0, 64, (2, len(tree.paths)), device=DEVICE)
        choices[0, 0], choices[0, 2], choices[1, 0] = nodes[0, 2], nodes[0, 5], nodes[1, 1]  # two accepted, one accepted
        bests = torch.ones(*choices.shape, 1, device=DEVICE), choices[..., None].contiguous()
        rounds = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        path = walk_and_commit(bests, nodes, frame, tree=static, ring=ring, rounds=rounds)
        found = [states_of(slow, row, nodes[slot].tolist(), tree.parents, drafter.taps) for slot, row in enumerate(rows)]
        drafter.take(before, torch.stack(found), path)
        rows = [frame.tokens[slot, : int(frame.lengths[slot])].tolist() for slot in range(2)]
        assert len(rows[0]) >= int(before[0]) + 3


def states_of(
    target: Decoder, row: list[int], nodes: list[int], parents: tuple[int, ...], taps: tuple[int, ...]
) -> torch.Tensor:
    """[N, F] the target's states of a tree's nodes, each computed alone behind its ancestors."""
    found = []
    for node in range(len(nodes)):
        path, at = list[int](), node
        while at > 0:
            path.append(nodes[at])
            at = parents[at]
        states = target.prefill([[*row, *path[::-1]]], target.new_cache(1), taps=taps)
        found.append(torch.cat([states[tap][0][-1] for tap in taps], -1))
    return torch.stack(found)


def test_taps_do_not_change_a_pass() -> None:
    """In half precision to the last bit, else speculation would not say what plain decoding says."""
    config = tiny_config(num_hidden_layers=3, **SHAPE)
    whole = tiny_weights(config, device=str(DEVICE))
    halves = [{name: t if t is None else t.half() for name, t in vars(layer).items()} for layer in whole.layers]
    layers = [LayerWeights(**half) for half in halves]
    weights = Weights(whole.embedding.half(), layers, whole.norm.half(), whole.head.half())
    target = FastDecoder(config, weights, numerics="invariant")
    tree, cache = TokenTree.chain(torch.tensor([[5, 9, 1, 33, 7]], device=DEVICE)), target.new_cache(1)
    cache.reserve(5)
    step = target.step_of(tree, cache)
    plain, _ = target.forward(tree.tokens, step)
    tapped, states = target.forward(tree.tokens, step, taps=(1, 2, 3))
    assert torch.equal(plain, tapped) and set(states) == {1, 2, 3}


def test_only_static_shapes_have_a_twin() -> None:
    head, cuda = small_head("eagle3"), torch.device("cuda")
    assert HeadOptions().on_device(torch.device("cpu")).is_best_first and not HeadOptions().on_device(cuda).is_best_first
    assert Eagle(head, HeadOptions().on_device(cuda)).static_tree is not None
    assert Eagle(head, HeadOptions(branching="best-first").on_device(cuda)).static_tree is None
    assert Eagle(head, HeadOptions()).static_tree is None
    assert Eagle(head, replace(HeadOptions(branching="2,1"), perturb=False)).static_tree is None
