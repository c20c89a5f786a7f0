"""Is the default policy as good as the best fixed length on each family of prompts, and never slower than plain decoding?

Every drafter, a useless one included (the bundled draft with its vocabulary shuffled), runs with fixed lengths and with the
adaptive policy, beside plain decoding on the same prompts. They run in lockstep: the one that has emitted least makes the next
round. So disturbances of the machine affect all of them alike. Each is charged its own rounds, without the time of other work
on the machine. The best fixed length is chosen in repetitions of its own, because the best of six in the ones that count would
partly be the luckiest. Then it is compared with the adaptive policy and with plain decoding. Times are medians over
repetitions, summed over prompts.

    python benchmarks/default_policy.py [--rounds 3] [--choosing 2] [--prompts 8] [--max-tokens 192] [--model DIR --draft DIR]
    python benchmarks/default_policy.py --every [--suites chat]        each row of the table against plain decoding, no lengths
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.bench.stats import ratio_of, total
from outrider.bench.suites import Suite, load_suites
from outrider.bundled import bundled_path
from outrider.core.errors import OutriderError
from outrider.core.method import Method
from outrider.core.own_time import own_seconds
from outrider.engine.step import Engine
from outrider.methods import METHODS

NO_MEMORY = {name: {"memory_tokens": 0} for name in ("suffix", "hybrid")}
"""Options of drafters that would remember the answers of earlier repetitions of the same prompts."""
WHAT = "the default policy against the best fixed length and plain decoding, medians with 95 % intervals, by own time"


def useless_draft(folder: str) -> str:
    """The draft model with every token standing for another one."""
    place = Path(tempfile.mkdtemp(prefix="useless-"))
    shutil.copytree(folder, place, dirs_exist_ok=True)
    path = place / "model.safetensors"
    tensors = load_file(path)
    order = torch.randperm(len(tensors["model.embed_tokens.weight"]), generator=torch.Generator().manual_seed(0))
    for name in {"lm_head.weight", "model.embed_tokens.weight"} & set(tensors):
        tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return str(place)


def measure(llm: LLM, drafter: str, suite: Suite, args: argparse.Namespace) -> dict[str, Any]:
    """One family, which is all that its policy knows, as where it is served alone."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1)
    prompts = encoded(llm, suite.first(args.prompts))
    own = NO_MEMORY.get(drafter, {})
    fixed = {f"K={k}": llm.compose(drafter, num_draft_tokens=int(k), **own) for k in args.lengths.split(",")}
    chosen = times_of(llm, fixed, prompts, params, args.choosing)
    best = min(fixed, key=lambda name: total(chosen[name]))
    last = {"plain": llm.compose("plain"), best: fixed[best], "adaptive": llm.compose(drafter, policy="adaptive", **own)}
    times = times_of(llm, last, prompts, params, args.rounds)
    ratios = [ratio_of(times["adaptive"], times[other]).to_json() for other in (best, "plain")]
    return {"best": best, "best_to_plain": total(times["plain"]) / total(times[best]), "ratios": ratios}


def times_of(
    llm: LLM, methods: dict[str, Method], prompts: list[list[int]], params: SamplingParams, num_rounds: int
) -> dict[str, list[list[float]]]:
    """Seconds of every method by repetition and prompt. The first is not counted: it warms up, and policies learn costs."""
    times: dict[str, list[list[float]]] = {name: [] for name in methods}
    for number in range(num_rounds + 1):
        done = [race(llm, methods, prompt, params) for prompt in prompts]
        for name in methods if number else ():
            times[name].append([seconds[name] for seconds in done])
    return times


def every(llm: LLM, suites: list[str], args: argparse.Namespace) -> None:
    """The adaptive policy on every row of the table that these models can run, each beside a plain decoding of its own. If
    thirty took turns, none would find its own data in the caches, as a user's one method does. The first row is plain decoding
    itself, to see what the figures are worth."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    for suite in load_suites(suites):
        prompts = encoded(llm, suite.first(args.prompts))
        for name in args.rows.split(",") if args.rows else METHODS:
            try:
                own = {} if name == "plain" else {"policy": "adaptive"} | NO_MEMORY.get(name, {})
                method = llm.compose(name, **own)
            except OutriderError as error:
                print(f"{name:<16} left out: {error}")
                continue
            times = times_of(llm, {"plain": llm.compose("plain"), "other": method}, prompts, params, args.rounds)
            span = ratio_of(times["other"], times["plain"])
            print(f"{suite.name:<10} {name:<16} {span.value:.3f} ({span.low:.2f}-{span.high:.2f})", flush=True)


def race(llm: LLM, methods: dict[str, Method], prompt: list[int], params: SamplingParams) -> dict[str, float]:
    """Seconds of every method's rounds on one prompt, all methods in lockstep."""
    engines = {name: Engine(llm.target, method) for name, method in methods.items()}
    batches = {name: engine.start(llm.requests([prompt], [params])) for name, engine in engines.items()}
    seconds = dict.fromkeys(methods, 0.0)
    running = list(methods)
    while running:
        name = min(running, key=lambda name: batches[name].rows[0].num_output)
        began = own_seconds()
        engines[name].step(batches[name])
        seconds[name] += own_seconds() - began
        if batches[name].rows[0].is_finished:
            running.remove(name)
    texts = {tuple(batch.rows[0].output_ids) for batch in batches.values()}
    assert len(texts) == 1, "every method says what plain decoding says"
    return seconds


def encoded(llm: LLM, suite: Suite) -> list[list[int]]:
    return [
        llm.codec.encode(item.text) if item.text else llm.codec.encode_chat([{"role": "user", "content": item.turns[0]}])
        for item in suite.items
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--choosing", type=int, default=2, help="repetitions that choose the best fixed length")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--suites", default="stories,chat,summary,code")
    parser.add_argument("--drafters", default="draft-model,useless,prompt-lookup,suffix")
    parser.add_argument("--lengths", default="1,2,3,4,6,8", help="fixed lengths to compare with")
    parser.add_argument("--every", action="store_true", help="each row of the table against plain decoding")
    parser.add_argument("--rows", help="only these of them")
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="where the table goes")
    args = parser.parse_args()
    draft = args.draft or bundled_path("draft")
    llm = LLM(args.model, draft=draft, dtype=args.dtype)
    if args.every:
        every(llm, args.suites.split(","), args)
        return
    rows = list[dict[str, Any]]()
    print(f"{'drafter':<14} {'suite':<10} {'best fixed':>16} {'adaptive/best':>22} {'adaptive/plain':>22}")
    for drafter in args.drafters.split(","):
        user = LLM(args.model, draft=useless_draft(draft), dtype=args.dtype) if drafter == "useless" else llm
        for suite in load_suites(args.suites.split(",")):
            line = measure(user, "draft-model" if drafter == "useless" else drafter, suite, args)
            best = f"{line['best']}, {line['best_to_plain']:.2f}x"
            cells = [f"{span['value']:.3f} ({span['low']:.2f}-{span['high']:.2f})" for span in line["ratios"]]
            print(f"{drafter:<14} {suite.name:<10} {best:>16} {cells[0]:>22} {cells[1]:>22}", flush=True)
            row = {"drafter": drafter, "family": suite.name, "best fixed": best}
            rows.append(row | {"adaptive / best fixed": cells[0], "adaptive / plain": cells[1]})
            keep_results(args.json, WHAT, rows, script="benchmarks/default_policy.py")


if __name__ == "__main__":
    main()
