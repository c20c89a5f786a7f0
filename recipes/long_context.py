"""LongSpec at 1k to 32k tokens: a target that reads so far, drafts that learned from 1k, and what they are worth far out.

The bundled target ends at 2,048 tokens. ``target`` teaches it 32,768 with a wider rotary base, on its own stories laid end to
end. Half of the pieces behind the first few are copies of an earlier piece, so what stands far back matters. ``heads`` trains
two LongSpec heads on documents of 1,024 tokens of the same kind: one with anchor offsets, one without. ``judge`` gives the
engine contexts of several lengths. The last piece has just begun: a copy of one that stands far back, or a new story.

    python recipes/heads.py --stage write --rounds 3 --out build/field
    python recipes/long_context.py --stage target --stage heads --stage judge --text build/field/own.npy --out build/long
    python recipes/long_context.py --scale cpu --stage write --stage target --stage heads --stage judge --out build/long_cpu
    python recipes/long_context.py ... --scale smoke                                       # toy sizes, to try the code

Scale *cpu* is for one core and about half an hour of its time. It has contexts up to 8,192 tokens, which the target reads with
a wider rotary base and unchanged tensors. It trains heads of 80 steps, drafts chains alone on two texts, and measures the
processor time of a draft and of a pass of the target over it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from bundled_stories import read_shape, rope_tables
from bundled_train import Llama, TrainConfig, amp, compiled, run_steps, text_loss
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.api import LLM
from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.heads.longspec import LongSpec
from outrider.models.heads import load_head
from outrider.models.heads.longspec import LongSpecHead

Tokens = NDArray[np.int64]
SHAPES: Mapping[str, dict[str, Any]] = {"chain of 4": {"branching": "chain", "num_draft_tokens": 4}, "tree of 32": {}}
OPENING = 64
"""Tokens of the last piece that a judged context ends with."""


@dataclass(frozen=True)
class Scale:
    """Sizes and times."""

    lengths: tuple[int, ...]
    piece: int
    short: int
    short_piece: int
    target_seconds: float
    tokens_per_step: int
    head_steps: int
    head_seconds: float
    num_prompts: int
    num_new: int
    batch_size: int = 16
    """Documents of a step of the heads' training."""
    num_documents: int = 8192
    num_held_out: int = 64
    window: int = 512
    """Tokens that the draft looks back at."""
    rope_theta: float = 500_000.0
    offsets: Mapping[str, int] = field(default_factory=lambda: {"plain": 0, "anchored": 31_000})
    """Heads by name, with the largest anchor offset."""
    num_windows: int = 0
    """Texts that stage write lets the target write."""
    kinds: tuple[str, ...] = ("copy", "new story")
    """What contexts end with."""
    shapes: tuple[str, ...] = ("chain of 4", "tree of 32")
    native: bool = False
    """Judge with native passes, and time them. Elsewhere the eager decoder judges, which is quick to begin."""


FULL = Scale((1024, 8192, 16384, 32512), 512, 1024, 128, 85.0, 131_072, 700, 75.0, 6, 64)
CPU = Scale(
    (1024, 4096, 8192), 512, 1024, 128, 0.0, 0, 80, 3600.0, 2, 48,
    batch_size=1, num_documents=96, num_held_out=2, rope_theta=50_000.0, offsets={"plain": 0, "anchored": 7_000},
    num_windows=96, kinds=("new story",), shapes=("chain of 4",), native=True,
)  # fmt: skip
SMOKE = Scale(
    (64, 128), 16, 64, 16, 2.0, 256, 2, 20.0, 1, 8, batch_size=2, num_documents=12, num_held_out=4, window=64, num_windows=8
)  # fmt: skip
SCALES = {"full": FULL, "cpu": CPU, "smoke": SMOKE}


def document(pieces: Tokens, length: int, chance: np.random.Generator) -> Tokens:
    """Stories end to end; behind the first few, every second piece is a copy of an earlier one."""
    size, chosen = pieces.shape[1], list[Tokens]()
    for place in range(-(-length // size)):
        again = place > 1 and chance.random() < 0.5
        chosen.append(chosen[chance.integers(place)] if again else pieces[chance.integers(len(pieces))])
    return np.concatenate(chosen)[:length]


def cut(text: Path, size: int, *, held_out: bool) -> Tokens:
    """Windows of the target's text in pieces: the last eighth to judge by, the others to learn from."""
    windows = np.load(text).astype(np.int64)
    windows = windows[7 * len(windows) // 8 :] if held_out else windows[: 7 * len(windows) // 8]
    return windows[:, : windows.shape[1] // size * size].reshape(-1, size)


def write_stage(out: Path, scale: Scale) -> None:
    """Text of the target's own, written by the engine at several temperatures: less than ``heads.py`` lets a GPU write."""
    heat = [place / max(1, scale.num_windows - 1) for place in range(scale.num_windows)]
    params = [SamplingParams(max_tokens=scale.piece, temperature=t, seed=n, ignore_eos=True) for n, t in enumerate(heat)]
    outs = LLM(max_batch_size=16).generate([[0]] * scale.num_windows, params)
    np.save(out / "own.npy", np.array([one.token_ids for one in outs], np.int16))


def target_stage(text: Path, out: Path, scale: Scale) -> None:
    """The bundled target, at home in long contexts."""
    source, folder, longest = Path(bundled_path("target")), out / "target", scale.lengths[-1] + 256
    shutil.copytree(source, folder, dirs_exist_ok=True)
    raw, theta = json.loads((source / "config.json").read_text()), scale.rope_theta
    rope = {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps({**raw, **rope, "max_position_embeddings": longest}, indent=1))
    if scale.target_seconds:
        model = trained_target(text, scale, longest)
        save_file(model.weights(), folder / "model.safetensors", metadata={"format": "pt"})


def trained_target(text: Path, scale: Scale, longest: int) -> Llama:
    """The bundled target after some steps on long documents."""
    device, source = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Path(bundled_path("target"))
    shape = replace(read_shape(source), rope_theta=scale.rope_theta, context=longest)
    torch.set_float32_matmul_precision("high")
    model, chance = Llama(shape, device), np.random.default_rng(1)
    parts = load_file(source / "model.safetensors").items()
    model.load_state_dict({name[6:]: part.float() for name, part in parts if name.startswith("model.")})
    cos, sin = rope_tables(shape, longest, device)
    score, pieces = compiled(text_loss, device), cut(text, scale.piece, held_out=False)

    def losses(window: int) -> torch.Tensor:
        rows = [document(pieces, window + 1, chance) for _ in range(max(1, scale.tokens_per_step // window))]
        ids = torch.from_numpy(np.stack(rows)).to(device)
        with amp(device):
            return score(model(ids[:, :-1], cos[:window], sin[:window]), ids[:, 1:])[None]

    config = TrainConfig(
        scale.target_seconds, scale.tokens_per_step, longest // 8, longest, 0.6,
        rate=1e-3, warmup_steps=20, decay=0.01, clip=1.0, seed=1,
    )  # fmt: skip
    print(json.dumps(run_steps("long target", [model], losses, config)), flush=True)
    return model


def heads_stage(text: Path, out: Path, scale: Scale) -> None:
    """All heads at once, on short documents, from the same batches."""
    chance, pieces = np.random.default_rng(2), cut(text, scale.short_piece, held_out=False)
    rows = [document(pieces, scale.short, chance) for _ in range(scale.num_documents)]
    np.save(out / "short.npy", np.stack(rows).astype(np.int16))
    size = {"batch_size": scale.batch_size, **({"judge_every": 100} if scale is FULL else {"warmup_steps": 2})}
    running = {}
    for name, offset in scale.offsets.items():
        settings = {"max_steps": scale.head_steps, "max_seconds": scale.head_seconds, "learning_rate": 2e-3, **size}
        settings |= {"loss": "mixed", "draft_window": scale.window, "max_offset": offset, "intermediate_size": 1280}
        options = [
            word for key, value in {**settings, "save_every": 100_000, "seed": 1}.items() for word in ("-O", f"{key}={value}")
        ]
        command = [sys.executable, "-m", "outrider", "train", "longspec", "--target", str(out / "target")]
        command += ["--data", str(out / "short.npy"), "--max-len", str(scale.short), "--held-out", str(scale.num_held_out)]
        running[name] = subprocess.Popen([*command, "--out", str(out / name), *options])
    for name, process in running.items():
        if process.wait():
            raise SystemExit(f"training {name} failed")


def contexts(pieces: Tokens, length: int, count: int) -> dict[str, list[tuple[Tokens, Tokens]]]:
    """Contexts with the text that was begun. A copied piece stands anywhere in the first three quarters."""
    chance, found = np.random.default_rng(length), dict[str, list[tuple[Tokens, Tokens]]]()
    opening, size = min(OPENING, pieces.shape[1] // 4), pieces.shape[1]
    for kind in ("copy", "new story"):
        for _ in range(count):
            text = document(pieces, length - opening, chance)
            begin = int(chance.integers(max(1, 3 * len(text) // 4 // size))) * size
            last = text[begin : begin + size] if kind == "copy" else pieces[chance.integers(len(pieces))]
            found.setdefault(kind, []).append((np.concatenate([text, last[:opening]]), last[opening:]))
    return found


def judge_stage(text: Path, out: Path, scale: Scale) -> dict[str, Any]:
    """Tokens per pass with the engine, greedy, and what the draft remembers, by length of the context."""
    llm = LLM(str(out / "target"), method="plain", fast=scale.native, dtype="float32", max_batch_size=scale.num_prompts)
    heads, pieces = {name: out / name / "longspec" for name in scale.offsets}, cut(text, scale.piece, held_out=True)
    rows = list[dict[str, Any]]()
    for length in scale.lengths:
        made = contexts(pieces, length, scale.num_prompts)
        for kind in scale.kinds:
            rows.append({"context": length, "text": kind, **_row(llm, heads, made[kind], scale)})
            print(json.dumps(rows[-1]), flush=True)
    what = f"LongSpec drafts trained on {scale.short} tokens: tokens per pass by length of the context"
    return {**results_head(what, script="recipes/long_context.py"), "rows": rows}


def _row(llm: LLM, heads: dict[str, Path], pairs: list[tuple[Tokens, Tokens]], scale: Scale) -> dict[str, Any]:
    prompts, params = [begun.tolist() for begun, _ in pairs], SamplingParams(max_tokens=scale.num_new, ignore_eos=True)
    began = time.perf_counter()
    plain = llm.generate(prompts, params, method="plain")
    rest = [(out.token_ids, after.tolist()) for out, (_, after) in zip(plain, pairs, strict=True)]
    same = [np.mean([a == b for a, b in zip(ids, after, strict=False)]) for ids, after in rest]
    row: dict[str, Any] = {"target follows the copied text": round(float(np.mean(same)), 3)}
    for name, folder in heads.items():
        for shape in scale.shapes:
            method = llm.compose("longspec", heads=str(folder), policy="fixed", **SHAPES[shape])
            with costs(method.drafter, llm.target) as spent:
                outs = llm.generate(prompts, params, method=method)
            passes, tokens = sum(o.stats.num_passes for o in outs), sum(o.stats.num_tokens for o in outs)
            row[f"{name}, {shape}"] = round(tokens / passes, 3)
            row[f"{name}, {shape}, same text"] = sum(a.token_ids == b.token_ids for a, b in zip(plain, outs, strict=True))
            if scale.native:
                row |= {f"{name}, {shape}, {part}, CPU ms": round(1e3 * median(each), 2) for part, each in spent.items()}
    row["draft_bytes"] = draft_bytes(llm, next(iter(heads.values())), prompts[0])
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def timed(run: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Wraps a function, and adds the milliseconds of every call to ``spent``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return run(*args, **kwargs)
        finally:
            spent.append(time.process_time() - began)

    return call


@contextmanager
def costs(drafter: Any, target: Any) -> Iterator[dict[str, list[float]]]:
    """Seconds of a processor that every draft, and every pass of the target over a draft, takes meanwhile."""
    spent: dict[str, list[float]] = {"draft": [], "target's pass": []}
    propose, score = (timed(run, one) for run, one in zip((drafter.propose, target.score), spent.values(), strict=True))
    with patch.object(drafter, "propose", propose), patch.object(target, "score", score):
        yield spent


def draft_bytes(llm: LLM, folder: Path, prompt: list[int]) -> int:
    """What the draft keeps after a round behind a prompt."""
    head = load_head(folder, llm.target)
    assert isinstance(head, LongSpecHead)
    drafter, target = LongSpec(head.eval()), llm.target
    cache = target.new_cache(1)
    target.prefill([prompt[:-1]], cache)
    state = drafter.start([prompt], {})
    zeros = torch.zeros(1, dtype=torch.int64, device=target.device)
    sampler = Sampler([RequestState.of(Request(prompt, SamplingParams()))], target.vocab_size, target.device)
    with torch.inference_mode():
        drafter.propose(state, Context([prompt], sampler, Noise(zeros, zeros), target.device, cache), Plan((4,), (32,)))
    assert state.window is not None
    return state.window.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=("write", "target", "heads", "judge"), required=True)
    parser.add_argument("--text", type=Path, help="windows of stage write of heads.py, if not those of this one")
    parser.add_argument("--out", type=Path, default=Path("build/long"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", help="contexts to judge, all if not given")
    parser.add_argument("--scale", choices=SCALES, default="full")
    arguments = parser.parse_args()
    scale, text = SCALES[arguments.scale], arguments.text or arguments.out / "own.npy"
    arguments.out.mkdir(parents=True, exist_ok=True)
    for stage in arguments.stage:
        began = time.monotonic()
        if stage == "write":
            write_stage(arguments.out, scale)
        elif stage == "target":
            target_stage(text, arguments.out, scale)
        elif stage == "heads":
            heads_stage(text, arguments.out, scale)
        else:
            lengths = tuple(map(int, arguments.lengths.split(","))) if arguments.lengths else scale.lengths
            found = judge_stage(text, arguments.out, replace(scale, lengths=lengths))
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{stage}: done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
