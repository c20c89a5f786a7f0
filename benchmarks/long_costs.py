"""LongSpec behind long contexts on a CPU: what a draft takes, what a pass of the target over it takes, and the draft's bytes.

The bundled target reads up to 8,192 tokens with a wider rotary base. Its head is not trained, because costs do not depend on
the weights. A context is read once. Then drafts and passes behind it are timed, in milliseconds of a processor, one thread. A
draft reads four new tokens first. How good drafts are far out is for ``recipes/long_context.py``.

    python benchmarks/long_costs.py [--lengths 1024,2048,8192] --json benchmarks/results/long_context_cpu.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.core.interfaces import Cache, Context, Plan, Target
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.longspec import LongSpec
from outrider.drafters.heads.token_window import TokenWindow
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import new_config, new_head
from outrider.models.heads.longspec import LongSpecHead
from outrider.models.load import load_model

ROPE_THETA, LONGEST = 50_000.0, 8192 + 256
SHAPES = {"chain of 4": ("chain", 4, 4), "tree of 32": (None, 5, 32)}
"""Branching, depth and guesses."""


def long_target(folder: Path) -> Target:
    """The bundled target with a wider rotary base."""
    shutil.copytree(bundled_path("target"), folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": ROPE_THETA, "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps({**raw, **rope, "max_position_embeddings": LONGEST}))
    return load_model(str(folder), dtype="float32")


def untrained_head(folder: Path) -> LongSpecHead:
    raw, ends = read_target(str(folder))
    head = new_head(new_config("longspec", raw, intermediate_size=1280, draft_window=512), ends)
    assert isinstance(head, LongSpecHead)
    return head.eval().requires_grad_(False)


def milliseconds(run: Callable[[], Any], times: int) -> float:
    """Milliseconds of processor time, the median of several runs."""
    spent = list[float]()
    for _ in range(times + 1):  # the first warms up
        began = time.process_time()
        run()
        spent.append(time.process_time() - began)
    return round(1e3 * median(spent[1:]), 2)


def row_of(target: Target, head: LongSpecHead, length: int, times: int) -> dict[str, Any]:
    """Costs behind a context of some tokens."""
    text = [5 + (7 * place) % 4000 for place in range(length)]
    cache, began = target.new_cache(1), time.process_time()
    target.prefill([text[:-1]], cache)
    row: dict[str, Any] = {"context": length, "prompt, CPU s": round(time.process_time() - began, 2)}
    root = TokenTree.chain(torch.tensor([text[-1:]]))
    row["plain pass, CPU ms"] = milliseconds(lambda: target.score(root, cache), times)
    for name, (branching, depth, count) in SHAPES.items():
        drafter = LongSpec(head, HeadOptions(branching=branching))
        drafted = _draft(drafter, target, cache, text, Plan((depth,), (count,)))
        tree, state = drafted()
        row[f"{name}: draft, CPU ms"] = milliseconds(drafted, times)
        row[f"{name}: target's pass, CPU ms"] = milliseconds(lambda tree=tree: target.score(tree, cache), times)
        row["draft's bytes"] = state.window.num_bytes
    return row


def _draft(drafter: LongSpec, target: Target, cache: Cache, text: list[int], plan: Plan) -> Callable[[], tuple[TokenTree, Any]]:
    """Drafts behind the text, whose last four tokens are new."""
    window, zeros = TokenWindow.empty(drafter.head, 1, torch.float32, target.device), torch.zeros(1, dtype=torch.int64)
    window.read(drafter.head, [text[:-4]], torch.float32)
    sampler = Sampler([RequestState.of(Request(text, SamplingParams()))], target.vocab_size, target.device)
    context = Context([text], sampler, Noise(zeros, zeros), target.device, cache)

    def draft() -> tuple[TokenTree, Any]:
        state = replace(drafter.start([text], {}), window=window.fork([0]))
        return drafter.propose(state, context, plan).tree, state

    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,8192")
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where the table goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        target, head = long_target(Path(place)), untrained_head(Path(place))
        for length in map(int, args.lengths.split(",")):
            rows.append(row_of(target, head, length, args.times))
            print(rows[-1], flush=True)
    what = "LongSpec behind long contexts on a CPU: what a draft and a pass of the target over it take"
    keep_results(args.json, what, rows, script="benchmarks/long_costs.py")


if __name__ == "__main__":
    main()
