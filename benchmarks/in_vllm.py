"""Our drafters inside vLLM on prompts that are edited: texts, steps and CPU seconds beside vLLM's n-gram and our engine.

    VLLM_PYTHON benchmarks/in_vllm.py MODEL [--ways ...] [--prompts 3] [-n 48] [-K 8] [--rounds 1] [--out FILE]

VLLM_PYTHON is the Python of an environment with vLLM, in which outrider can be imported too (PYTHONPATH=src). MODEL is a folder
of transformers. Each way runs in a process of its own: vLLM without guesses, with its n-gram, with our suffix proposer, and our
own engine with the same drafter and length. The ways "recycling" and "outrider-recycling" are token recycling in both. "hybrid"
and "reference", which is given the prompts, run inside vLLM alone. All are greedy, in float32, on one thread, one prompt at a
time. A text of its own is continued before, so that nothing is compiled later. Seconds are CPU seconds. With several rounds a
prompt counts at its fastest, and suffix drafters then know its answer. The last line is JSON. The exit code is 1 if a text of
vLLM differs from plain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_PROPOSERS = {
    "suffix": "SuffixProposer",
    "recycling": "TokenRecyclingProposer",
    "hybrid": "HybridProposer",
    "reference": "ReferenceProposer",
}
_OURS: dict[str, dict[str, Any]] = {
    "outrider": {"method": "suffix"},
    "outrider-recycling": {"method": "token-recycling", "num_successors": 1, "recycle_prompt": False},
}
_STEPS = "vllm:iteration_tokens_total"
Continue = Callable[[list[int]], list[int]]


def speculation(way: str, length: int) -> dict[str, Any] | None:
    """What vLLM is told."""
    if way == "ngram":
        return {"method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if way in _PROPOSERS:
        model = f"outrider.vllm_plugin.{_PROPOSERS[way]}"
        return {"method": "custom_class", "model": model, "num_speculative_tokens": length}
    return None


def prompts_of(model: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from outrider.bench.suites import load_suites

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": item.turns[0]}] for item in load_suites(["editing"])[0].first(count).items]
    chats = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for messages in asked]
    return [tokenizer(chat, add_special_tokens=False).input_ids for chat in chats]


def inside_vllm(way: str, arguments: argparse.Namespace) -> tuple[Continue, Callable[[], int]]:
    """A function that continues a prompt, and the number of steps so far."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    how = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 1, "enforce_eager": True, "enable_prefix_caching": False}
    told = speculation(way, arguments.length)
    llm = LLM(arguments.model, seed=0, disable_log_stats=False, **how, **({"speculative_config": told} if told else {}))
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)

    def go_on(prompt: list[int]) -> list[int]:
        return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

    return go_on, lambda: sum(metric.count for metric in llm.get_metrics() if metric.name == _STEPS)


def in_ours(way: str, arguments: argparse.Namespace) -> tuple[Continue, Callable[[], int]]:
    from outrider import LLM, SamplingParams

    options = {**_OURS[way], "num_draft_tokens": arguments.length}
    if "num_successors" in options:
        options["num_tree_nodes"] = arguments.length
    llm = LLM(arguments.model, dtype="float32", device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
    passes = 0

    def go_on(prompt: list[int]) -> list[int]:
        nonlocal passes
        (output,) = llm.generate([prompt], params)
        passes += output.stats.num_passes
        return list(output.token_ids)

    return go_on, lambda: passes


def one_way(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Texts, steps and CPU seconds, in this process."""
    prompts = prompts_of(arguments.model, arguments.prompts)
    if way == "reference":
        os.environ["OUTRIDER_VLLM_OPTIONS"] = json.dumps({"references": prompts})
    go_on, steps = in_ours(way, arguments) if way in _OURS else inside_vllm(way, arguments)
    go_on(prompts[0][::-1])  # whatever is compiled is compiled now
    texts: list[list[int]] = []
    seconds, before = [float("inf")] * len(prompts), steps()
    for turn in range(arguments.rounds):
        for index, prompt in enumerate(prompts):
            began = time.process_time()
            text = go_on(prompt)
            seconds[index] = min(seconds[index], time.process_time() - began)
            if turn == 0:
                texts.append(text)
    tokens = arguments.max_tokens * len(prompts)  # the suite may have fewer than were asked for
    per_step = tokens * arguments.rounds / (steps() - before)
    return {"way": way, "tokens": tokens, "tokens_per_step": per_step, "cpu_s": sum(seconds), "texts": texts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="+", default=["plain", "ngram", "suffix", "outrider"])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-tokens", "-n", type=int, default=48)
    parser.add_argument("--length", "-K", type=int, default=8, help="guesses of a step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--into", type=Path, help="one way alone, in this process; its row goes into this file")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    if arguments.into:
        arguments.into.write_text(json.dumps(one_way(arguments.ways[0], arguments)))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for way in arguments.ways:
            file = Path(home) / way
            sizes = [f"--{name}={getattr(arguments, name)}" for name in ("prompts", "length", "rounds")]
            command = [sys.executable, __file__, arguments.model, f"--max-tokens={arguments.max_tokens}", *sizes]
            subprocess.run([*command, "--ways", way, "--into", str(file)], env={**os.environ, **_QUIET}, check=True)
            rows.append(json.loads(file.read_text()))
            print({name: value for name, value in rows[-1].items() if name != "texts"}, file=sys.stderr, flush=True)
    texts = {row["way"]: row.pop("texts") for row in rows}
    for row in rows:
        plain = texts.get("plain", texts[row["way"]])
        row["different"] = sum(mine != one for mine, one in zip(texts[row["way"]], plain, strict=True))
    from outrider.bench.provenance import keep_results

    told = keep_results(arguments.out, "our drafters inside vLLM, editing prompts", rows, script="benchmarks/in_vllm.py")
    print(json.dumps(told))
    return 1 if any(row["different"] for row in rows if row["way"] not in _OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
