"""A captured round of a divided model, its two ranks as threads that take turns: what a follower does, what both choose."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_interpreter import DEVICE

from outrider.core.device_round import Frame
from outrider.device.acceptance.coupled import move_path
from outrider.device.sampling.choose import Bests, block_bests
from outrider.device.shared_round import FollowedRound, RoundSpec, Sent, best_columns, sent_to_all, unpacked
from outrider.models.config import ModelConfig
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.models.rank_sums import Joint
from outrider.models.share import Share
from outrider.models.weights import Weights

HEADS = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
CONFIG = tiny_config(**HEADS, attention_bias=True, mlp_bias=True)
WEIGHTS = tiny_weights(CONFIG, device=str(DEVICE))
PAGE_LEN = 8


class Turns:
    """Threads of which one runs at a time: interpreted kernels must not run side by side."""

    def __init__(self, size: int) -> None:
        self.terms: list[Tensor] = [torch.zeros(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.turn = threading.Lock()

    def meet(self) -> None:
        self.turn.release()
        self.barrier.wait()
        self.turn.acquire()


class InTurn(Joint):
    """A rank that is such a thread."""

    def __init__(self, turns: Turns, rank: int, spans: Sequence[tuple[int, int]]) -> None:
        self._turns, self.rank, self.spans = turns, rank, spans

    def gather(self, values: Tensor) -> list[Tensor]:
        self._turns.terms[self.rank] = values.clone()
        self._turns.meet()
        found = list(self._turns.terms)
        self._turns.meet()
        return found

    def of(self, rank: int, values: Tensor) -> Tensor:
        return self.gather(values)[rank]


def shares_of(turns: Turns, config: ModelConfig, weights: Weights, size: int = 2) -> list[FastDecoder]:
    found = list[FastDecoder]()
    for rank in range(size):
        share = Share(rank, size)
        layers = [share.layer(config, layer) for layer in weights.layers]
        embedding = share.rows(weights.embedding)
        head = embedding if weights.head is weights.embedding else share.rows(weights.head)
        mine = replace(weights, embedding=embedding, layers=layers, head=head)
        joint = InTurn(turns, rank, [Share(other, size).span(config.vocab_size) for other in range(size)])
        part = replace(share.config(config), vocab_size=config.vocab_size)
        found.append(FastDecoder(part, mine, numerics="invariant", page_len=PAGE_LEN, joint=joint))
    return found


def sent() -> Sent:
    """Two rows: a tree of a root with two children, behind 5 and 2 tokens."""
    whole = {"dtype": torch.int64, "device": DEVICE}
    nodes = torch.tensor([[3, 4, 5], [9, 8, -1]], **whole)
    lengths, prompts = torch.tensor([6, 3], **whole), torch.tensor([4, 3], **whole)
    words = torch.tensor([[[1], [3], [5]]] * 2, **whole)
    depths = torch.tensor([[0, 1, 1]] * 2, dtype=torch.int32, device=DEVICE)
    paths = torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 2, 0]]] * 2, dtype=torch.int32, device=DEVICE)
    pages = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=DEVICE)
    warm = torch.tensor([0.0, 0.9], device=DEVICE)
    return Sent(nodes, lengths, prompts, torch.tensor([7, -3], **whole), warm, pages, words, depths, paths)


PATH = torch.tensor([[5, 1, 2, 0], [2, 0, 0, 0]], device=DEVICE)
"""Row 0 goes on with its second child, row 1 with none."""


def frame_of(given: Sent) -> Frame:
    still = torch.zeros_like(given.lengths)
    return Frame(given.nodes, given.lengths, still, given.prompt_lens, given.seeds, given.temperatures)


def led(target: FastDecoder, given: Sent, *, is_gathered: bool) -> Bests:
    """What the first rank does of a round, without a draft and a walk."""
    joint, frame = target.joint, frame_of(given)
    logits, _ = target.forward_beside(sent_to_all(given, joint).groups(target))
    if is_gathered:
        found = block_bests(joint.gather_vocabulary(logits), frame, depths=given.depths, vocab_size=CONFIG.vocab_size)
    else:
        found = best_columns(logits, frame, depths=given.depths, joint=joint)
    joint.of(0, PATH)
    move_path(target.pool.block, given.groups(target)[0][1].rows, PATH)
    return found


def choices(bests: Bests) -> list[list[int]]:
    return bests.tokens.gather(-1, bests.values.argmax(-1, keepdim=True))[..., 0].tolist()


def test_what_is_sent_arrives() -> None:
    given = sent()
    found = unpacked(given.packed(), given.layout)
    for name, tensor in vars(given).items():
        other = vars(found)[name]
        assert other is None if tensor is None else other.dtype == tensor.dtype and torch.equal(other, tensor)


@pytest.mark.parametrize("is_gathered", [False, True])
def test_two_ranks_choose_and_keep_what_one_does(is_gathered: bool) -> None:
    given, turns = sent(), Turns(2)
    whole = FastDecoder(CONFIG, WEIGHTS, numerics="invariant", page_len=PAGE_LEN)
    shares = shares_of(turns, CONFIG, WEIGHTS)
    for model in (whole, *shares):
        model.pool.hold(6)
    spec = RoundSpec(given.layout, (), is_gathered, PATH.shape[1])

    def run(rank: int) -> Bests | None:
        with turns.turn, torch.inference_mode():
            return led(shares[0], given, is_gathered=is_gathered) if rank == 0 else FollowedRound(shares[1], spec).run()

    with ThreadPoolExecutor(2) as threads:
        bests = next(iter(threads.map(run, range(2))))
    assert bests is not None
    logits, _ = whole.forward_beside(given.groups(whole))
    expected = block_bests(logits, frame_of(given), depths=given.depths, vocab_size=CONFIG.vocab_size)
    assert choices(bests)[0] == choices(expected)[0] and choices(bests)[1][:2] == choices(expected)[1][:2]
    move_path(whole.pool.block, given.groups(whole)[0][1].rows, PATH)
    kept = torch.cat([share.pool.block for share in shares], 3)
    torch.testing.assert_close(kept, whole.pool.block, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma2", {}), ("cohere", {}), ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2})],
)
def test_half_layers_of_other_kinds_are_summed(family: str, options: dict[str, int]) -> None:
    """Norms behind the sum, attention and MLP side by side, experts with biases."""
    config, given, turns = tiny_config(family, **HEADS, **options), sent(), Turns(2)
    weights = tiny_weights(config, device=str(DEVICE))
    whole, shares = FastDecoder(config, weights, numerics="invariant", page_len=PAGE_LEN), shares_of(turns, config, weights)
    for model in (whole, *shares):
        model.pool.hold(6)

    def run(share: FastDecoder) -> Tensor:
        with turns.turn, torch.inference_mode():
            return share.forward_beside(given.groups(share))[0][..., : share.joint.num_tokens]

    with ThreadPoolExecutor(2) as threads:
        found = torch.cat(list(threads.map(run, shares)), -1)
    expected = whole.forward_beside(given.groups(whole))[0]
    torch.testing.assert_close(found[0], expected[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found[1, :2], expected[1, :2], atol=2e-3, rtol=2e-3)
