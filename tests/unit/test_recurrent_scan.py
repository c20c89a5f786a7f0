"""The tree scan and its cache against recurrences run one token at a time, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from recurrence import EXACT, FAMILIES, delta_value, exact_model, fed_one_by_one, one_by_one, random_tree, some_path, written
from tiers import repeats

from outrider.cache.recurrent import RecurrentCache
from outrider.cache.replay import Steps, replayed
from outrider.core.tree import TokenTree
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.scan import DeltaNodes, Fading, Reach, corrections, read

HEADS, GROUPS, SIZE, KEY = 4, 2, 3, 5
LONG = [random.Random(1).randrange(64) for _ in range(300)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def random_steps(num_rows: int, num_columns: int) -> Steps:
    decays = -normal(num_rows, num_columns, HEADS).abs()
    return Steps(decays, normal(num_rows, num_columns, GROUPS, KEY), normal(num_rows, num_columns, HEADS, SIZE))


def per_head(keys: torch.Tensor) -> torch.Tensor:
    return keys.repeat_interleave(HEADS // GROUPS, 0)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> RecurrentDecoder:
    return exact_model(request.param)


@pytest.mark.parametrize("num_logged", [0, 1, 7])
@pytest.mark.parametrize("start", [0, 5])
def test_a_node_reads_the_state_of_its_own_path(num_logged: int, start: int) -> None:
    torch.manual_seed(num_logged)
    tree = TokenTree.of_rows([random_tree(seed, 16) for seed in range(2)])
    steps, state = random_steps(2, num_logged + 16), normal(2, HEADS, SIZE, KEY)
    queries = normal(2, GROUPS, 16 - start, KEY)
    found = read(queries, state, steps, Fading(Reach.of(tree, num_logged, start), steps.decays))
    for row in range(2):
        for node in range(start, 16):
            columns = [*range(num_logged), *(num_logged + n for n in (0, *tree.path(row, node)))]
            now = state[row]
            for column in columns:
                now = written(now, steps.decays[row, column], per_head(steps.keys[row, column]), steps.values[row, column])
            expected = (now * per_head(queries[row, :, node - start])[:, None]).sum(-1)
            assert (found[row, :, node - start] - expected).abs().max() < EXACT


@pytest.mark.parametrize("num_logged", [0, 3])
def test_the_delta_rule_writes_what_its_paths_state_lacks(num_logged: int) -> None:
    torch.manual_seed(2)
    tree = TokenTree.of_rows([random_tree(3, 12)])
    before, state = random_steps(1, num_logged), normal(1, HEADS, SIZE, KEY)
    keys, values = torch.nn.functional.normalize(normal(1, GROUPS, 12, KEY), dim=-1), normal(1, HEADS, 12, SIZE)
    rates, decays = torch.rand(1, HEADS, 12, dtype=torch.float64), -normal(1, 12, HEADS).abs()
    fading = Fading(Reach.of(tree, num_logged, 0), torch.cat((before.decays, decays), 1))
    found = corrections(DeltaNodes(keys, values, rates), state, before, fading)
    for node in range(12):
        now = state[0]
        for column in range(num_logged):
            now = written(now, before.decays[0, column], per_head(before.keys[0, column]), before.values[0, column])
        for step in (0, *tree.path(0, node)):
            key, decay = per_head(keys[0, :, step]), decays[0, step]
            value = delta_value(now, decay, key, values[0, :, step], rates[0, :, step])
            now = written(now, decay, key, value)
        assert (found[0, :, node] - value).abs().max() < EXACT


def test_replay_is_the_recurrence() -> None:
    torch.manual_seed(3)
    steps, state = random_steps(2, 40), normal(2, HEADS, SIZE, KEY)
    found = replayed(state, steps)
    for row in range(2):
        now = state[row]
        for column in range(40):
            now = written(now, steps.decays[row, column], per_head(steps.keys[row, column]), steps.values[row, column])
        assert (found[row] - now).abs().max() < EXACT


@pytest.mark.parametrize("prompt_len", [1, 2, 90])
def test_trees_get_the_scores_of_their_paths_written_out(model: RecurrentDecoder, prompt_len: int) -> None:
    prompts = [LONG[:prompt_len], LONG[7 : 7 + max(1, prompt_len // 3)]]
    tree = TokenTree.of_rows([random_tree(5, 16), random_tree(6, 9)])
    cache = model.new_cache(2)
    model.prefill(prompts, cache)
    found = model.score(tree, cache).logits
    for row, prompt in enumerate(prompts):
        alone = model.new_cache(1)
        fed_one_by_one(model, prompt, alone)
        for node in range(0, tree.sizes[row], 3):
            path = [int(tree.tokens[row, n]) for n in (0, *tree.path(row, node))]
            assert (found[row, node] - fed_one_by_one(model, path, alone.fork([0]))).abs().max() < EXACT


def test_a_tree_can_be_grown_level_by_level(model: RecurrentDecoder) -> None:
    tokens, parents = random_tree(8, 12)
    parents = [-1, -1, *[max(parent, 0) for parent in parents[2:]]]  # a forest: two nodes hang from the committed tokens
    cache, whole = model.new_cache(1), TokenTree.of_rows([(tokens, parents)])
    model.prefill([LONG[:30]], cache)
    expected = model.score(whole, cache).logits
    found = []
    for start, end in ((0, 2), (2, 5), (5, 6), (6, 12)):
        part = TokenTree(whole.tokens[:, :end], whole.parents[:, :end], (end,))
        found.append(model.score(part, cache, start=start).logits)
    assert (torch.cat(found, 1) - expected).abs().max() < EXACT


def test_random_commits_leave_what_one_by_one_would_have_left(model: RecurrentDecoder) -> None:
    """Ragged rows, empty and full paths, rows that leave, come back and go back, over many replays."""
    rng, texts = random.Random(4), [LONG[:20], LONG[20:23], LONG[30:90]]
    cache = model.new_cache(3)
    model.prefill(texts, cache)
    texts = [list(text) for text in texts]
    for round_ in repeats(18, of=30):
        tree = TokenTree.of_rows([random_tree(100 * round_ + row, rng.choice((1, 3, 11))) for row in range(3)])
        model.score(tree, cache)
        paths = [some_path(tree, row, 7 * round_ + row) for row in range(3)]
        cache = cache.fork(range(3)) if round_ % 6 == 3 else cache
        cache.commit(paths)
        texts = [[*t, *(int(tree.tokens[row, n]) for n in paths[row])] for row, t in enumerate(texts)]
        if round_ % 5 == 1:
            texts = [text[: len(text) - rng.randrange(4)] for text in texts]
            cache.truncate([len(text) for text in texts])
        if round_ % 7 == 2:
            cache = cache.fork([2, 0]).join(cache.fork([1]))
            texts = [texts[2], texts[0], texts[1]]
        assert cache.lengths == [len(text) for text in texts]
    found = model.score(TokenTree.chain(torch.tensor([[9]] * 3)), cache).logits
    for row, text in enumerate(texts):
        assert (found[row, 0] - one_by_one(model, [*text, 9])).abs().max() < EXACT


def test_a_prompt_may_come_in_pieces(model: RecurrentDecoder) -> None:
    whole, pieces = model.new_cache(2), model.new_cache(2)
    expected = model.prefill([LONG[:200], LONG[:50]], whole, taps=(0, model.num_layers))
    found = [model.prefill(rows, pieces, taps=(0, model.num_layers)) for rows in _cut(200, 50)]
    for tap, rows in expected.items():
        for row, states in enumerate(rows):
            assert (torch.cat([piece[tap][row] for piece in found]) - states).abs().max() < EXACT
    again = [model.score(TokenTree.chain(torch.tensor([[5], [6]])), cache).logits for cache in (whole, pieces)]
    assert (again[0] - again[1]).abs().max() < EXACT


def _cut(*lengths: int) -> list[list[list[int]]]:
    """The beginnings of LONG in pieces of uneven sizes."""
    rng, done, cuts = random.Random(5), [0] * len(lengths), []
    while done != list(lengths):
        ends = [min(length, at + rng.randrange(60)) for at, length in zip(done, lengths)]
        cuts.append([LONG[at:end] for at, end in zip(done, ends)])
        done = ends
    return cuts


def test_a_row_that_goes_back_too_far_is_forgotten(model: RecurrentDecoder) -> None:
    cache = model.new_cache(2)
    model.prefill([LONG[:120], LONG[:118]], cache)
    cache.truncate([110, 3])
    assert cache.lengths == [110, 0], "what the log does not hold must be read again"
    model.prefill([[], LONG[:40]], cache)
    found = model.score(TokenTree.chain(torch.tensor([[5], [6]])), cache).logits
    for row, tokens in enumerate(([*LONG[:110], 5], [*LONG[:40], 6])):
        assert (found[row, 0] - one_by_one(model, tokens)).abs().max() < EXACT


def test_the_cache_counts_its_own_bytes(model: RecurrentDecoder) -> None:
    cache, shape = model.new_cache(1), model.config.scan
    per_token = shape.conv_size + shape.num_heads * (1 + shape.head_dim) + shape.num_groups * shape.state_size
    assert cache.node_bytes == 8 * shape.num_layers * per_token
    model.prefill([LONG[:100]], cache)
    before = cache._held.log.nbytes
    cache.reserve(1000)
    assert cache._held.log.nbytes - before >= 900 * cache.node_bytes, "a node takes what is counted for it"
    state = shape.num_heads * shape.head_dim * shape.state_size + (shape.conv_len - 1) * shape.conv_size
    assert cache.snapshot_bytes(16) == 16 * 8 * shape.num_layers * state


def test_replay_takes_far_less_than_snapshots_at_real_sizes() -> None:
    from outrider.cache.contiguous import ContiguousCache
    from outrider.cache.replay import ScanShape

    shape = ScanShape(1, num_heads=80, head_dim=64, num_groups=1, state_size=128, conv_len=4, conv_size=5376)  # 2.7B
    attention = ContiguousCache.empty(0, (1, 1, 1), dtype=torch.float32, device=torch.device("cpu"))
    cache = RecurrentCache.empty(shape, attention, dtype=torch.float32)
    assert 62 < cache.snapshot_bytes(16) / (16 * cache.node_bytes) < 63
