"""What keys and values in 8 bits change: the next-token laws of a model against those of the same model with its own cache.

    python benchmarks/kv_cache_distance.py [--model NAME] [--stories 24] [--tokens 256] [--out FILE]

All read the same held-out stories (``held_out_stories.jsonl``) in float32, on a CPU, by the plain PyTorch decoder. The columns
are those of ``few_bits.py``, and bytes of a token in the cache. For scale, the last row is the model itself in bfloat16, with a
cache of bfloat16. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from few_bits import STORIES, compared, laws

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.cache.contiguous import ContiguousCache
from outrider.cache.paged import PagedCache
from outrider.codecs.load import load_codec
from outrider.models.load import load_model

WAYS = (("float32", "auto"), ("float32", "int8"), ("float32", "fp8"), ("bfloat16", "auto"))
"""Types of the model and of its cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(bundled_path("target")), help="folder (default: the bundled target)")
    parser.add_argument("--stories", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a story that are read")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    codec, found, rows = load_codec(arguments.model), list[torch.Tensor](), list[dict[str, Any]]()
    stories = [json.loads(line)["text"] for line in STORIES.read_text().splitlines()[: arguments.stories]]
    texts = [codec.encode(story)[: arguments.tokens] for story in stories]
    following = torch.tensor([token for text in texts for token in text[1:]])
    for dtype, storage in WAYS:
        target = load_model(arguments.model, dtype=dtype, device="cpu", fast=False, kv_cache=storage)
        cache = target.new_cache(1)
        assert isinstance(cache, ContiguousCache | PagedCache)
        found.append(laws(target, texts))
        row = compared(f"{dtype}, cache {storage}", found[0], found[-1], following)
        rows.append({**row, "bytes of a token": cache.token_bytes})
        print(rows[-1], flush=True)
    what = f"next-token laws against those of a float32 cache, {len(following)} positions of {len(texts)} held-out stories"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/kv_cache_distance.py")))


if __name__ == "__main__":
    main()
