"""The drafters of 2024 to 2026 beside each other: trained for equal steps on text that the bundled target wrote, then judged.

Every group is a process of its own, and the groups share one GPU. A step's batch depends on the seed and the step alone, so
heads of different groups learn from the same texts in the same order.

    python recipes/heads.py --stage write --rounds 3 --out build/field                        # a GPU, one minute
    python recipes/field.py train --out build/field --steps 1000 --seconds 280                # five minutes
    python recipes/field.py judge --out build/field --json build/field/field_heads.json       # two minutes
    python recipes/field.py train --out build/field --smoke                                   # toy scale, to try it on a CPU

What ``judge`` says of each kind: trained numbers, acceptance by position while learning (teacher-forced, held-out texts), and
tokens per pass with the engine. The latter are greedy, with chains and with best-first trees, on beginnings of held-out stories
and of texts that the target wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.api import LLM
from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams
from outrider.models.heads import load_head
from outrider.train.data import Corpus, read_documents

HERE = Path(__file__).parent
STORIES = HERE.parent / "benchmarks/held_out_stories.jsonl"
GROUPS = {
    "blocks": ("dspark", "dflash", "p-eagle", "eagle3"),
    "features": ("medusa", "hydra", "eagle1", "fspad", "chimera"),
    "falcon": ("falcon",),
}
"""Heads that share a process, and with it the target's passes."""
EXITS = "2,4,6,8,10,12,14"
NUM_PROMPT_TOKENS, NUM_OWN = 24, 48


def commands(out: Path, *, steps: int, seconds: float, smoke: bool) -> dict[str, list[list[str]]]:
    """What each process runs, one command after the other."""
    text, python = str(out / "own.npy"), sys.executable
    small = ["--smoke", "--batch", "2"] if smoke else ["--batch", "32"]
    bounds = ["--steps", str(steps), "--train-seconds", str(seconds)]
    heads = [python, str(HERE / "heads.py"), "--stage", "train", "--text", text, *small, *bounds]
    made = {name: [[*heads, "--kinds", ",".join(kinds), "--out", str(out / name)]] for name, kinds in GROUPS.items()}
    size = {"batch_size": 2, "warmup_steps": 2, "judge_every": 2} if smoke else {"batch_size": 32, "judge_every": 100}
    shared = {"max_steps": steps, "max_seconds": seconds, "save_every": 100_000, "seed": 1, **size}

    def learn(kind: str, place: Path, held_out: int, *more: str, **settings: object) -> list[str]:
        options = [word for key, value in {**shared, **settings}.items() for word in ("-O", f"{key}={value}")]
        read = ["--data", text, "--held-out", str(held_out), "--out", str(place)]
        return [python, "-m", "outrider", "train", kind, *read, *more, *options]

    held = 4 if smoke else 192
    made["sorted"] = [learn("sorted", out, held, exits="1,2,4", loss="mixed", learning_rate=2e-3)]
    skip = [python, str(HERE / "exits.py"), "--stage", "layerskip", "--data", text, "--out", str(out), *small[:1][: int(smoke)]]
    half = {"max_seconds": seconds / 3, "exits": EXITS, "learning_rate": 0.003}
    made["exits"] = [
        learn("specee", out / "bundled", held, **half),
        skip,
        learn("specee", out / "skipping", held, "--target", str(out / "layerskip"), **half),
    ]
    return made


def train_stage(out: Path, *, steps: int, seconds: float, smoke: bool) -> None:
    """All groups at once; a group that is not done a minute and a half after its time is ended."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    began, running = time.monotonic(), dict[str, subprocess.Popen[bytes]]()
    for name, parts in commands(out, steps=steps, seconds=seconds, smoke=smoke).items():
        script = " && ".join(" ".join(f"'{word}'" for word in part) for part in parts)
        with (out / "logs" / f"{name}.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "2"}
            bounded = ["timeout", "3600" if smoke else str(seconds + 90), "bash", "-c", script]
            running[name] = subprocess.Popen(bounded, stdout=log, stderr=log, env=environment)
    for name, process in running.items():
        process.wait()
        lines = (out / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
        print(
            f"{name}: rc {process.returncode} after {time.monotonic() - began:.0f} s | {lines[-1] if lines else ''}", flush=True
        )


def prompts_of(llm: LLM, text: Path, *, smoke: bool) -> dict[str, list[list[int]]]:
    """Beginnings of held-out stories, and of texts of the target's own that no head has learned from."""
    stories = [llm.codec.encode(json.loads(line)["text"]) for line in STORIES.read_text(encoding="utf-8").splitlines()]
    held = Corpus.of(read_documents([text], None, max_len=10_000), held_out=8 if smoke else 192).held_out
    own = [list(document.tokens) for document in held[:NUM_OWN]]
    count = 2 if smoke else None
    return {
        "stories": [tokens[:NUM_PROMPT_TOKENS] for tokens in stories[:count]],
        "own": [tokens[:NUM_PROMPT_TOKENS] for tokens in own[:count]],
    }


def accepted(rates: Sequence[float], depth: int) -> float:
    """Tokens per pass of a chain so long, from its acceptance by position: heads of different depths compare by it."""
    return round(1 + float(np.cumprod(rates[:depth]).sum()), 3)


def row_of(llm: LLM, kind: str, folder: Path, prompts: dict[str, list[list[int]]], plain: Sequence[Any]) -> dict[str, Any]:
    """One head: what it learned, and what the engine gets from it."""
    notes = json.loads((folder / "provenance.json").read_text())
    head = load_head(folder, llm.target)
    head.freeze()
    last = notes["history"][-1]
    row: dict[str, Any] = {
        "heads": kind,
        "trained_millions": round(sum(p.numel() for p in head.parameters() if p.requires_grad) / 1e6, 2),
        "steps": last["step"],
        "accepted_length": last["accepted_length"],
        "by_position": last["by_depth"],
        "accepted_of_3": accepted(last["by_depth"], 3),
    }
    texts, params = [prompt for many in prompts.values() for prompt in many], SamplingParams(max_tokens=96)
    for shape, options in (
        ("chain of 4", {"num_draft_tokens": 4, "num_tree_nodes": 4, "branching": "chain"}),
        ("tree of 32", {"num_tree_nodes": 32, "branching": "best-first"}),
    ):
        method = llm.compose(kind, heads=str(folder), policy="fixed", **options)
        outputs = llm.generate(texts, params, method=method)
        begin = 0
        for name, many in prompts.items():
            part = outputs[begin : begin + len(many)]
            rate = sum(o.stats.num_tokens for o in part) / sum(o.stats.num_passes for o in part)
            row[f"{shape}, {name}"] = round(rate, 3)
            begin += len(many)
        row[f"{shape}, same text"] = sum(a.token_ids == b.token_ids for a, b in zip(plain, outputs, strict=True))
    row["texts"] = len(texts)
    return row


def judge_stage(out: Path, kinds: Sequence[str], *, smoke: bool) -> dict[str, Any]:
    """Every head that was trained, with the plain decoder in float32, so that texts can be compared."""
    llm = LLM(bundled_path("target"), method="plain", fast=False, dtype="float32", max_batch_size=32)
    prompts = prompts_of(llm, out / "own.npy", smoke=smoke)
    plain = llm.generate([prompt for many in prompts.values() for prompt in many], SamplingParams(max_tokens=96))
    rows, histories = list[dict[str, Any]](), dict[str, Any]()
    for group, members in GROUPS.items():
        for kind in members:
            folder = out / group / "heads" / kind
            if kind in kinds and (folder / "provenance.json").is_file():
                rows.append(row_of(llm, kind, folder, prompts, plain))
                histories[kind] = json.loads((folder / "provenance.json").read_text())["history"]
                print(json.dumps(rows[-1]), flush=True)
    tokens = int(np.load(out / "own.npy", mmap_mode="r").size)
    what = (
        "heads of the bundled target after equal training: acceptance by position, and tokens per pass with the engine, greedy"
    )
    return {**results_head(what, script="recipes/field.py"), "text_tokens": tokens, "histories": histories, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=("train", "judge"))
    parser.add_argument("--out", type=Path, default=Path("build/field"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=280.0, help="each group stops then, whatever its step")
    parser.add_argument("--kinds", default=",".join(kind for kinds in GROUPS.values() for kind in kinds), help="to judge")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.stage == "train":
        train_stage(arguments.out, steps=arguments.steps, seconds=arguments.seconds, smoke=arguments.smoke)
        return
    found = judge_stage(arguments.out, arguments.kinds.split(","), smoke=arguments.smoke)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
