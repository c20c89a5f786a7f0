"""Suffix decoding against brute force: counts of every context, the best-scoring guesses, and a memory that stays bounded."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

import numpy as np
import pytest
from drafting import propose, start

from outrider.core.errors import ModelError, OptionError
from outrider.drafters.copying.suffix import SuffixDecoding, SuffixOptions
from outrider.drafters.copying.suffix_automaton import MAX_CHILDREN, SuffixAutomaton, Tail
from outrider.drafters.copying.suffix_memory import LEAD_IN, MIN_TOKENS, SharedText, SuffixMemory

SEEDS = range(12)


class Counts:
    """What followed every context of up to ``max_context`` tokens, counted by looking at all of them."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.after: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(dict)
        self.seen: set[tuple[int, ...]] = {()}
        self.clock = 0

    def add(self, text: list[int], token: int) -> None:
        """``token`` follows ``text``."""
        self.clock += 1
        for size in range(min(len(text), self.max_context) + 1):
            context = tuple(text[len(text) - size :])
            times, _ = self.after[context].get(token, (0, 0))
            self.after[context][token] = [times + 1, self.clock]
            self.seen.add((*context, token))

    def children(self, context: tuple[int, ...]) -> list[tuple[int, float]]:
        while context and not self.after.get(context):
            context = context[1:]
        if not context:
            return []
        total = sum(times for times, _ in self.after[context].values())
        ranked = sorted(self.after[context].items(), key=lambda item: item[1], reverse=True)
        return [(token, times / total) for token, (times, _) in ranked[:MAX_CHILDREN]]

    def match(self, history: list[int]) -> int:
        sizes = range(min(len(history), self.max_context), 0, -1)
        return next((size for size in sizes if tuple(history[len(history) - size :]) in self.seen), 0)

    def path(self, context: tuple[int, ...], budget: int, min_prob: float) -> tuple[float, list[int]]:
        prob, score, path = 1.0, 0.0, []
        while len(path) < budget and (found := self.children(context)):
            prob *= found[0][1]
            if prob < min_prob:
                break
            score += prob
            path.append(found[0][0])
            context = (*context, found[0][0])[-self.max_context :]
        return score, path


def grow_together(rng: random.Random, *, num_texts: int, alphabet: int, max_context: int, num_tokens: int):
    """Several texts that grow in turns inside one automaton."""
    automaton, counts = SuffixAutomaton(max_context), Counts(max_context)
    texts: list[list[int]] = [[] for _ in range(num_texts)]
    tails = [Tail() for _ in texts]
    for _ in range(num_tokens):
        which = rng.randrange(num_texts)
        text = texts[which]
        copied = bool(text) and rng.random() < 0.6
        token = text[rng.randrange(len(text))] if copied else rng.randrange(alphabet)
        counts.add(text, token)
        automaton.extend(tails[which], [token])
        text.append(token)
    return automaton, counts, texts, tails


@pytest.mark.parametrize("seed", SEEDS)
def test_every_context_is_counted(seed: int) -> None:
    rng = random.Random(seed)
    max_context, alphabet = rng.choice([1, 2, 3, 5, 9]), rng.choice([1, 2, 3, 12])
    made = grow_together(rng, num_texts=1 + seed % 3, alphabet=alphabet, max_context=max_context, num_tokens=160)
    automaton, counts, texts, tails = made
    assert automaton.num_tokens == sum(map(len, texts)) and automaton.num_states <= 2 * automaton.num_tokens + 1
    for context in counts.seen:
        if not 0 < len(context) <= max_context:
            continue
        state, size = automaton.match(list(context))
        assert size == len(context)
        assert automaton.followed[state] == sum(times for times, _ in counts.after.get(context, {}).values())
        assert [(token, prob) for token, prob, _ in automaton.children(state)] == counts.children(context)
    for text, tail in zip(texts, tails, strict=True):
        assert tail.context_len == min(len(text), max_context)
        if text:
            assert automaton._settled(tail.context, tail.context_len) == automaton.match(text)[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_match_is_found(seed: int) -> None:
    rng = random.Random(seed)
    automaton, counts, texts, _ = grow_together(rng, num_texts=2, alphabet=4, max_context=12, num_tokens=150)
    for _ in range(100):
        begin = rng.randrange(len(texts[0]))
        query = [rng.randrange(5) for _ in range(rng.randrange(4))] + texts[0][begin : begin + rng.randrange(1, 30)]
        assert automaton.match(query)[1] == counts.match(query)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_scoring_path_is_proposed(seed: int) -> None:
    """All match lengths, one by one, against the drafter that looks at one of each class and stops early."""
    rng = random.Random(seed)
    options = SuffixOptions(max_match=6, factor=rng.choice([0.5, 1.0, 2.0]), offset=rng.choice([0.0, 1.0]), memory_tokens=0)
    drafter, counts = SuffixDecoding(options), Counts(6)
    history = [rng.randrange(4)]
    state = start(drafter, [history])
    counts.add([], history[0])
    for _ in range(120):
        token = history[rng.randrange(len(history))] if rng.random() < 0.8 else rng.randrange(4)
        counts.add(history, token)
        history.append(token)
        tokens, _ = propose(drafter, state, [history], [9], [9])[0]
        scores = {}
        for size in range(1, counts.match(history) + 1):
            context = tuple(history[len(history) - size :])
            if counts.after.get(context):
                scores[size] = counts.path(context, min(9, options.budget(size)), options.min_token_prob)
        best = max(scores.items(), key=lambda item: (round(item[1][0], 9), item[0]), default=(0, (0.0, [])))
        assert tokens[1:] == best[1][1]


def test_a_tree_holds_the_alternatives() -> None:
    history = [1, 2, 5, 1, 3, 6, 1, 2, 7, 1, 4, 8, 1]
    drafter = SuffixDecoding(SuffixOptions(tree=True, factor=6.0, memory_tokens=0))
    state = start(drafter, [history])
    assert propose(drafter, state, [history], [2], [6])[0] == ([1, 2, 4, 3, 7, 5, 8], [-1, 0, 0, 0, 1, 1, 2])
    assert propose(drafter, state, [history], [1], [2])[0] == ([1, 2, 4], [-1, 0, 0])
    path = SuffixDecoding(SuffixOptions(factor=6.0, memory_tokens=0))
    assert propose(path, start(path, [history]), [history], [2], [6])[0][0] == [1, 2, 7]


def test_a_repeating_pattern_is_drafted_to_full_length() -> None:
    drafter = SuffixDecoding(SuffixOptions(memory_tokens=0))
    history = [1, 2, 3] * 6
    assert propose(drafter, start(drafter, [history]), [history], [12], [12])[0][0] == [3, *[1, 2, 3] * 4]


def test_nothing_known_nothing_drafted() -> None:
    drafter = SuffixDecoding(memory=SuffixMemory(vocab_size=100))
    histories = [[1, 2, 3], [5], [1, 1, 1, 1]]
    trees = propose(drafter, start(drafter, histories), histories, [4, 4, 0], [4, 4, 0])
    assert trees == [([3], [-1]), ([5], [-1]), ([1], [-1])]


def test_one_request_helps_the_next() -> None:
    memory = SuffixMemory(vocab_size=100)
    drafter = SuffixDecoding(memory=memory)
    prompt, answer = [90, 91, 92], [7, 3, 9, 4, 8, 5]
    first = start(drafter, [prompt])
    propose(drafter, first, [prompt], [8], [8])
    drafter.finish(first, 0, prompt + answer)
    assert memory.num_tokens == len(prompt) + len(answer)  # the prompt is short enough to be all lead-in
    drafter.finish(first, 0, prompt + answer)  # told twice, learned once
    assert memory.num_tokens == len(prompt) + len(answer)
    assert propose(drafter, start(drafter, [prompt]), [prompt], [8], [8])[0][0] == [92, 7, 3, 9]
    history = [*prompt, 7, 3, 9]
    assert propose(drafter, start(drafter, [history]), [history], [8], [8])[0][0] == [9, 4, 8, 5]


def test_rows_share_what_they_are_saying() -> None:
    drafter = SuffixDecoding(memory=SuffixMemory(vocab_size=100))
    histories = [[1, 2, 3], [1, 2, 3]]
    state = start(drafter, histories)
    propose(drafter, state, histories, [4, 4], [4, 4])
    histories = [[1, 2, 3, 4, 5], [1, 2, 3]]
    assert propose(drafter, state, histories, [4, 4], [4, 4])[1][0] == [3, 4, 5]


def test_rows_leave_fork_and_arrive() -> None:
    drafter = SuffixDecoding(SuffixOptions(memory_tokens=0))
    a, b = [1, 2, 3, 1, 2], [4, 5, 6, 4, 5]
    state = start(drafter, [a, b]).fork([1, 1]).join(start(drafter, [a]))
    histories = [[*b, 9, 4, 5], [*b, 6, 4, 5], [*a, 3]]
    trees = propose(drafter, state, histories, [2] * 3, [2] * 3)
    assert [tokens for tokens, _ in trees] == [[5, 9, 4], [5, 6, 4], [3, 1, 2]]


def test_the_memory_is_bounded_and_the_oldest_goes_first() -> None:
    memory = SuffixMemory(vocab_size=10_000, max_tokens=MIN_TOKENS)
    sizes = []
    for number in range(60):
        text = list(range(number * 50, number * 50 + 50))
        memory.share(SharedText(0), text)
        sizes.append(memory.num_tokens)
    assert max(sizes) <= MIN_TOKENS and sizes[-1] >= MIN_TOKENS // 2

    def longest(number: int) -> int:
        return max(automaton.match(list(range(number * 50, number * 50 + 10)))[1] for automaton in memory.automata)

    known = [longest(number) == 10 for number in range(60)]
    assert known[-1] and not known[0] and known == sorted(known)
    memory.clear()
    assert memory.num_tokens == 0 and longest(59) == 0


def test_a_text_longer_than_the_memory_goes_on_in_the_next_segment() -> None:
    memory = SuffixMemory(vocab_size=10_000, max_tokens=MIN_TOKENS)
    text, history = SharedText(0), list(range(3 * MIN_TOKENS))
    for end in range(0, len(history) + 1, 7):
        memory.share(text, history[:end])
        assert memory.num_tokens <= MIN_TOKENS
    memory.share(text, history)
    end = history[-LEAD_IN:]
    assert next(memory.automata).match(end)[1] == len(end)


def test_a_saved_memory_knows_the_same(tmp_path) -> None:
    rng = random.Random(0)
    memory = SuffixMemory(vocab_size=50)
    texts = [[rng.randrange(20) for _ in range(60)] for _ in range(5)]
    for text in texts:
        memory.share(SharedText(0), text)
    memory.save(tmp_path / "memory.npz")
    again = SuffixMemory.load(tmp_path / "memory.npz", vocab_size=50)
    assert again.num_tokens == memory.num_tokens
    for text in texts:
        for end in range(4, 60, 9):
            seen = [
                [child[:2] for child in next(m.automata).children(next(m.automata).match(text[:end])[0])]
                for m in (memory, again)
            ]
            assert seen[0] == seen[1]
    small = SuffixMemory.load(tmp_path / "memory.npz", vocab_size=50, max_tokens=MIN_TOKENS)
    assert 0 < small.num_tokens <= MIN_TOKENS
    assert SuffixMemory.of(str(tmp_path / "memory.npz"), vocab_size=50, max_tokens=4000, max_match=9).num_tokens == 300
    assert SuffixMemory.of(memory, vocab_size=50, max_tokens=1000, max_match=9) is memory


def test_bad_memory_files_are_refused_in_one_line(tmp_path) -> None:
    memory = SuffixMemory(vocab_size=50)
    memory.share(SharedText(0), list(range(40)))
    path = tmp_path / "memory.npz"
    memory.save(path)
    with pytest.raises(ModelError, match="vocabulary of 50 tokens and the model has 60"):
        SuffixMemory.load(path, vocab_size=60)
    with pytest.raises(ModelError, match="vocabulary of 50"):
        SuffixMemory.of(memory, vocab_size=60, max_tokens=1000, max_match=9)
    with pytest.raises(ModelError, match="does not exist"):
        SuffixMemory.load(tmp_path / "none.npz", vocab_size=50)
    with pytest.raises(ModelError, match=r"folder .* does not exist"):
        memory.save(tmp_path / "none" / "memory.npz")
    data = path.read_bytes()
    rng = random.Random(1)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged[: rng.choice([len(data), rng.randrange(len(data))])]))
        try:
            assert SuffixMemory.load(path, vocab_size=50).num_tokens == 40  # a byte that says nothing, as a date does
        except ModelError as error:
            assert "\n" not in str(error)
    np.savez(path, header=np.frombuffer(b'{"kind": "something else"}', np.uint8))
    with pytest.raises(ModelError, match="something else"):
        SuffixMemory.load(path, vocab_size=50)


def test_threads_may_share_a_memory() -> None:
    memory = SuffixMemory(vocab_size=100, max_tokens=2000)
    drafter = SuffixDecoding(memory=memory)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            history = [rng.randrange(5)]
            state = start(drafter, [history])
            for _ in range(150):
                history = [*history, rng.randrange(5)]
                propose(drafter, state, [history], [4], [4])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and 600 <= memory.num_tokens <= 2000


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_match": 0}, "max_match"),
        ({"factor": -1.0}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 0.0}, "offset"),
        ({"min_token_prob": 1.5}, "min_token_prob"),
        ({"memory_tokens": 5}, "memory_tokens"),
    ],
)
def test_bad_options_are_refused(options, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        SuffixOptions(**options)
    assert SuffixOptions(factor=2.0, offset=-4.0).budget(2) == 0  # a way to ask for longer matches
    assert SuffixOptions(memory_tokens=0).new_memory(10) is None
    with pytest.raises(OptionError, match="memory_tokens"):
        SuffixMemory(vocab_size=10, max_tokens=3)
