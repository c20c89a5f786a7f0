"""A target divided among two processes writes the text of one: prompts, methods, batch sizes, greedy and seeded.

    python benchmarks/ranks.py [--ranks 2] [--prompts 200] [--skip 0] [-n 12] [--device cpu] [--out FILE]

The bundled target, draft and EAGLE-3 heads in float32. Texts are those of one process with plain decoding, which are the same
for every batch size on a CPU. A row says how many texts differ. Then a follower gets SIGKILL, and the next call must end with
its name within a minute. The last line is JSON. The exit code is 1 if a text differs, a rank holds more than 1/N + 2 % of the
weights, or the end has no name.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.core.errors import RankError
from outrider.models.parallel import ParallelTarget

_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft-model": {"num_draft_tokens": 3},
    "best-first": {"num_tree_nodes": 8},
    "eagle3": {"num_tree_nodes": 8, "heads": bundled_path("heads/eagle3")},
}


def prompts_of(count: int, skipped: int = 0) -> list[str]:
    """Pieces of stories that the models have not seen, without the first ones."""
    lines = Path(__file__).with_name("held_out_stories.jsonl").read_text(encoding="utf-8").splitlines()
    stories = [json.loads(line) for line in lines]
    texts = [story if isinstance(story, str) else story["text"] for story in stories]
    begins = (*range(0, 80, 8), *range(4, 80, 8))
    cut = [" ".join(text.split()[begin : begin + 8]) for begin in begins for text in texts]
    return [text for text in dict.fromkeys(cut) if text][skipped : skipped + count]


def sampling_of(kind: str, count: int, max_tokens: int) -> list[SamplingParams]:
    warm = {"greedy": 0.0, "seeded": 0.9}[kind]
    return [SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=warm, seed=seed) for seed in range(count)]


def compared(one: LLM, many: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    prompts, rows = prompts_of(arguments.prompts, arguments.skip), list[dict[str, Any]]()
    for kind in ("greedy", "seeded"):
        sampling = sampling_of(kind, len(prompts), arguments.max_tokens)
        expected = [out.token_ids for out in one.generate(prompts, sampling, method="plain")]
        for batch_size in (8, 1):
            many.max_batch_size = batch_size
            for name, options in _METHODS.items():
                method = many.compose(name, **({} if name == "plain" else {"policy": "fixed"}), **options)
                began = time.perf_counter()
                found = [out.token_ids for out in many.generate(prompts, sampling, method=method)]
                different = sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))
                row = {"method": name, "batch_size": batch_size, "sampling": kind, "prompts": len(prompts)}
                rows.append({**row, "different": different, "seconds": round(time.perf_counter() - began, 1)})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def named_end(many: LLM, target: ParallelTarget) -> dict[str, Any]:
    """What a call says after a follower was killed."""
    os.kill(target.team.followers[0].process.pid, signal.SIGKILL)
    began, said = time.perf_counter(), ""
    try:
        many.generate("Once upon a time", SamplingParams(max_tokens=4), method="plain")
    except RankError as error:
        said = str(error)
    return {"seconds": round(time.perf_counter() - began, 2), "names_the_rank": "rank 1" in said and "SIGKILL" in said}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many prompts, which another run had")
    parser.add_argument("--max-tokens", "-n", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    how: dict[str, Any] = {"dtype": "float32", "device": arguments.device}
    one, many = LLM(**how), LLM(**how, tensor_parallel=arguments.ranks)
    target = many.target
    assert isinstance(target, ParallelTarget)
    whole = sum(tensor.numel() for tensor in _weights_of(bundled_path("target")))
    told = results_head("a divided target against one process", script="benchmarks/ranks.py")
    told |= {"ranks": arguments.ranks, "share": target.num_weights / whole, "rows": compared(one, many, arguments)}
    told["dead_rank"] = named_end(many, target)
    target.team.close()
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    is_fair = told["share"] <= 1.02 / arguments.ranks
    end = told["dead_rank"]
    is_right = is_fair and end["names_the_rank"] and end["seconds"] < 60
    return 0 if is_right and not any(row["different"] for row in told["rows"]) else 1


def _weights_of(folder: str) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(Path(folder) / "model.safetensors").values())


if __name__ == "__main__":
    sys.exit(main())
