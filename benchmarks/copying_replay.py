"""How much copying finds in real text: tokens per pass when the target says exactly what a document says.

    python benchmarks/copying_replay.py DOCUMENTS.jsonl[.xz] --model NAME

The first part of a document is the prompt, the rest is what a greedy target would say. A drafter proposes, the guesses that
agree are kept, and passes are counted. No model runs: ``--model`` only names the tokenizer. Documents are replayed one after
the other, so drafters with a memory learn on the way; the datastore holds other documents of the same file. The last line of
the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.codecs.load import load_codec
from outrider.codecs.text import TextCodec
from outrider.core.interfaces import Context, Drafter, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.copying.datastore import Datastore
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.drafters.copying.ngram_cache import NgramCacheDrafter, NgramCacheOptions
from outrider.drafters.copying.ngram_memory import NgramMemory
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.copying.reference import ReferenceLookup, ReferenceOptions
from outrider.drafters.copying.rest import RestDrafter
from outrider.drafters.copying.suffix import SuffixDecoding, SuffixOptions
from outrider.drafters.plain import NullDrafter


def read(path: Path, codec: TextCodec, *, size: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """``count`` documents of ``size`` tokens to replay, and as many tokens from all others as twenty times that."""
    data = path.read_bytes()
    lines = (lzma.decompress(data) if path.suffix == ".xz" else data).decode().splitlines()
    texts = [json.loads(line) for line in lines if line]
    random.Random(0).shuffle(texts)
    replayed: list[list[int]] = []
    others: list[list[int]] = []
    for text in texts:
        ids = codec.encode(text[: size * 8], add_special_tokens=False)
        if len(ids) >= size and len(replayed) < count:
            replayed.append(ids[:size])
        elif sum(map(len, others)) < 20 * size * count:
            others.append(ids)
    return replayed, others


def drafters(vocab_size: int, store: Datastore, others: Sequence[list[int]]) -> dict[str, Drafter]:
    def suffix(options: SuffixOptions) -> Drafter:
        return SuffixDecoding(options, memory=options.new_memory(vocab_size))

    def ngrams(*, tree: bool) -> Drafter:
        return NgramCacheDrafter(NgramCacheOptions(tree=tree), memory=NgramMemory(vocab_size=vocab_size))

    return {
        "nothing": NullDrafter(),
        "prompt-lookup": PromptLookup(),
        "suffix, own text only": suffix(SuffixOptions(memory_tokens=0)),
        "suffix": suffix(SuffixOptions()),
        "suffix, factor 4": suffix(SuffixOptions(factor=4.0)),
        "suffix tree, factor 4": suffix(SuffixOptions(factor=4.0, tree=True)),
        "ngram-cache": ngrams(tree=False),
        "ngram-cache tree": ngrams(tree=True),
        "reference": ReferenceLookup(ReferenceOptions(references=others[:50]), vocab_size=vocab_size),
        "rest": RestDrafter(datastore=store, vocab_size=vocab_size),
    }


def replay(drafter: Drafter, texts: Sequence[list[int]], *, prompt_len: int, num_nodes: int) -> dict[str, float]:
    cpu, zero = torch.device("cpu"), torch.zeros(1, dtype=torch.int64)
    passes = emitted = drafted = 0
    for text in texts:
        history = text[:prompt_len]
        sampler = Sampler([RequestState.of(Request(history, SamplingParams()))], 1, cpu)
        context, state = Context([history], sampler, Noise(zero, zero), cpu), drafter.start([history], {})
        while len(history) < len(text):
            tree = drafter.propose(state, context, Plan((num_nodes,), (num_nodes,))).tree
            taken = agreed(tree, text[len(history) :]) + 1
            history += text[len(history) : len(history) + taken]
            passes, drafted = passes + 1, drafted + tree.sizes[0] - 1
        emitted += len(text) - prompt_len
    return {"tokens_per_pass": round(emitted / passes, 3), "drafted_per_pass": round(drafted / passes, 2)}


def agreed(tree: TokenTree, said: Sequence[int]) -> int:
    """Depth down to which some path says what was said."""
    tokens, parents = tree.tokens[0, : tree.sizes[0]].tolist(), tree.parents[0, : tree.sizes[0]].tolist()
    node = depth = 0
    for child in range(1, len(tokens)):  # breadth-first: the children of the node reached come after it
        if parents[child] == node and depth < len(said) and tokens[child] == said[depth]:
            node, depth = child, depth + 1
    return depth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=40, help="documents replayed")
    parser.add_argument("--size", type=int, default=1500, help="tokens of each")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of each that are the prompt")
    parser.add_argument("--num-nodes", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    codec = load_codec(arguments.model)
    texts, others = read(arguments.documents, codec, size=arguments.size, count=arguments.count)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = build_datastore(others, Path(folder) / "store", vocab_size=codec.vocab_size)
        print(f"{len(texts)} documents, datastore of {store.num_tokens:,} tokens")
        for name, drafter in drafters(codec.vocab_size, store, others).items():
            row = found[name] = replay(drafter, texts, prompt_len=arguments.prompt, num_nodes=arguments.num_nodes)
            print(f"{name:<24}{row['tokens_per_pass']:8.3f} tokens per pass {row['drafted_per_pass']:8.2f} guesses per pass")
    print(json.dumps({"benchmark": "copying replay", "documents": arguments.documents.name, "found": found}))


if __name__ == "__main__":
    main()
