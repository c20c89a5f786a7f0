"""What copying costs: microseconds per token learned and per draft, for short and long histories, and a datastore's speed.

    python benchmarks/copying.py                       # histories of 1k, 10k and 100k tokens
    python benchmarks/copying.py --datastore 10000000  # builds, opens and searches a datastore of ten million tokens

The text is made up: Zipf-distributed tokens with passages copied from earlier, so that matches of all lengths occur. Medians
over repeats, with the 10th and 90th percentile; the last line is one JSON document. One thread (set OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.core.interfaces import Context, Drafter, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.copying.datastore import Datastore
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.drafters.copying.ngram_cache import NgramCacheDrafter, NgramCacheOptions
from outrider.drafters.copying.ngram_memory import NgramMemory
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.copying.reference import ReferenceLookup, ReferenceOptions
from outrider.drafters.copying.rest import most_frequent
from outrider.drafters.copying.suffix import SuffixDecoding, SuffixOptions
from outrider.drafters.copying.suffix_memory import SharedText, SuffixMemory
from outrider.drafters.plain import NullDrafter
from outrider.drafters.trees.trie import Trie

VOCAB = 32_000
PLAN = Plan((16,), (16,))
_NEW = 4
"""Tokens emitted between two drafts."""


def made_up(size: int, seed: int) -> list[int]:
    """Zipf tokens; four tenths of the text are passages of 2 to 40 tokens said before."""
    rng = np.random.default_rng(seed)
    fresh = np.minimum(rng.zipf(1.2, size), VOCAB - 1)
    text = np.empty(size + 64, np.int64)
    done = 0
    while done < size:
        length = int(rng.integers(2, 41))
        if done > 100 and rng.random() < 0.4:
            begin = int(rng.integers(0, done - length))
            text[done : done + length] = text[begin : begin + length]
        else:
            text[done : done + length] = fresh[rng.integers(0, size, length)]
        done += length
    return text[:size].tolist()


def drafters(memory_tokens: int) -> dict[str, Drafter]:
    """One of each kind, with memories and references of ``memory_tokens`` tokens."""
    other = made_up(memory_tokens, 1)
    suffix = [SuffixMemory(vocab_size=VOCAB) for _ in range(2)]
    for memory in suffix:
        memory.share(SharedText(0), other)
    ngrams = [NgramMemory(vocab_size=VOCAB) for _ in range(2)]
    for memory in ngrams:
        memory.learn(other, 0)
    return {
        "nothing": NullDrafter(),
        "prompt-lookup": PromptLookup(),
        "suffix": SuffixDecoding(memory=suffix[0]),
        "suffix tree": SuffixDecoding(SuffixOptions(tree=True), memory=suffix[1]),
        "suffix, own text only": SuffixDecoding(SuffixOptions(memory_tokens=0)),
        "ngram-cache": NgramCacheDrafter(memory=ngrams[0]),
        "ngram-cache tree": NgramCacheDrafter(NgramCacheOptions(tree=True), memory=ngrams[1]),
        "reference": ReferenceLookup(ReferenceOptions(references=[other]), vocab_size=VOCAB),
    }


def proposer(drafter: Drafter, history: list[int]) -> Callable[[], int]:
    """Propose once for ``history``, which the caller lengthens; returns the number of guesses."""
    cpu, zero = torch.device("cpu"), torch.zeros(1, dtype=torch.int64)
    sampler = Sampler([RequestState.of(Request(history[:1], SamplingParams()))], VOCAB, cpu)
    context = Context([history], sampler, Noise(zero, zero), cpu)
    state = drafter.start([history], {})
    return lambda: drafter.propose(state, context, PLAN).num_drafted[0]


def timed(action: Callable[[], object]) -> float:
    """Microseconds."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e6


def cost(drafter: Drafter, size: int, rounds: int) -> dict[str, float]:
    """Per draft, and per token learned, of a request that has ``size`` tokens."""
    text = made_up(size + rounds * _NEW, 2)
    history = text[:size]
    propose = proposer(drafter, history)
    propose()
    drafts: list[float] = []
    learned: list[float] = []
    guesses = 0
    for number in range(rounds):
        history += text[size + number * _NEW : size + (number + 1) * _NEW]
        both = timed(propose)
        drafts.append(timed(propose))  # nothing new to learn
        learned.append((both - drafts[-1]) / _NEW)
        guesses += propose()
    return {**spread(drafts, "draft_us"), **spread(learned, "learn_us"), "guesses": round(guesses / rounds, 2)}


def spread(values: Sequence[float], name: str) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    median = statistics.median(values)
    return {name: round(median, 1), f"{name}_p10": round(tenths[0], 1), f"{name}_p90": round(tenths[-1], 1)}


def histories(sizes: Sequence[int], memory_tokens: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, drafter in drafters(memory_tokens).items():
        found[name] = {}
        for size in sizes:
            row = found[name][str(size)] = cost(drafter, size, rounds)
            draft = f"{row['draft_us']:8.1f} us per draft ({row['draft_us_p10']:.1f} to {row['draft_us_p90']:.1f})"
            print(f"{name:<24}{size:>8} tokens {draft}{row['learn_us']:8.1f} us per token {row['guesses']:6.2f} guesses")
    return found


def datastore(num_tokens: int, rounds: int) -> dict[str, float]:
    """Build, open, search."""
    size = 100_000
    documents = [made_up(size, seed) for seed in range(min(20, -(-num_tokens // size)))]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        corpus = (_varied(documents[i % len(documents)], i) for i in range(num_tokens // size))
        found = {"build_s": round(timed(lambda: build_datastore(corpus, path, vocab_size=VOCAB)) / 1e6, 1)}
        found["open_ms"] = round(timed(lambda: Datastore(path)) / 1e3, 2)
        store = Datastore(path)
        searches: list[float] = []
        for _ in range(rounds):
            document = documents[int(rng.integers(len(documents)))]
            end = int(rng.integers(20, size))
            context = document[end - int(rng.integers(1, 17)) : end]
            searches.append(timed(lambda context=context: search(store, context)))
        found |= spread(searches, "search_us") | {"search_us_max": round(max(searches), 1)}
        found |= {"num_tokens": store.num_tokens, "megabytes": round(store.num_bytes / 1e6, 1)}
    return found


def _varied(document: list[int], seed: int) -> list[int]:
    """A document with every tenth token replaced; for seeds below 20 it is unchanged."""
    rng = np.random.default_rng(seed)
    text = np.array(document)
    places = rng.random(len(text)) < (0.1 if seed >= 20 else 0.0)
    text[places] = np.minimum(rng.zipf(1.2, int(places.sum())), VOCAB - 1)
    return text.tolist()


def search(store: Datastore, context: Sequence[int]) -> object:
    hits = store.search(context, min_match=2, max_match=16, length=10, max_hits=512)
    return None if hits is None else most_frequent(Trie(context[-1]), hits.continuations, 32).row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--memory-tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--datastore", type=int, default=0, metavar="TOKENS", help="measure a datastore instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {"benchmark": "copying", "arguments": vars(arguments)}
    result["where"] = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    if arguments.datastore:
        result["datastore"] = datastore(arguments.datastore, arguments.rounds)
    else:
        result["histories"] = histories(arguments.sizes, arguments.memory_tokens, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
