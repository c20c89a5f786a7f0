"""The n-gram cache against brute force: counts, bounds, forgetting, files."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from drafting import propose, start

from outrider.core.errors import ModelError, OptionError
from outrider.drafters.copying.ngram_cache import NgramCacheDrafter, NgramCacheOptions
from outrider.drafters.copying.ngram_memory import MAX_FOLLOWERS, NgramMemory


def drafter_of(memory: NgramMemory | None = None, **options) -> NgramCacheDrafter:
    return NgramCacheDrafter(NgramCacheOptions(**options), memory=memory or NgramMemory(vocab_size=1000))


def count_all(texts: list[list[int]], max_ngram: int) -> dict[tuple[int, ...], Counter[int]]:
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for end in range(1, len(text)):
            for size in range(1, min(end, max_ngram) + 1):
                counts[tuple(text[end - size : end])][text[end]] += 1
    return counts


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_those_of_all_texts(seed: int) -> None:
    rng = random.Random(seed)
    max_ngram, min_count = rng.choice([1, 2, 4, 7]), rng.choice([1, 1, 3])
    memory = NgramMemory(vocab_size=10, max_ngram=max_ngram)
    texts = [[rng.randrange(6) for _ in range(rng.randrange(1, 90))] for _ in range(4)]
    for text in texts:
        done = 0
        while done < len(text):  # told in pieces, as tokens come
            step = rng.randrange(1, 9)
            memory.learn(text[: done + step], done)
            done = min(done + step, len(text))
    counts = count_all(texts, max_ngram)
    assert memory.num_entries == len(counts)
    for _ in range(200):
        query = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
        sizes = range(min(len(query), max_ngram), 0, -1)
        ends = (tuple(query[-size:]) for size in sizes)
        expected = next((counts[end] for end in ends if end in counts and counts[end].total() >= min_count), Counter())
        assert memory.followers(query, min_count=min_count) == (dict(expected), expected.total())


def test_a_full_entry_lets_the_rarest_go() -> None:
    memory = NgramMemory(vocab_size=1000, max_ngram=1)
    rng = random.Random(0)
    truth: Counter[int] = Counter()
    for _ in range(4000):
        token = min(int(rng.paretovariate(0.8)), 300)
        truth[token] += 1
        memory.learn([5, token], 1)
    kept, total = memory.followers([5])
    assert len(kept) == MAX_FOLLOWERS and total == 4000
    assert {token for token, _ in truth.most_common(3)} <= set(kept), "the frequent ones stay"
    assert all(count <= truth[token] for token, count in kept.items()), "never too high"


def test_memory_is_bounded_and_what_is_unused_goes_first() -> None:
    memory = NgramMemory(vocab_size=100_000, max_ngram=2, max_entries=200)
    for number in range(2000):
        memory.learn([7, 8, 9], 0)  # used all the time
        memory.learn([10 + number, 20_000 + number, 40_000 + number], 0)
        assert memory.num_entries <= 200
    assert memory.followers([7, 8]) == ({9: 2000}, 2000)
    assert memory.followers([10 + 1999, 20_000 + 1999]) == ({40_000 + 1999: 1}, 1)
    assert memory.followers([10, 20_000]) == ({}, 0)
    memory.clear()
    assert memory.num_entries == 0 and memory.followers([7, 8]) == ({}, 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_longer_ngram_is_never_kept_without_its_ends(seed: int) -> None:
    rng = random.Random(seed)
    memory = NgramMemory(vocab_size=100, max_ngram=4, max_entries=40)
    for _ in range(60):
        memory.learn([rng.randrange(5) for _ in range(12)], 0)
        kept = memory._young | memory._old
        assert all((key >> 32) in kept for key in kept if key >> 64)


def test_chains_and_trees() -> None:
    memory = NgramMemory(vocab_size=100, max_ngram=3)
    for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [9, 2, 3, 6]):
        memory.learn(text, 0)
    history = [1, 2]
    chain = drafter_of(memory, learn_prompts=False)
    assert propose(chain, start(chain, [history]), [history], [5], [5])[0][0] == [2, 3, 5]
    tree = drafter_of(memory, learn_prompts=False, tree=True)
    assert propose(tree, start(tree, [history]), [history], [5], [5])[0] == ([2, 3, 5, 4], [-1, 0, 1, 1])
    assert propose(tree, start(tree, [history]), [history], [2], [2])[0] == ([2, 3, 5], [-1, 0, 1])
    sure = drafter_of(memory, learn_prompts=False, min_token_prob=0.9)
    assert propose(sure, start(sure, [history]), [history], [5], [5])[0][0] == [2, 3]
    often = drafter_of(memory, learn_prompts=False, min_count=4)  # (1, 2, 3) was seen three times, (2, 3) four
    assert propose(often, start(often, [[1, 2, 3]]), [[1, 2, 3]], [1], [1])[0][0] == [3, 5]


def test_the_newest_wins_among_equals() -> None:
    memory = NgramMemory(vocab_size=100)
    for token in (4, 5, 6, 5):
        memory.learn([1, token], 1)
    memory.learn([1, 4], 1)
    drafter = drafter_of(memory, learn_prompts=False, tree=True)
    assert propose(drafter, start(drafter, [[1]]), [[1]], [1], [3])[0][0] == [1, 4, 5, 6]


def test_requests_teach_each_other_and_rows_move() -> None:
    drafter = drafter_of()
    prompt, answer = [90, 91], [3, 4, 5, 6]
    state = start(drafter, [prompt, [50, 51]])
    assert propose(drafter, state, [prompt, [50, 51]], [4, 4], [4, 4]) == [([91], [-1]), ([51], [-1])]
    histories = [prompt + answer[:2], [50, 51, 60]]
    propose(drafter, state, histories, [4, 4], [4, 4])
    state = state.fork([1, 0]).join(start(drafter, [[90, 91]]))
    drafter.finish(state, 1, prompt + answer)
    drafter.finish(state, 1, prompt + answer)
    assert drafter.memory.followers([90, 91]) == ({3: 1}, 1), "counted once"
    assert drafter.memory.followers([4, 5]) == ({6: 1}, 1)
    rows = propose(drafter, state, [[50, 51, 60], prompt + answer, [90, 91]], [0, 4, 9], [0, 4, 9])
    assert [tokens for tokens, _ in rows] == [[60], [6], [91, 3, 4, 5, 6]]


def test_prompts_need_not_be_learned() -> None:
    quiet, eager = drafter_of(learn_prompts=False), drafter_of()
    for drafter in (quiet, eager):
        start(drafter, [[1, 2, 3]])
    assert quiet.memory.num_entries == 0 < eager.memory.num_entries


@pytest.mark.parametrize("seed", range(3))
def test_a_saved_table_is_the_same(tmp_path, seed: int) -> None:
    rng = random.Random(seed)
    memory = NgramMemory(vocab_size=50_000, max_ngram=3, max_entries=600)
    for _ in range(20):
        memory.learn([rng.choice([0, 1, 2, 49_999, rng.randrange(50_000)]) for _ in range(40)], 0)
    memory.save(tmp_path / "cache.npz")
    again = NgramMemory.load(tmp_path / "cache.npz", vocab_size=50_000, max_ngram=3, max_entries=600)
    kept = memory._old | memory._young
    assert again._old | again._young == kept
    shorter = NgramMemory.load(tmp_path / "cache.npz", vocab_size=50_000, max_ngram=2, max_entries=100)
    assert 50 <= shorter.num_entries <= 100 and all(key < 1 << 65 for key in shorter._old | shorter._young)
    assert NgramMemory.of(str(tmp_path / "cache.npz"), vocab_size=50_000, max_ngram=3, max_entries=600).num_entries == len(kept)
    assert NgramMemory.of(memory, vocab_size=50_000, max_ngram=3, max_entries=2) is memory
    empty = NgramMemory(vocab_size=10)
    empty.save(tmp_path / "empty.npz")
    assert NgramMemory.load(tmp_path / "empty.npz", vocab_size=10).num_entries == 0


def test_bad_files_are_refused_in_one_line(tmp_path) -> None:
    memory, path = NgramMemory(vocab_size=50), tmp_path / "cache.npz"
    memory.learn(list(range(50)), 0)
    memory.save(path)
    with pytest.raises(ModelError, match="vocabulary"):
        NgramMemory.load(path, vocab_size=51)
    with pytest.raises(ModelError, match="vocabulary"):
        NgramMemory.of(memory, vocab_size=51, max_ngram=4, max_entries=10)
    for content in (b"", b"not a file", path.read_bytes()[:-40], path.read_bytes()[:200]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"cannot be read: .*; delete it") as caught:
            NgramMemory.load(path, vocab_size=50)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="does not exist"):
        NgramMemory.load(tmp_path / "none.npz", vocab_size=50)
    memory.save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["counts"][0] += 1
    np.savez(path, **arrays)
    with pytest.raises(ModelError, match="checksum"):
        NgramMemory.load(path, vocab_size=50)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"max_ngram": 0}, "max_ngram"), ({"max_ngram": 17}, "max_ngram"), ({"min_count": 0}, "min_count"),
     ({"min_token_prob": -0.1}, "min_token_prob"), ({"max_entries": 1}, "max_entries")],
)  # fmt: skip
def test_bad_options_are_refused(options, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        NgramCacheOptions(**options)
    if word in ("max_ngram", "max_entries"):
        with pytest.raises(OptionError, match=word):
            NgramMemory(vocab_size=10, **options)
