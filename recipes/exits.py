"""Early exits and stopping rules for the bundled pair, trained and judged.

Kangaroo's adapter and the acceptance head of the bundled draft learn on the same passes (`adapters`); `layerskip` fine-tunes
the target itself. `exits` holds early exits before and after against each other, `stops` the policies that decide when to stop.

    python recipes/exits.py --data build/heads/own.npy --stage adapters --stage layerskip           # GPU, two minutes
    python recipes/exits.py --stage exits --stage stops --count 6
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accepted import held_prompts
from distill import full_recipe, settings_of, smoke_recipe

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.load import load_model
from outrider.train.acceptance import AcceptanceObjective, AcceptanceSettings
from outrider.train.data import Corpus, read_documents
from outrider.train.distill import new_kangaroo
from outrider.train.draft_lm import DraftLM
from outrider.train.layerskip import LayerSkipObjective, LayerSkipSettings
from outrider.train.loop import Settings, train
from outrider.train.objective import Objective


def adapters(target: Target) -> list[Objective]:
    """What learns on the passes of the target as it is."""
    kangaroo = new_kangaroo(bundled_path("target"), target, settings_of(loss="mixed"), exit_layer=6)
    draft = DraftLM.load(bundled_path("draft"), target.device)
    return [kangaroo, AcceptanceObjective(draft, target, AcceptanceSettings(chunk=settings_of().chunk))]


def layerskip(target: Target) -> list[Objective]:
    """The target itself."""
    model, known = DraftLM.load(bundled_path("target"), target.device), settings_of()
    settings = LayerSkipSettings(
        scale=1.0, rotation=4, judged_exit=6, loss="mixed", chunk=known.chunk, recompute=known.recompute
    )
    return [LayerSkipObjective(model, target, settings)]


def train_stage(objectives: Sequence[Objective], target: Target, data: Path, out: Path, settings: Settings) -> None:
    corpus = Corpus.of(read_documents([data], None, max_len=10_000), held_out=192 if settings.bf16 else 4)
    (out / "state.pt").unlink(missing_ok=True)  # every stage is a run of its own
    notes = {"data": "text of the bundled target (recipes/heads.py)", "target": "outrider bundled target"}
    for one in train(objectives, target, corpus, out, settings=settings, notes=notes):
        print(f"{one.objective.name}: {one.history[-1]}", flush=True)


def share(llm: LLM, name: str, texts: list[list[int]], **options: Any) -> str:
    """Tokens per pass and guesses per pass of a method, greedy."""
    method = llm.compose(name, **{"policy": "fixed", "num_draft_tokens": 4, **options})
    stats = [output.stats for output in llm.generate(texts, SamplingParams(max_tokens=96), method=method)]
    tokens, passes, drafted = (sum(vars(s)[key] for s in stats) for key in ("num_tokens", "num_passes", "num_drafted"))
    return f"{tokens / passes:.3f} tokens and {drafted / passes:.2f} guesses per pass"


def exits_stage(prompts: Path, out: Path, *, count: int) -> None:
    """Early exits: the bundled target as it is, with Kangaroo's adapter, and after LayerSkip training; and what that cost."""
    texts, held = held_prompts(prompts, "story", count), np.load(prompts / "held_story.npy")
    bundled = LLM(method="plain", max_batch_size=16)
    trained = LLM(str(out / "layerskip"), method="plain", max_batch_size=16)
    adapter = {"adapter": str(out / "kangaroo")}
    for label, llm, name, options in (
        ("bundled, exit 6", bundled, "early-exit", {"exit_layer": 6}),
        ("bundled, kangaroo, bare exit 6", bundled, "kangaroo", {"exit_layer": 6}),
        ("bundled, kangaroo, adapter", bundled, "kangaroo", adapter),
        ("bundled, kangaroo, adapter, never unsure", bundled, "kangaroo", {**adapter, "threshold": 0.0}),
        ("layerskip, exit 6", trained, "early-exit", {"exit_layer": 6}),
        ("layerskip, exit 4", trained, "early-exit", {"exit_layer": 4}),
        ("layerskip, kangaroo, bare exit 6", trained, "kangaroo", {"exit_layer": 6}),
    ):
        print(f"{label:42} {share(llm, name, texts, **options)}", flush=True)
    windows = torch.from_numpy(held[: 16 * 256].astype(np.int64)).view(16, 256)
    for label, llm in (("bundled", bundled), ("layerskip", trained)):
        states = llm.target.prefill(windows.tolist(), llm.target.new_cache(16), taps=[llm.target.num_layers])
        logits = llm.target.logits(torch.stack(list(states[llm.target.num_layers]))).float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        print(f"{label}: {loss:.3f} nats per token of held-out stories", flush=True)


def stops_stage(prompts: Path, out: Path, *, count: int) -> None:
    """Policies that decide when to stop drafting, with the bundled draft: what they accept for what they guess."""
    texts = held_prompts(prompts, "story", count) + held_prompts(prompts, "chat", count)
    llm = LLM(method="draft-model", max_batch_size=16)
    for length in (3, 4, 6, 8):
        print(f"fixed {length}: {share(llm, 'draft-model', texts, num_draft_tokens=length)}", flush=True)
    print(f"confidence: {share(llm, 'draft-model', texts, policy='confidence', num_draft_tokens=12)}", flush=True)
    for bound in (0.3, 0.5, 0.7):
        for label, head in (("own probability", {}), ("head", {"head": str(out / "acceptance-head")})):
            found = share(llm, "draft-model", texts, policy="threshold", num_draft_tokens=12, threshold=bound, **head)
            print(f"threshold {bound}, {label}: {found}", flush=True)


def main() -> None:
    """Run the named stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=("adapters", "layerskip", "exits", "stops"), required=True)
    parser.add_argument("--data", type=Path, default=Path("build/heads/own.npy"), help="written by recipes/heads.py")
    parser.add_argument("--out", type=Path, default=Path("build/distill"))
    parser.add_argument("--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy, held_chat.npy")
    parser.add_argument("--count", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--smoke", action="store_true", help="toy scale, to try the code on a CPU")
    arguments = parser.parse_args()
    on_gpu, settings = torch.cuda.is_available(), (smoke_recipe() if arguments.smoke else full_recipe()).settings
    for stage in arguments.stage:
        began = time.monotonic()
        if stage == "exits":
            exits_stage(arguments.prompts, arguments.out, count=arguments.count)
        elif stage == "stops":
            stops_stage(arguments.prompts, arguments.out, count=arguments.count)
        else:
            target = load_model(bundled_path("target"), device="cuda" if on_gpu else "cpu", fast=not on_gpu)
            made, steps, rate = (adapters, 840, 2e-3) if stage == "adapters" else (layerskip, 325, 5e-4)
            settings = replace(settings, max_steps=4 if arguments.smoke else steps, learning_rate=rate, seed=1)
            train_stage(made(target), target, arguments.data, arguments.out, settings)
        print(f"{stage}: done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
