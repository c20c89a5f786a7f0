"""Trees in a captured round against their twins: the draft model's tree, the coupled walk, the commit of a branch."""

from __future__ import annotations

import random

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.acceptance.coupled import followed
from outrider.cache.contiguous import ContiguousCache
from outrider.core.device_round import Frame, Texts
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.device.acceptance.coupled import NOTE, RING, move_path, walk_and_commit
from outrider.device.drafters.model.best_first import DeviceBestFirst
from outrider.device.drafters.model.draft_tree import DeviceTree, StaticTree
from outrider.device.drafters.trees.best_first import Search
from outrider.device.sampling.choose import Bests
from outrider.drafters.model.best_first import BestFirst, BestFirstOptions
from outrider.drafters.model.draft_tree import DraftTree, DraftTreeOptions, TreeDrafter
from outrider.models.attention.tree_tiles import Rows
from outrider.models.decoder import Decoder
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights

SHAPES = [(2, 2), ((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0))]


def frame_of(rows: list[list[int]], temperatures: list[float], capacity: int = 64) -> Frame:
    frame = Frame.empty(len(rows), capacity, DEVICE)
    for slot, row in enumerate(rows):
        frame.tokens[slot, : len(row)] = torch.tensor(row)
    frame.lengths.copy_(torch.tensor([len(row) for row in rows]))
    frame.limits.fill_(capacity)
    frame.prompt_lens.copy_(frame.lengths - 1)
    frame.seeds.copy_(torch.tensor([7, -3]))
    frame.temperatures.copy_(torch.tensor(temperatures))
    return frame


def options_of(shape: tuple) -> DraftTreeOptions:
    return DraftTreeOptions(branching=shape) if isinstance(shape[0], int) else DraftTreeOptions(rank_paths=shape)


def proposed(twin: TreeDrafter, rows: list[list[int]], frame: Frame, plan: Plan) -> TokenTree:
    """What the drafter proposes for rows it has just met, at the frame's temperatures and noise."""
    temperatures = frame.temperatures.tolist()
    states = [
        RequestState.of(Request(row[:-1], SamplingParams(temperature=t))) for row, t in zip(rows, temperatures, strict=True)
    ]
    for state, row in zip(states, rows, strict=True):
        state.output_ids.append(row[-1])
    noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens)
    context = Context(rows, Sampler(states, 64, DEVICE), noise, DEVICE)
    return twin.propose(twin.start(rows, {}), context, plan).tree


@pytest.mark.parametrize("shape", [*SHAPES, None], ids=["branching", "paths", "best-first"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_a_draft_models_tree_is_that_of_its_twin(shape: tuple | None, numerics: str) -> None:
    """In the second round too, when the draft's cache lacks what the first one added."""
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    weights = tiny_weights(config, device=str(DEVICE))
    slow, fast = Decoder(config, weights), FastDecoder(config, weights, numerics=numerics)
    if shape is None:
        search = Search(max_depth=3, num_nodes=10, width=3, num_children=4, tau=0.9)
        twin, plan = BestFirst(slow, BestFirstOptions(3, 4, 0.9), vocab_size=64), Plan((3, 3), (9, 9))
        drafter = DeviceBestFirst(fast, vocab_size=64, searches={3: search})
    else:
        twin = DraftTree(slow, options_of(shape), vocab_size=64)
        tree = twin.tree
        plan, ranks = Plan((tree.max_depth,) * 2, (tree.num_nodes,) * 2), [path[-1] if path else 0 for path in tree.paths]
        drafter = DeviceTree(fast, {tree.max_depth: (tree.parents, ranks)}, vocab_size=64)
    rows = [[5, 9, 1, 33, 7], [2, 8]]  # the second is shorter than what is read again
    drafter.seat(Texts([0, 1], rows), batch_size=2)
    for round_number in range(2):
        frame = frame_of(rows, [0.0, 0.9])
        expected = proposed(twin, rows, frame, plan)
        nodes = torch.zeros(2, expected.num_nodes, dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        drafter.propose(frame, nodes, plan.max_depth[0])
        assert torch.equal(nodes, expected.tokens), round_number
        assert torch.equal(drafter.trees(2, plan.max_depth[0]).parents, expected.parents)
        rows = [[*row, *more] for row, more in zip(rows, ([3, 4], [6, 2]), strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_the_walk_is_that_of_the_coupled_rule(seed: int) -> None:
    draw = random.Random(seed)
    parents = [-1, *(draw.randrange(n) for n in range(1, 9))]
    tokens, choices = (torch.tensor([[draw.randrange(3) for _ in parents] for _ in range(2)], device=DEVICE) for _ in range(2))
    tree = TokenTree(tokens, torch.tensor([parents] * 2, device=DEVICE), (9, 9))
    expected = followed(tree, choices)
    static = StaticTree.of(parents, DEVICE)
    frame = frame_of([[1, 2], [3, 4, 5]], [0.0, 0.0])
    frame.limits[1] = 5  # room for two tokens
    ring = torch.zeros(RING, 2, NOTE + static.max_depth + 1, dtype=torch.int64, device=DEVICE)
    rounds = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    bests = Bests(torch.ones(2, 9, 1, device=DEVICE), choices[..., None].contiguous())
    path = walk_and_commit(bests, tokens, frame, parents=static.trees(2).parents, ring=ring, rounds=rounds)
    for row, base in enumerate((1, 2)):
        count = int(expected.num_accepted[row])
        assert path[row, :2].tolist() == [base, count]
        assert path[row, 2 : 2 + count].tolist() == expected.path[row, :count].tolist()
        text = [*tokens[row, expected.path[row, :count]].tolist(), int(expected.next_token[row])]
        text = text[:2] if row == 1 else text
        assert ring[0, row, :NOTE].tolist() == [len(text), 8, count, int(expected.rejected[row])]
        assert ring[0, row, NOTE : NOTE + len(text)].tolist() == text
        assert int(frame.lengths[row]) == base + 1 + len(text)
        assert frame.tokens[row, base + 1 : base + 1 + len(text)].tolist() == text


@pytest.mark.parametrize("page_len", [0, 4])
def test_a_branch_moves_as_a_cache_commits_it(page_len: int) -> None:
    block = torch.randn(2, 2, 3, 2, 16, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    places, paths, bases = [2, 0], [[0, 2, 5], [0, 1, 4, 7]], [3, 6]
    cache = ContiguousCache(block[:, :, places].clone(), bases)
    cache.commit(paths)
    table = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    for row, (base, nodes) in enumerate(zip(bases, paths, strict=True)):
        table[row, : 1 + len(nodes)] = torch.tensor([base, len(nodes) - 1, *nodes[1:]])
    lengths, where = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (bases, places))
    if page_len:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).to(DEVICE)  # pages anywhere
        pages = block.unflatten(4, (-1, page_len)).transpose(3, 4).flatten(2, 3)
        scattered = torch.empty_like(pages).index_copy(2, order, pages).contiguous()
        move_path(scattered, Rows(lengths, order.view(3, 4)[where.long()].int().contiguous(), page_len), table)
        block = scattered[:, :, order].unflatten(2, (3, 4)).transpose(3, 4).flatten(4, 5)
    else:
        move_path(block, Rows(lengths, where), table)
    for row, place in enumerate(places):
        length = cache.lengths[row]
        assert torch.equal(block[:, :, place, :, :length], cache.block[:, :, row, :, :length])
