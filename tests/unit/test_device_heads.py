"""Heads in a captured round against their twins: the same trees, in later rounds too, from what the earlier ones left."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from test_device_tree import frame_of
from tiny_heads import CHANGES
from triton_interpreter import DEVICE

from outrider.core.device_round import PIECE_LEN, CapturedShape, DeviceDrafter, Frame, LateTexts, PromptPieces, Texts
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.device.acceptance.coupled import NOTE, RING, walk_and_commit
from outrider.device.sampling.choose import Bests
from outrider.drafters.heads.head_drafter import HeadDrafter
from outrider.drafters.heads.head_options import HeadOptions
from outrider.methods import METHODS
from outrider.models.attention.tree_triton import pack_words
from outrider.models.decoder import Decoder
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config, new_head
from outrider.models.heads.head import Head
from outrider.models.random_decoder import tiny_config, tiny_weights

SHAPE: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
RAW = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
TEMPERATURES = [0.0, 0.9]
GROWN = [
    ("eagle1", "best-first"),
    ("eagle3", "static"),
    ("medusa", "best-first"),
    ("hydra", "static"),
    ("hydra++", "best-first"),  # with a prefix layer
    ("l-mtp", "static"),
    ("mlp-speculator", "best-first"),
    ("redrafter", "best-first"),
    ("dflash", "static"),
    ("dspark", "best-first"),
    ("fspad", "best-first"),
    ("p-eagle", "static"),
    ("mtp", "best-first"),
    ("mtp-parallel", "static"),
    ("chimera", "best-first"),
    ("falcon", "best-first"),
]
READING = ["eagle3", "l-mtp", "hydra++", "dflash", "fspad", "p-eagle", "mtp", "chimera", "falcon"]
OWN: dict[str, dict[str, Any]] = {"hydra": {"prefix": False}}


def small_head(kind: str) -> Head:
    torch.manual_seed(1)
    changes, kind = {**CHANGES[kind.rstrip("+")], **OWN.get(kind, {})}, kind.rstrip("+")
    config = new_config(kind, {**RAW, **SHAPE, "max_position_embeddings": 256, "rope_theta": 1e4}, **changes)
    ends = EmbeddingAndOutput(torch.randn(64, 32), torch.ones(32), torch.randn(64, 32) / 3, tied=False)
    head = new_head(config, ends, ids=torch.randperm(64)[: config.draft_vocab_size].sort().values)
    with torch.no_grad():  # parts that start at zero would hide mistakes
        for parameter in head.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return head.to(DEVICE).requires_grad_(False)


def expected(drafter: HeadDrafter, target: Decoder, rows: list[list[int]], noise: Noise, plan: Plan) -> TokenTree:
    """What the drafter proposes for rows it has just met."""
    states = [RequestState.of(Request(r[:-1], SamplingParams(temperature=t))) for r, t in zip(rows, TEMPERATURES, strict=True)]
    for state, row in zip(states, rows, strict=True):
        state.output_ids.append(row[-1])
    context = Context(rows, Sampler(states, 64, DEVICE), noise, DEVICE)
    taps = target.prefill([row[:-1] for row in rows], target.new_cache(2), taps=drafter.taps)
    with torch.inference_mode():
        return drafter.propose(drafter.start(rows, taps), context, plan).tree


def drafters(kind: str, target: Decoder, shape: str) -> tuple[HeadDrafter, DeviceDrafter, CapturedShape]:
    """A drafter, the twin it declares, and what both may be asked for."""
    options = HeadOptions(branching="3,1,1") if shape == "static" else HeadOptions(width=3, num_children=4)
    new_drafter: Any = METHODS[kind.rstrip("+")].drafter
    drafter, planned = new_drafter(small_head(kind), options), CapturedShape({2: 6, 3: 9 if shape == "static" else 11})
    twin = drafter.device_twin(planned, target)
    assert twin is not None
    return drafter, twin, planned


@pytest.mark.parametrize(("kind", "shape"), GROWN)
def test_heads_grow_the_tree_of_their_twin(kind: str, shape: str) -> None:
    config = tiny_config(**SHAPE)
    target = Decoder(config, tiny_weights(config, device=str(DEVICE)))
    drafter, twin, planned = drafters(kind, target, shape)
    rows = [[5, 9, 1, 33, 7, 2], [2, 8]]  # the second is shorter than what is read again
    twin.seat(Texts([0, 1], rows), batch_size=2)
    for depth in (3, 2, 3):
        frame, plan = frame_of(rows, TEMPERATURES), Plan((depth, depth), (planned.guesses[depth],) * 2)
        nodes = torch.zeros(2, twin.num_nodes(depth), dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        with torch.inference_mode():
            twin.propose(frame, nodes, depth)
        noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens)
        tree, trees = expected(drafter, target, rows, noise, plan), twin.trees(2, depth)
        assert trees is not None
        for row, size in enumerate(tree.sizes):
            assert torch.equal(nodes[row, :size], tree.tokens[row, :size]) and (nodes[row, size:] == -1).all()
            assert torch.equal(trees.parents[row, :size], tree.parents[row, :size])
            assert torch.equal(trees.words[row, :size], pack_words(tree.ancestors)[row, :size])
            assert torch.equal(trees.depths[row, :size], tree.depths[row, :size].int())
            for node in range(size):
                assert trees.paths[row, node, : int(tree.depths[row, node]) + 1].tolist() == [0, *tree.path(row, node)]
        before, ring = frame.lengths - 1, torch.zeros(RING, 2, NOTE + depth + 1, dtype=torch.int64, device=DEVICE)
        choices = torch.randint(0, 64, nodes.shape, device=DEVICE)
        follow(choices[0], nodes[0], tree, 0, 2)  # two accepted, one accepted
        follow(choices[1], nodes[1], tree, 1, 1)
        bests = Bests(torch.ones(*choices.shape, 1, device=DEVICE), choices[..., None].contiguous())
        rounds = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        path = walk_and_commit(bests, nodes, frame, parents=trees.parents, ring=ring, rounds=rounds)
        parents = [tuple(row) for row in trees.parents.tolist()]
        found = [
            states_of(target, row, nodes[slot].clamp(min=0).tolist(), parents[slot], twin.taps) for slot, row in enumerate(rows)
        ]
        twin.take(frame, before, torch.stack(found), path)
        rows = [frame.tokens[slot, : int(frame.lengths[slot])].tolist() for slot in range(2)]
        assert len(rows[0]) >= int(before[0]) + 3


@pytest.mark.parametrize("kind", READING)
def test_a_head_reads_prompts_in_pieces(kind: str) -> None:
    config = tiny_config(**SHAPE)
    target = Decoder(config, tiny_weights(config, device=str(DEVICE)))
    rows = [[2, 8, 4], [(7 * place) % 61 for place in range(40)]]
    found: list[list[list[int]]] = []
    for in_pieces in (False, True):
        _, drafter, _ = drafters(kind, target, "static")
        frame = frame_of(rows, TEMPERATURES, capacity=128)
        nodes = torch.zeros(2, drafter.num_nodes(3), dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        drafter.seat(Texts([0], rows[:1]), batch_size=2)
        states = target.prefill([rows[1][:-1]], target.new_cache(1), taps=drafter.taps)
        features = torch.cat([states[tap][0] for tap in drafter.taps], -1)
        still = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
        with torch.inference_mode():
            if in_pieces:
                drafter.open([1], batch_size=2)
                for start in (0, PIECE_LEN):
                    piece = torch.zeros(2, PIECE_LEN, features.shape[-1], device=DEVICE)
                    part = features[start : start + PIECE_LEN]
                    piece[1, : len(part)] = part
                    table = torch.tensor([[-1, 1], [0, start]], device=DEVICE)
                    drafter.propose(frame, nodes.clone(), 3)  # a slot that stands still
                    drafter.read(frame, PromptPieces(*table), piece)
                    drafter.take(frame, frame.lengths - 1, torch.randn(2, nodes.shape[1], features.shape[-1]), still)
            else:
                drafter.seat(Texts([1], rows[1:]), batch_size=2)
            drafter.propose(frame, nodes, 3)
        found.append(nodes.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "p-eagle", "mtp"])
def test_chains_are_as_long_as_a_round_wants(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length changes from round to round, and heads answer for no more levels than it has."""
    config = tiny_config(**SHAPE)
    target = Decoder(config, tiny_weights(config, device=str(DEVICE)))
    head, new_drafter = small_head(kind), cast(Any, METHODS[kind].drafter)
    drafter = new_drafter(head, HeadOptions(branching="chain"))
    twin = drafter.device_twin(CapturedShape({length: length for length in range(1, 7)}), target)
    assert twin is not None and twin.max_depth == min(6, drafter.max_depth or 6) and twin.trees(2, 1) is None
    rows, asked = [[5, 9, 1, 33, 7, 2], [2, 8]], list[int]()
    twin.seat(Texts([0, 1], rows), batch_size=2)
    frame, readout = frame_of(rows, TEMPERATURES), type(head).readout
    monkeypatch.setattr(type(head), "readout", lambda self, depth, x: asked.append(depth) or readout(self, depth, x))
    for length in (1, twin.max_depth, 2):
        nodes = torch.zeros(2, twin.num_nodes(length), dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        asked.clear()
        with torch.inference_mode():
            twin.propose(frame, nodes, length)
        assert asked == ([] if kind == "eagle3" else list(range(length)))  # its layer reads off by itself
        noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens)
        chain = expected(drafter, target, rows, noise, Plan((length, length), (length, length)))
        assert chain.sizes == (1 + length, 1 + length) and torch.equal(nodes, chain.tokens)


@pytest.mark.parametrize(("kind", "drafts_first"), [*((kind, True) for kind in READING[1:]), ("p-eagle", False)])
def test_heads_read_late_what_rounds_without_guesses_added(
    kind: str, drafts_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More columns than are kept, and they come around the end of the ring; the second slot stands still meanwhile. Before them
    may come a round with guesses, whose states some heads have not read yet."""
    monkeypatch.setattr("outrider.device.drafters.heads.slots._MOST_LATE", 16)
    config = tiny_config(**SHAPE)
    target = Decoder(config, tiny_weights(config, device=str(DEVICE)))
    drafter, twin, planned = drafters(kind, target, "static")
    rows, size = [[5, 9, 1, 33, 7, 2], [2, 8, 4]], 0
    twin.seat(Texts([0, 1], rows), batch_size=2)
    for added in ([11, 12, 13] if drafts_first else [11], *[[token] for token in range(14, 24)]):
        before = torch.tensor([len(row) - 1 for row in rows], device=DEVICE)
        rows[0] += added
        states = target.prefill([rows[0][:-1]], target.new_cache(1), taps=twin.taps)
        newest = torch.cat([states[tap][0][-len(added) :] for tap in twin.taps], -1)
        features, size = torch.stack([newest, torch.randn_like(newest)]), size + len(added)
        with torch.inference_mode():
            twin.take(frame_of(rows, TEMPERATURES), before, features, None)
    late = size - 3 if drafts_first else size
    twin.catch_up(LateTexts([0], rows[:1], [len(rows[0]) - late - 1], [late]), batch_size=2)
    frame = frame_of(rows, TEMPERATURES)
    nodes = torch.zeros(2, twin.num_nodes(3), dtype=torch.int64, device=DEVICE)
    nodes[:, 0] = torch.tensor([row[-1] for row in rows])
    with torch.inference_mode():
        twin.propose(frame, nodes, 3)
    plan = Plan((3, 3), (planned.guesses[3],) * 2)
    tree = expected(drafter, target, rows, Noise(frame.seeds, frame.lengths - frame.prompt_lens), plan)
    assert torch.equal(nodes, tree.tokens)


@pytest.mark.parametrize("kind", ["hydra++", "falcon"])
def test_a_head_follows_its_request_to_another_frame(kind: str) -> None:
    """Its pages are handed over, and the slots that others left are nobody's."""
    config = tiny_config(**SHAPE)
    target = Decoder(config, tiny_weights(config, device=str(DEVICE)))
    _, twin, _ = drafters(kind, target, "best-first")
    rows = [[2, 8, 4], [5, 9, 1, 33, 7, 2]]
    frame, nodes = frame_of(rows, TEMPERATURES), torch.zeros(2, twin.num_nodes(3), dtype=torch.int64, device=DEVICE)
    nodes[:, 0] = torch.tensor([row[-1] for row in rows])
    twin.seat(Texts([0, 1], rows), batch_size=2)
    names = ("tokens", "lengths", "limits", "prompt_lens", "seeds", "temperatures")
    alone = Frame(*(getattr(frame, name)[1:] for name in names))
    moved = nodes[1:].clone()
    with torch.inference_mode():
        twin.propose(frame, nodes, 3)
        twin.release([0], batch_size=2)
        twin.move(2, 1, [1])
        twin.propose(alone, moved, 3)
    assert torch.equal(moved[0], nodes[1])


def follow(choices: torch.Tensor, nodes: torch.Tensor, tree: TokenTree, row: int, count: int) -> None:
    """Let the target choose the way to some node at depth ``count``."""
    path = [0, *tree.path(row, int((tree.depths[row, : tree.sizes[row]] == count).nonzero()[-1]))]
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
