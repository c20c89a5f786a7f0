"""Tokens per pass of drafters on trained state-space targets, as chains and as trees, at temperature 0 and 1.

``recipes/state_space.py`` makes the models. Prompts are the first bytes of held-out rows. Every text is compared with plain
decoding's, greedy and with the seed, in float32.

    python benchmarks/state_space_drafts.py --models build/states/mamba2 build/states/bamba [--prompts 200]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results

NUM_GUESSES = 5
NUM_NODES = 16
SAMPLERS: dict[str, dict[str, Any]] = {"0": {"temperature": 0.0}, "1": {"temperature": 1.0, "seed": 5}}
CHAIN, TREE = {"num_draft_tokens": NUM_GUESSES}, {"num_draft_tokens": NUM_GUESSES, "num_tree_nodes": NUM_NODES}


def ways(folder: Path) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Method, shape and options by label. Heads are those of which the folder has some."""
    found: dict[str, tuple[str, str, dict[str, Any]]] = {
        "suffix": ("suffix", "chain", CHAIN),
        "draft-model": ("draft-model", "chain", CHAIN),
        "best-first": ("best-first", "tree", TREE),
    }
    for kind in ("eagle3", "eagle1"):
        if (folder / kind).is_dir():
            heads = {"heads": str(folder / kind)}
            found[f"{kind}, chain"] = (kind, "chain", {**CHAIN, **heads, "branching": "chain"})
            found[f"{kind}, tree"] = (kind, "tree", {**TREE, **heads})
    return found


def rows_of(folder: Path, prompts: list[list[int]], max_tokens: int, device: str) -> Iterator[dict[str, Any]]:
    how: dict[str, Any] = {"draft": str(folder / "draft"), "dtype": "float32", "device": device}
    llm = LLM(str(folder / "target"), method="draft-model", **how)
    for temperature, sampler in SAMPLERS.items():
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampler)
        plain = [list(one.token_ids) for one in llm.generate(prompts, params, method="plain")]
        for label, (name, shape, options) in ways(folder).items():
            began = time.monotonic()
            outputs = llm.generate(prompts, params, method=llm.compose(name, **options))
            tokens, passes = (sum(vars(one.stats)[key] for one in outputs) for key in ("num_tokens", "num_passes"))
            same = sum(list(one.token_ids) == text for one, text in zip(outputs, plain, strict=True))
            row = {"model": folder.name, "method": label, "shape": shape, "temperature": temperature}
            row |= {"tokens_per_pass": round(tokens / passes, 3), "prompts": len(prompts), "identical": same}
            print(row, f"{time.monotonic() - began:.0f} s", flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of recipes/state_space.py")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows, document = list[dict[str, Any]](), dict[str, Any]()
    what = f"tokens per pass on state-space targets of Python's bytes: chains of {NUM_GUESSES}, trees of {NUM_NODES} nodes"
    for folder in arguments.models:
        held_out = np.load(folder / "test.npy")
        places = np.linspace(0, len(held_out) - 1, arguments.prompts).astype(int)
        prompts = [row[: arguments.prompt_len].tolist() for row in held_out[places]]
        for row in rows_of(folder, prompts, arguments.tokens, arguments.device):
            rows.append(row)
            document = keep_results(arguments.out, what, rows, script="benchmarks/state_space_drafts.py")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
