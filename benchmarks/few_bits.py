"""What weights of few bits change: the next-token laws of a rounded model against those of the same model in float32.

    python benchmarks/few_bits.py [--model NAME] [--dtypes bfloat16 int8 int4] [--stories 24] [--tokens 128] [--out FILE]

Both models read the same held-out stories (``held_out_stories.jsonl``). Reported for every type are the mean and the 99th
percentile over all positions of KL(float32 || type) in nats. The mean total variation follows, then the share of equal
likeliest tokens, and the perplexity of the stories. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.codecs.load import load_codec
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.load import load_model

STORIES = Path(__file__).parent / "held_out_stories.jsonl"


def laws(target: Target, texts: list[list[int]]) -> Tensor:
    """[T, V] log-probabilities after every token of every text but the last, in double precision."""
    found = list[Tensor]()
    with torch.inference_mode():
        for text in texts:
            logits = target.score(TokenTree.chain(torch.tensor([text[:-1]])), target.new_cache(1)).logits[0]
            found.append(logits[:, : target.vocab_size].double().log_softmax(-1))
    return torch.cat(found)


def compared(name: str, exact: Tensor, rounded: Tensor, following: Tensor) -> dict[str, Any]:
    distances = (exact.exp() * (exact - rounded)).sum(-1)
    return {
        "type": name,
        "KL, mean": float(distances.mean()),
        "KL, 99th percentile": float(distances.quantile(0.99)),
        "total variation": float((exact.exp() - rounded.exp()).abs().sum(-1).mean() / 2),
        "same likeliest token": float((exact.argmax(-1) == rounded.argmax(-1)).double().mean()),
        "perplexity": math.exp(-float(rounded.gather(1, following[:, None]).mean())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(bundled_path("target")), help="folder (default: the bundled target)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--stories", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a story that are read")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    codec = load_codec(arguments.model)
    stories = [json.loads(line)["text"] for line in STORIES.read_text().splitlines()[: arguments.stories]]
    texts = [codec.encode(story)[: arguments.tokens] for story in stories]
    following = torch.tensor([token for text in texts for token in text[1:]])
    exact = laws(load_model(arguments.model, dtype="float32", device="cpu"), texts)
    rows = [compared("float32", exact, exact, following)]
    for name in arguments.dtypes:
        rows.append(compared(name, exact, laws(load_model(arguments.model, dtype=name, device="cpu"), texts), following))
        print(rows[-1], flush=True)
    what = f"next-token laws against float32, {len(following)} positions of {len(texts)} held-out stories"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/few_bits.py")))


if __name__ == "__main__":
    main()
