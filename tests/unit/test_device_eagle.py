"""EAGLE in a captured round against its twin: the same trees, in the second round too, from what the first one left behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_device_tree import frame_of
from tiny_heads import CHANGES
from triton_interpreter import DEVICE

from outrider.core.device_round import PIECE_LEN, Pieces
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_drafter import HeadOptions
from outrider.models.attention.tree_triton import pack_words
from outrider.models.decoder import Decoder
from outrider.models.gpu.best_first import Search
from outrider.models.gpu.choose import Bests
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.eagle import BestFirstEagle, DeviceEagle, StaticEagle
from outrider.models.gpu.head_layer import together
from outrider.models.gpu.walk import NOTE, RING, walk_and_commit
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


def expected(twin: Eagle, target: Decoder, rows: list[list[int]], noise: Noise, plan: Plan) -> TokenTree:
    """What the drafter proposes for rows it has just met."""
    states = [RequestState.of(Request(r[:-1], SamplingParams(temperature=t))) for r, t in zip(rows, TEMPERATURES, strict=True)]
    for state, row in zip(states, rows, strict=True):
        state.output_ids.append(row[-1])
    context = Context(rows, Sampler(states, 64, DEVICE), noise, DEVICE)
    taps = target.prefill([row[:-1] for row in rows], target.new_cache(2), taps=twin.taps)
    with torch.inference_mode():
        return twin.propose(twin.start(rows, taps), context, plan).tree


def drafters(head: EagleHead, target: FastDecoder, shape: str) -> tuple[Eagle, DeviceEagle, Plan]:
    """A drafter, its twin on the device, and what both are asked for."""
    if shape == "static":
        twin = Eagle(head, HeadOptions(branching="3,1,1"))
        tree = twin.static_tree
        assert tree is not None
        ranks = [path[-1] if path else 0 for path in tree.paths]
        return twin, StaticEagle(head, target, parents=tree.parents, ranks=ranks), Plan((3, 3), (9, 9))
    twin = Eagle(head, HeadOptions(width=3, num_children=4))
    assert twin.search is not None
    search = Search(max_depth=3, num_nodes=12, width=3, num_children=4, tau=twin.search.tau)
    return twin, BestFirstEagle(head, target, search=search), Plan((3, 3), (11, 11))


@pytest.mark.parametrize("shape", ["static", "best-first"])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_eagles_tree_is_that_of_its_twin(kind: str, shape: str) -> None:
    config = tiny_config(**SHAPE)
    weights = tiny_weights(config, device=str(DEVICE))
    slow, fast, head = Decoder(config, weights), FastDecoder(config, weights), small_head(kind)
    twin, drafter, plan = drafters(head, fast, shape)
    assert drafter.tree_size is not None
    rows = [[5, 9, 1, 33, 7, 2], [2, 8]]  # the second is shorter than what is read again
    drafter.seat([0, 1], rows, batch_size=2, capacity=64)
    for _ in range(3):
        frame = frame_of(rows, TEMPERATURES)
        nodes = torch.zeros(2, drafter.tree_size[0], dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        with torch.inference_mode():
            drafter.propose(frame, nodes)
        noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens)
        tree, trees = expected(twin, slow, rows, noise, plan), drafter.trees(2)
        assert torch.equal(nodes, tree.tokens) and torch.equal(trees.parents, tree.parents)
        assert torch.equal(trees.words, pack_words(tree.ancestors)) and torch.equal(trees.depths, tree.depths.int())
        for row, node in ((row, node) for row in range(2) for node in range(nodes.shape[1])):
            assert trees.paths[row, node, : int(tree.depths[row, node]) + 1].tolist() == [0, *tree.path(row, node)]
        before, ring = frame.lengths - 1, torch.zeros(RING, 2, NOTE + 4, dtype=torch.int64, device=DEVICE)
        choices = torch.randint(0, 64, nodes.shape, device=DEVICE)
        follow(choices[0], nodes[0], tree, 0, 2)  # two accepted, one accepted
        follow(choices[1], nodes[1], tree, 1, 1)
        bests = Bests(torch.ones(*choices.shape, 1, device=DEVICE), choices[..., None].contiguous())
        rounds = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        path = walk_and_commit(bests, nodes, frame, parents=trees.parents, ring=ring, rounds=rounds)
        parents = [tuple(row) for row in trees.parents.tolist()]
        found = [states_of(slow, row, nodes[slot].tolist(), parents[slot], drafter.taps) for slot, row in enumerate(rows)]
        drafter.take(before, torch.stack(found), path)
        rows = [frame.tokens[slot, : int(frame.lengths[slot])].tolist() for slot in range(2)]
        assert len(rows[0]) >= int(before[0]) + 3


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_head_reads_prompts_in_pieces(kind: str) -> None:
    config = tiny_config(**SHAPE)
    target, head = FastDecoder(config, tiny_weights(config, device=str(DEVICE))), small_head(kind)
    rows = [[2, 8, 4], [(7 * place) % 61 for place in range(40)]]
    found: list[list[list[int]]] = []
    for in_pieces in (False, True):
        _, drafter, _ = drafters(head, target, "static")
        assert drafter.tree_size is not None
        frame = frame_of(rows, TEMPERATURES, capacity=128)
        nodes = torch.zeros(2, drafter.tree_size[0], dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        drafter.seat([0], rows[:1], batch_size=2, capacity=96)
        states = target.prefill([rows[1][:-1]], target.new_cache(1), taps=drafter.taps)
        features = torch.cat([states[tap][0] for tap in drafter.taps], -1)
        with torch.inference_mode():
            if in_pieces:
                drafter.open([1], batch_size=2, capacity=96)
                for start in (0, PIECE_LEN):
                    piece = torch.zeros(2, PIECE_LEN, features.shape[-1], device=DEVICE)
                    part = features[start : start + PIECE_LEN]
                    piece[1, : len(part)] = part
                    table = torch.tensor([[-1, 1], [0, start]], device=DEVICE)
                    drafter.propose(frame, nodes.clone())  # a slot that stands still
                    drafter.read(frame, Pieces(*table), piece)
            else:
                drafter.seat([1], rows[1:], batch_size=2, capacity=96)
            drafter.propose(frame, nodes)
        found.append(nodes.tolist())
    assert found[0] == found[1]


def follow(choices: torch.Tensor, nodes: torch.Tensor, tree: TokenTree, row: int, count: int) -> None:
    """Let the target choose the way to some node at depth ``count``."""
    path = [0, *tree.path(row, int((tree.depths[row] == count).nonzero()[-1]))]
    for above, node in pairwise(path):
        choices[above] = nodes[node]


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


def test_trees_ranked_without_the_noise_have_no_twin() -> None:
    head = small_head("eagle3")
    assert Eagle(head, HeadOptions()).search is not None and Eagle(head, HeadOptions()).static_tree is None
    assert Eagle(head, HeadOptions(branching="2,1")).static_tree is not None
    for branching in (None, "2,1"):
        blind = Eagle(head, replace(HeadOptions(branching=branching), perturb=False))
        assert blind.static_tree is None and blind.search is None


def test_matrices_that_are_read_together_are_held_once() -> None:
    parts = [torch.nn.Linear(8, size, bias=False).requires_grad_(False) for size in (4, 2, 2)]
    before = [part.weight.clone() for part in parts]
    whole = together(parts)
    assert torch.equal(whole, torch.cat(before)) and all(torch.equal(p.weight, b) for p, b in zip(parts, before, strict=True))
    assert together(parts).data_ptr() == whole.data_ptr() == parts[0].weight.data_ptr()
