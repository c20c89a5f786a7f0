"""What smaller drafts are worth: tokens per pass, bytes and time of a chain, of drafts in several sizes and types.

    outrider prune --data own.jsonl --layers 4 --mlp 320 --out runs/pruned
    outrider train distill --draft runs/pruned --data own.jsonl --out runs/distilled
    python recipes/smaller_drafts.py --draft runs/pruned --draft runs/distilled/distill       # beside the bundled draft

Every draft is opened in its own type and in int8. Texts must equal plain decoding. The time is that of drafting a chain of
four after 64 tokens, the median of interleaved runs: a figure of this machine, for orientation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.tree import TokenTree

LENGTH = 4


def chain_ms(draft: Target) -> float:
    """Milliseconds for a chain of one-token passes."""
    cache = draft.new_cache(1)
    draft.prefill([[5] * 64], cache)
    began = time.perf_counter()
    for _ in range(LENGTH):
        draft.score(TokenTree.chain(torch.tensor([[7]])), cache)
        cache.commit([[0]])
    return 1e3 * (time.perf_counter() - began)


def megabytes(folder: str, dtype: str) -> float:
    """Of the weights, matrices counted in the type they are held in."""
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return size / 1e6 / (2 if dtype == "int8" else 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", action="append", default=[], metavar="DIR")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    folders = [bundled_path("draft"), *arguments.draft]
    found: list[tuple[str, str, LLM, list[float]]] = []
    for folder in folders:
        for dtype in ("auto", "int8"):
            llm = LLM(bundled_path("target"), draft=folder, draft_dtype=dtype, dtype="float32", num_draft_tokens=LENGTH)
            found.append((folder, dtype, llm, []))
    first = found[0][2]
    each = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed) for seed in range(arguments.prompts)]
    prompts = [output.token_ids for output in first.generate([[0]] * arguments.prompts, each)]
    params = SamplingParams(max_tokens=arguments.tokens)
    plain = [output.token_ids for output in first.generate(prompts, params, method=first.compose("plain"))]
    with torch.inference_mode():
        for _ in range(30):
            for _, _, llm, times in found:
                times.append(chain_ms(llm.drafts[0]))
    for folder, dtype, llm, times in found:
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == plain, "lossless"
        rate = sum(o.stats.num_tokens for o in outputs) / sum(o.stats.num_passes for o in outputs)
        spread = f"{statistics.median(times):.2f} ms ({min(times):.2f} - {sorted(times)[-3]:.2f})"
        size = megabytes(folder, dtype)
        print(f"{Path(folder).name:12} {dtype:5} {rate:.2f} tokens per pass, {size:.2f} MB, chain {spread}", flush=True)


if __name__ == "__main__":
    main()
