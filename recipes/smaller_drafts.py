"""What smaller drafts and heads are worth on a CPU: bytes, accepted length, drafting time and speed, beside the whole ones.

    python recipes/smaller_drafts.py drafts --json benchmarks/results/smaller_drafts.json
    python recipes/smaller_drafts.py heads --json benchmarks/results/smaller_heads.json

Each command makes what ``--out`` lacks: texts of the target's own, a draft pruned from the target, the same distilled, and
drafts or heads with fewer tokens. Then all forms draft for the same greedy texts in turns (``in_turns.py``), with drafts of
depth four (chains of draft models, trees of heads) and under the default policy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from in_turns import Timed, race
from rounded_heads import kilobytes
from trim import write_texts

from outrider.api import LLM
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.cli.main import main as outrider
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.heads import load_head
from outrider.models.native import NativeDecoder, ready_to_measure
from outrider.models.reduced import ReducedDraft

LENGTH = 4
TRIMMED = (1024, 512)
LEARNING = "-O batch_size=8 -O learning_rate=0.001 -O warmup_steps=8 -O judge_every=20 -O save_every=20".split()


@dataclass(frozen=True, eq=False)
class Form:
    """A draft or heads in one size and type."""

    name: str
    megabytes: float
    """Size of the matrices that a pass reads."""
    fixed: Timed
    """With drafts of depth four."""
    free: Timed
    """With the default policy."""

    def row(self, plain: Timed) -> dict[str, Any]:
        return {
            "draft": self.name,
            "matrices, MB": round(self.megabytes, 2),
            "tokens per pass": self.fixed.tokens_per_pass,
            "draft, ms": self.fixed.draft_ms,
            "tokens per CPU s": self.fixed.speed,
            "to plain": round(self.fixed.speed / plain.speed, 2),
            "default policy, tokens per pass": self.free.tokens_per_pass,
            "default policy, tokens per CPU s": self.free.speed,
            "default policy, to plain": round(self.free.speed / plain.speed, 2),
        }


def made(out: Path, *, stage: str, texts: int, steps: int, seconds: float) -> None:
    """Write what is missing."""
    out.mkdir(parents=True, exist_ok=True)
    corpus = out / "corpus.jsonl"
    if not corpus.is_file():
        write_texts(out, texts + 1, prompts=1, num_tokens=96)
    data = ["--data", str(corpus)]
    if stage == "drafts":
        if not (out / "pruned").is_dir():
            outrider(["prune", *data, "--layers", "4", "--mlp", "320", "--max-len", "96", "--out", str(out / "pruned")])
        learn = ["train", "distill", "--draft", str(out / "pruned"), *data, "--out", str(out), "--max-len", "96"]
        if not (out / "distill").is_dir():
            outrider([*learn, "--held-out", "16", *LEARNING, "-O", f"max_steps={steps}", "-O", f"max_seconds={seconds}"])
    for size in TRIMMED:
        for name in ("draft",) if stage == "drafts" else ("heads/eagle1", "heads/eagle3"):
            folder = trimmed_folder(out, name, size)
            if not folder.is_dir():
                outrider(["trim", bundled_path(name), *data, "--tokens", str(size), "--out", str(folder)])


def trimmed_folder(out: Path, name: str, size: int) -> Path:
    return out / f"{Path(name).name}-{size}"


def draft_forms(out: Path) -> Iterator[Form]:
    """The bundled draft whole, in fewer bits, with fewer tokens; and drafts cut out of the target."""
    bundled, trimmed = bundled_path("draft"), {size: trimmed_folder(out, "draft", size) for size in TRIMMED}
    listed: list[tuple[str, str | Path, str]] = [(f"bundled, {dtype}", bundled, dtype) for dtype in ("bfloat16", "float32")]
    listed += [(f"bundled, {dtype}", bundled, dtype) for dtype in ("int8", "w8a8", "int4")]
    listed += [(f"bundled, {size} tokens", folder, "bfloat16") for size, folder in trimmed.items()]
    listed += [(f"bundled, {TRIMMED[0]} tokens, int4", trimmed[TRIMMED[0]], "int4")]
    listed += [("pruned to 4 layers", out / "pruned", "bfloat16"), ("pruned, distilled", out / "distill", "bfloat16")]
    listed += [("pruned, distilled, int4", out / "distill", "int4")]
    for name, folder, dtype in listed:
        llm = LLM(bundled_path("target"), draft=str(folder), draft_dtype=dtype, method="draft-model")
        fixed = llm.compose("draft-model", policy="fixed", num_draft_tokens=LENGTH)
        yield Form(name, megabytes(llm.drafts[0]), Timed(llm, fixed), Timed(llm, llm.compose("draft-model")))


def head_forms(out: Path) -> Iterator[Form]:
    """The bundled EAGLE heads whole, in fewer bits, and with fewer tokens."""
    llm = LLM(bundled_path("target"), method="plain")
    bounded: dict[str, Any] = {"policy": "fixed", "num_draft_tokens": LENGTH}
    for kind in ("eagle1", "eagle3"):
        bundled = bundled_path(f"heads/{kind}")
        listed: list[tuple[str, str, int]] = [(f"{kind}, {bits} bits", bundled, bits) for bits in (16, 8, 4)]
        listed += [(f"{kind}, {size} tokens", str(trimmed_folder(out, kind, size)), 16) for size in TRIMMED]
        for name, folder, bits in listed:
            shape: dict[str, Any] = {"heads": folder, **({"bits": bits} if bits < 16 else {})}
            fixed, free = llm.compose(kind, **shape, **bounded), llm.compose(kind, **shape)
            yield Form(name, head_megabytes(folder, bits), Timed(llm, fixed), Timed(llm, free))


def megabytes(draft: Target) -> float:
    """Size of the matrices of a draft on the native decoder."""
    decoder = draft.inner if isinstance(draft, ReducedDraft) else draft
    assert isinstance(decoder, NativeDecoder), "this recipe times the native decoder; it needs a C++ compiler"
    return decoder.num_bytes / 1e6


def head_megabytes(folder: str, bits: int) -> float:
    """Size of the matrices of heads. An output matrix that is the target's counts too: it is read for every guess, in 16
    bits."""
    head = load_head(folder, ends=bundled_path("target"))
    has_own = any("lm_head" in name for name, _ in head.named_parameters())
    borrowed = 0 if has_own else 2 * head.config.draft_vocab_size * head.config.hidden_size
    return kilobytes(folder, bits) / 1e3 + borrowed / 1e6


def own_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Beginnings that the target wrote."""
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=10_000 + seed) for seed in range(count)]
    return [output.token_ids for output in llm.generate([[0]] * count, params, method="plain")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=("drafts", "heads"))
    parser.add_argument("--out", type=Path, default=Path("build/smaller"))
    parser.add_argument("--texts", type=int, default=1024, help="texts of 96 tokens to learn from, if there are none")
    parser.add_argument("--steps", type=int, default=120, help="of distillation")
    parser.add_argument("--seconds", type=float, default=780.0, help="of distillation, at most")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ready_to_measure()
    made(arguments.out, stage=arguments.stage, texts=arguments.texts, steps=arguments.steps, seconds=arguments.seconds)
    forms = list((draft_forms if arguments.stage == "drafts" else head_forms)(arguments.out))
    llm = forms[0].fixed.llm
    plain = Timed(llm, llm.compose("plain"))
    others = {f"{form.name}, {way}": timed for form in forms for way, timed in (("fixed", form.fixed), ("free", form.free))}
    race(plain, others, own_prompts(llm, arguments.prompts), arguments.tokens)
    rows = [{"draft": "none", "tokens per pass": 1.0, "tokens per CPU s": plain.speed, "to plain": 1.0}]
    rows += [form.row(plain) for form in forms]
    print(*map(json.dumps, rows), sep="\n")
    what = f"{arguments.stage} in several sizes and types on the bundled target: tokens per pass, and CPU time of one thread"
    keep_results(arguments.json, what, rows, script="recipes/smaller_drafts.py")


if __name__ == "__main__":
    main()
