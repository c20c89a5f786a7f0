"""The CPU fast path on this machine: its floor, what passes cost, and who is faster on the same file.

    python benchmarks/cpu.py [MODEL ...] [--types auto float32] [--draft MODEL] [--json FILE]
    python benchmarks/cpu.py small --draft small-draft --peer vllm=PYTHON --peer openvino=PYTHON,model=DIR,draft=DIR
    python benchmarks/cpu.py mid.F16.gguf mid.Q8_0.gguf --draft mid-draft.{kind} --peer openvino=PYTHON,model=DIR/mid.{kind}

A MODEL is a GGUF file, a folder, ``bundled``, or one of those that benchmarks/cpu_models.py makes (small, mid, gptq). In the
paths of drafts and peers ``{kind}`` is what follows the first dot of its name, so each model has a draft of its kind. It runs
on one thread, and CPU time counts, since a machine may be shared: engines take turns, and the least of all rounds is given. A
row is an engine on a model: each of ``--types`` (``float32-torch`` is the PyTorch twin), and llama.cpp (GGUF) or transformers
(folders) where they import. Speculation on the first type follows, with the CPU time of a token against plain decoding, on
prompts that repeat themselves. Each ``--peer`` is a process of its own, whose CPU time counts too. What does not run is
skipped, with the reason. The last line of stdout is one JSON document: ``rows`` is what a page shows of ``measured``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from outrider import LLM
from outrider.bench.decode import decode
from outrider.bench.peers.peer import PeerSpec
from outrider.bench.peers.race import Terms, race_peers
from outrider.bench.provenance import cpu_name, results_head
from outrider.bench.settings import Setting
from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams
from outrider.models.native import NativeDecoder, isa_here, ready_to_measure

sys.path.insert(0, str(Path(__file__).parent))
from cpu_costs import (
    CONTEXT,
    NODES,
    Rates,
    file_mb,
    layer_weights,
    num_weights,
    opening,
    pass_costs,
    products_at_once,
    prompt_of,
)
from cpu_engines import Engine, Ours, Run, peers_of
from cpu_models import SHAPES, make_models

Row = dict[str, Any]
STORIES = (
    "Once upon a time, there was a little fox who lived in a forest. The fox had a red ball and liked to play with it. ",
    "Tom and Lily went to the park. They saw a big dog. The dog was sad because it had lost its bone. Tom said to Lily: ",
)
_PLACES = re.compile(r"(?<![^ ,=])/[^ ,=]+")
COPYING = {"prompt-lookup": Setting("prompt-lookup"), "suffix": Setting("suffix", options={"memory_tokens": 0})}
"""Without a memory of earlier answers: the prompts come back in every round, and a memory would hold their texts."""
DRAFTING = {
    "draft-model K=4": Setting("draft-model", options={"num_draft_tokens": 4}),
    "draft-model": Setting("draft-model"),
    "best-first": Setting("best-first", options={"num_draft_tokens": 5, "num_tree_nodes": 12}),
}


def path_of(model: str, made: Path) -> str:
    """Where a model lies; those of ``cpu_models.py`` are made if they are missing."""
    if model == "bundled":
        return str(bundled_path("target"))
    return str(make_models(made, [model])[model]) if model in (*SHAPES, "gptq") else model


def of_kind(text: str, model: str) -> str:
    """``{kind}`` of a path, filled in for this model."""
    return text.replace("{kind}", Path(model).name.partition(".")[2])


def opened(path: str, dtype: str, draft: str | None = None) -> LLM:
    return LLM(path, draft=draft, dtype=dtype.removesuffix("-torch"), fast=not dtype.endswith("-torch"))


def engine_row(name: str, runs: list[Run], first: list[int]) -> Row:
    """What all engines have. ``same_tokens``: how many of the first type's are the same before the first that is not."""
    same = next((i for i, (a, b) in enumerate(zip(first, runs[0].tokens, strict=True)) if a != b), len(first))
    return {
        "engine": name,
        "token_ms": round(min(min(run.token_ms) for run in runs), 2),
        "token_ms_median": round(statistics.median(ms for run in runs for ms in run.token_ms), 2),
        "prompt_ms": round(min(run.prompt_ms for run in runs)),
        "same_tokens": same,
    }


def own_row(llm: LLM, dtype: str, costs: dict[int, float], rates: Rates, *, prompt: int) -> Row:
    """Passes and floors of a type of ours, and the floor of a prompt of so many tokens, its attention left out."""
    row: Row = {"pass_ms": {nodes: round(ms, 2) for nodes, ms in costs.items()}, "16_over_1": round(costs[16] / costs[1], 2)}
    target = llm.target
    if not isinstance(target, NativeDecoder):
        return row
    weights = num_weights(target.config)
    at_once = products_at_once(dtype, target.num_bytes / weights)
    head = weights - layer_weights(target.config)
    prompt_floor = rates.floor_ms(target.num_bytes, prompt * (weights - head) + head, at_once=at_once)
    floors = {n: rates.floor_ms(target.num_bytes, n * weights, at_once=at_once) for n in NODES}
    return row | {
        "floor_ms": {nodes: round(ms, 2) for nodes, ms in floors.items()},
        "floor_16_over_1": round(floors[16] / floors[1], 2),
        "prompt_floor_ms": round(prompt_floor, 1),
        "matrices_mb": round(target.num_bytes / 1e6, 1),
    }


def speculation(llm: LLM, settings: dict[str, Setting], args: argparse.Namespace) -> list[Row]:
    """CPU time of a token, methods in turns: medians of ``rounds``."""
    methods = {name: setting.compose(llm) for name, setting in {"plain": Setting("plain"), **settings}.items()}
    prompts = [(llm.codec.encode(story) * 8)[: args.prompt] for story in STORIES]
    params = SamplingParams(max_tokens=args.spoken, ignore_eos=True)
    spent: dict[str, list[float]] = {name: [] for name in methods}
    texts: dict[str, list[list[int]]] = {name: [] for name in methods}
    per_pass: dict[str, float] = {}
    for _ in range(args.rounds):
        for prompt in prompts:
            for name, method in methods.items():
                done = decode(llm, method, [prompt], [params], clock=time.process_time)
                spent[name].append(1e3 * done.seconds / len(done.outputs[0]))
                texts[name].append(done.outputs[0])
                stats = done.states[0].stats
                per_pass[name] = stats.num_tokens / stats.num_passes
    plain = statistics.median(spent["plain"])
    return [
        {
            "engine": f"ours, {name}",
            "token_ms_median": round(statistics.median(ms), 2),
            "plain_over_it": round(plain / statistics.median(ms), 2),
            "tokens_per_pass": round(per_pass[name], 2),
            "same_text": texts[name] == texts["plain"],
        }
        for name, ms in spent.items()
    ]


def measure(model: str, args: argparse.Namespace, rates: Rates) -> list[Row]:
    """All rows of a model."""
    path, rows = path_of(model, args.models), list[Row]()
    draft = path_of(of_kind(args.draft, path), args.models) if args.draft else None
    llms = {dtype: opened(path, dtype, draft if number == 0 else None) for number, dtype in enumerate(args.types)}
    costs = pass_costs({dtype: llm.target for dtype, llm in llms.items()}, args.repeats, args.context)
    peers, skipped = peers_of(path)
    engines: dict[str, Engine] = {f"ours {dtype}": Ours(llm.target) for dtype, llm in llms.items()} | peers
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            runs[name].append(engine.run(prompt_of(args.prompt), args.tokens))
    first = runs[f"ours {args.types[0]}"][0].tokens
    for name in engines:
        row = engine_row(name, runs[name], first)
        dtype = name.removeprefix("ours ")
        if dtype in llms:
            row |= own_row(llms[dtype], dtype, costs[dtype], rates, prompt=args.prompt)
            if not dtype.endswith("-torch"):
                row |= {"file_mb": file_mb(path), **opening(path, dtype)}
        rows.append(row)
    rows += speculation(llms[args.types[0]], COPYING | (DRAFTING if draft else {}), args) if args.spoken else []
    rows += [{"engine": name, "skipped": reason} for name, reason in skipped.items()]
    rows += raced(llms[args.types[0]], path, draft, best_of(rows), args) if args.peer else []
    rows = [{"model": Path(model).name, **row} for row in rows]
    print(*map(json.dumps, rows), sep="\n", flush=True)
    return rows


def brief(row: Row) -> Row:
    """What a page shows of a row."""
    found: Row = {"model": row["model"], "engine": row["engine"]}
    if "token_ms_median" in row:
        found["token, ms"] = row.get("token_ms", row["token_ms_median"])
    if "pass_ms" in row:
        found |= {f"{nodes} nodes, ms": row["pass_ms"][nodes] for nodes in (4, 16)}
        found |= {"16 over one": row["16_over_1"]}
    if "floor_ms" in row:
        found |= {"floor, ms": row["floor_ms"][1], "floor of it": row["floor_16_over_1"]}
    if "after_prompt_mb" in row:
        found |= {"memory over file": round(row["after_prompt_mb"] / row["file_mb"], 2)}
    names = {
        "prompt_ms": "prompt, ms",
        "prompt_floor_ms": "prompt's floor, ms",
        "plain_over_it": "plain over it",
        "tokens_per_pass": "tokens per pass",
    }
    names |= {"tokens_per_s": "tokens per CPU second", "to_our_plain": "to our plain"}
    names |= {"to_best_peer": "to the best peer", "skipped": "skipped"}
    return found | {name: row[key] for key, name in names.items() if key in row}


def is_ours(line: Row) -> bool:
    return line["name"].startswith("outrider ")


def best_of(rows: list[Row]) -> Setting:
    """The fastest speculation of those measured."""
    known = {f"ours, {name}": setting for name, setting in (COPYING | DRAFTING).items()}
    spoken = [row for row in rows if row["engine"] in known]
    return known[min(spoken, key=lambda row: row["token_ms_median"])["engine"]] if spoken else COPYING["suffix"]


def raced(llm: LLM, path: str, draft: str | None, setting: Setting, args: argparse.Namespace) -> list[Row]:
    """Engines in processes of their own, in tokens per second of their own processor."""
    specs = [PeerSpec.of(of_kind(text, path), model=path, draft=draft) for text in args.peer]
    prompts = [(llm.codec.encode(story) * 8)[: args.prompt] for story in STORIES]
    terms = Terms(args.spoken or args.tokens, args.rounds, time.process_time)
    found = race_peers(llm, setting, specs, prompts, terms)
    best = max((line["speed"]["value"] for line in found["lines"] if not is_ours(line)), default=None)
    lines: list[Row] = [
        {
            "engine": line["name"],
            "tokens_per_s": round(line["speed"]["value"], 1),
            "to_our_plain": round(line["to_our_plain"], 2),
            **({"version": line["version"]} if line["version"] else {}),
            **({"to_best_peer": round(line["speed"]["value"] / best, 2)} if best and is_ours(line) else {}),
        }
        for line in found["lines"]
    ]
    return lines + [{"engine": line["name"], "skipped": line["reason"]} for line in found["skipped"]]


def versions(measured: list[Row]) -> str:
    """What the engines call themselves."""
    found = {row["engine"].split()[0]: row["version"] for row in measured if "version" in row}
    return "".join(f"; {name} is {version}" for name, version in found.items())


def shown(command: str) -> str:
    """A command without the folders of this machine."""
    names = ("PYTHON" if name.startswith("python") else name for name in (Path(path).name for path in _PLACES.findall(command)))
    return _PLACES.sub(lambda _: next(names), command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=["bundled"])
    parser.add_argument("--types", nargs="+", default=["auto", "float32"])
    parser.add_argument("--draft", help="a model with the same vocabulary")
    parser.add_argument("--models", type=Path, default=Path("build/cpu"), help="where models are made")
    parser.add_argument("--peer", action="append", default=[], metavar="ENGINE[=PYTHON[,model=DIR,draft=DIR,...]]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=12, help="of every pass")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before every pass whose cost is measured")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24, help="greedy tokens of every engine")
    parser.add_argument("--spoken", type=int, default=64, help="tokens of every method; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ready_to_measure()
    rates = Rates.measured()
    speeds = f"memory {rates.bytes_read / 1e6:.1f} GB/s, {rates.multiply_adds / 1e6:.1f} billion multiply-adds a second"
    print(f"{cpu_name()}, {isa_here().name}: {speeds}", flush=True)
    what = f"CPU milliseconds on one thread ({isa_here().name}; {speeds}), engines in turns, least of all rounds"
    document = results_head(what, script="benchmarks/cpu.py")
    document["command"] = shown(document["command"])
    measured = list[Row]()
    for model in args.model:
        measured += measure(model, args, rates)
        document |= {"what": what + versions(measured), "rows": list(map(brief, measured)), "measured": measured}
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
