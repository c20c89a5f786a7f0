"""What distillation is worth, on the bundled target: drafts of one shape and one beginning, taught in different ways.

A one-layer draft of the bundled shape is trained on text that the target wrote, by cross-entropy only (`base`); from there the
same number of steps over the same text goes on in four ways: cross-entropy (`text`, the undistilled draft), DistillSpec
off-policy (`distill`) and on-policy (`own`: half of the windows are the draft's own), and AdaSPEC with `distill` as its
reference (`adaspec`). What can share the target's passes does: beside `base` learn a draft that reads no conversations
(`stories`, for the online experiment), Kangaroo's adapter and the acceptance head of the bundled draft. `layerskip` fine-tunes
the target itself.

    python recipes/distill.py --stage base --stage distill --stage adaspec --stage own --stage layerskip       # GPU, 4 minutes
    python recipes/distill.py --stage judge                                       # tokens per pass on held-out prompts
    python recipes/distill.py --stage exits --stage stops     # early exits before and after training; policies that stop
    python recipes/distill.py --stage few                     # the same ways from 64 texts of a new kind, on a CPU, then judged
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bundled_stories import CUT, Sampler, SamplerConfig, join_layer, read_shape

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.heads import Packed
from outrider.models.load import load_model
from outrider.train.acceptance import AcceptanceObjective, AcceptanceSettings
from outrider.train.data import Corpus, Document, read_documents
from outrider.train.distill import DistillObjective, DistillSettings, new_kangaroo
from outrider.train.draft_lm import DraftLM
from outrider.train.layerskip import LayerSkipObjective, LayerSkipSettings
from outrider.train.loop import Settings, train
from outrider.train.objective import Objective, Outcome

SHAPE = {"intermediate_size": 1024}
CHAT_IDS = (1, 2, 3)
STAGES = ("base", "distill", "adaspec", "own", "layerskip", "judge", "few", "exits", "stops")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result."""

    settings: Settings
    base_seconds: float
    distill_seconds: float
    layerskip_seconds: float
    held_out: int
    own_batch: int  # windows the draft writes at a time
    own_every: int  # steps between two times


def full_recipe() -> Recipe:
    """For one large GPU."""
    settings = Settings(
        max_steps=100_000,
        batch_size=64,
        row_len=512,
        learning_rate=2e-3,
        warmup_steps=40,
        bf16=True,
        judge_every=1_000_000,
        save_every=1_000_000,
        seed=1,
    )
    return Recipe(settings, 58.0, 36.0, 36.0, held_out=192, own_batch=2048, own_every=100)


def smoke_recipe() -> Recipe:
    """The same path in two minutes on a CPU."""
    settings = replace(full_recipe().settings, batch_size=2, bf16=False, warmup_steps=2)
    return Recipe(settings, 6.0, 4.0, 6.0, held_out=4, own_batch=4, own_every=2)


class Stories(Objective):
    """Another objective that learns only from windows without conversations."""

    def __init__(self, inner: DistillObjective) -> None:
        self.inner, self.name, self.module, self.taps = inner, inner.name, inner.module, inner.taps

    def __call__(self, batch: Packed) -> Outcome:
        chatty = torch.stack([batch.tokens == token for token in CHAT_IDS]).any(0).any(1, keepdim=True)
        return self.inner(replace(batch, supervised=batch.supervised & ~chatty))

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.inner.save(folder, notes)


class OwnText(Objective):
    """Another objective half of whose windows the draft continued itself, many at a time with the weights of that moment."""

    def __init__(self, inner: DistillObjective, draft: DraftLM, corpus: Corpus, recipe: Recipe) -> None:
        self.inner, self.name, self.module, self.taps = inner, inner.name, inner.module, inner.taps
        self._draft, self._recipe = draft, recipe
        self._windows = np.array([document.tokens for document in corpus.train])
        config = SamplerConfig(
            batch=recipe.own_batch, context=self._windows.shape[1], coolest=1.0, hottest=1.0, opening=0, min_p=1e-6, seed=5
        )
        self._sampler = Sampler(draft.state_dict(), read_shape(draft.origin), config, start=0)
        self._pool: list[Document] = []

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        random = np.random.default_rng([7, step])
        if step % self._recipe.own_every == 0:
            self._pool = self._written(random)
        half = len(documents) // 2
        return [*(self._pool[i] for i in random.integers(len(self._pool), size=half)), *documents[half:]]

    def __call__(self, batch: Packed) -> Outcome:
        return self.inner(batch)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.inner.save(folder, notes)

    def _written(self, random: np.random.Generator) -> list[Document]:
        """Prompts of all lengths up to half a window, continued by the draft as it is now."""
        count, device = self._recipe.own_batch, self._sampler.device
        refresh(self._sampler, self._draft)
        prompts = torch.from_numpy(self._windows[random.integers(len(self._windows), size=count)]).to(device)
        lengths = random.integers(4, self._windows.shape[1] // 2, size=count)
        free = torch.arange(prompts.shape[1], device=device) >= torch.from_numpy(lengths).to(device)[:, None]
        written = self._sampler.continue_from(prompts.masked_fill(free, CUT), torch.ones(count, device=device), 0)
        return [Document(tuple(row), int(begin)) for row, begin in zip(written.tolist(), lengths, strict=True)]


def refresh(sampler: Sampler, draft: DraftLM) -> None:
    """Give the sampler the draft's weights of this moment, in place: what was compiled and captured stays."""
    state = {name: tensor.detach().to(sampler.device, sampler.embed.dtype) for name, tensor in draft.state_dict().items()}
    sampler.embed.copy_(state["model.embed_tokens.weight"])
    sampler.norm.copy_(state["model.norm.weight"])
    for index, layer in enumerate(sampler.layers):
        for name, tensor in vars(join_layer(state, index)).items():
            vars(layer)[name].copy_(tensor)


def read_corpus(data: Path, recipe: Recipe) -> Corpus:
    return Corpus.of(read_documents([data], None, max_len=10_000), held_out=recipe.held_out)


def settings_of(**changes: Any) -> DistillSettings:
    on_gpu = torch.cuda.is_available()
    return DistillSettings(chunk=1 << 29 if on_gpu else 1 << 24, recompute=not on_gpu, **changes)


def run(objectives: Sequence[Objective], target: Target, corpus: Corpus, out: Path, settings: Settings) -> int:
    """Train and say what came out; returns the number of steps."""
    began = time.monotonic()
    notes = {"data": "text of the bundled target (recipes/distill.py)", "target": "outrider bundled target"}
    (out / "state.pt").unlink(missing_ok=True)  # every stage is a run of its own
    runs = train(objectives, target, corpus, out, settings=settings, notes=notes)
    seconds, steps = time.monotonic() - began, runs[0].history[-1]["step"]
    for one in runs:
        print(f"{one.objective.name}: {one.history[-1]} ({steps} steps, {seconds:.0f} s, all of the stage)", flush=True)
    return steps


def base_stage(target: Target, corpus: Corpus, out: Path, recipe: Recipe) -> None:
    """Cross-entropy from nothing, and what can learn beside it."""
    name, device = bundled_path("target"), target.device
    text = DistillObjective("base", DraftLM.fresh(name, SHAPE, device), target, settings_of(loss="text"))
    stories = DistillObjective("stories", DraftLM.fresh(name, SHAPE, device), target, settings_of(loss="mixed"))
    kangaroo = new_kangaroo(name, target, settings_of(loss="mixed"), exit_layer=6)
    draft = DraftLM.load(bundled_path("draft"), device)
    head = AcceptanceObjective(draft, target, AcceptanceSettings(chunk=settings_of().chunk))
    run(
        [text, Stories(stories), kangaroo, head], target, corpus, out, replace(recipe.settings, max_seconds=recipe.base_seconds)
    )


def distill_stage(target: Target, corpus: Corpus, out: Path, recipe: Recipe) -> None:
    """The same steps by cross-entropy and by distillation, on the same passes."""
    settings = replace(recipe.settings, max_seconds=recipe.distill_seconds, learning_rate=1e-3)
    objectives = [
        DistillObjective(name, DraftLM.load(str(out / "base"), target.device), target, settings_of(loss=loss))
        for name, loss in (("text", "text"), ("distill", "mixed"))
    ]
    steps = run(objectives, target, corpus, out, settings)
    (out / "steps.json").write_text(json.dumps(steps))


def same_steps(out: Path, recipe: Recipe) -> Settings:
    return replace(recipe.settings, max_steps=json.loads((out / "steps.json").read_text()), learning_rate=1e-3)


def adaspec_stage(target: Target, corpus: Corpus, out: Path, recipe: Recipe) -> None:
    reference = DraftLM.load(str(out / "distill"), target.device).requires_grad_(False)
    draft = DraftLM.load(str(out / "base"), target.device)
    objective = DistillObjective("adaspec", draft, target, settings_of(loss="mixed"), reference=reference)
    run([objective], target, corpus, out, same_steps(out, recipe))


def own_stage(target: Target, corpus: Corpus, out: Path, recipe: Recipe) -> None:
    draft = DraftLM.load(str(out / "base"), target.device)
    inner = DistillObjective("own", draft, target, settings_of(loss="mixed"))
    run([OwnText(inner, draft, corpus, recipe)], target, corpus, out, same_steps(out, recipe))


def layerskip_stage(target: Target, corpus: Corpus, out: Path, recipe: Recipe) -> None:
    model = DraftLM.load(bundled_path("target"), target.device)
    chunk = settings_of().chunk
    chosen = LayerSkipSettings(
        scale=1.0, rotation=4, judged_exit=6, loss="mixed", chunk=chunk, recompute=not torch.cuda.is_available()
    )
    settings = replace(recipe.settings, max_seconds=recipe.layerskip_seconds, learning_rate=5e-4)
    run([LayerSkipObjective(model, target, chosen)], target, corpus, out, settings)


def held_prompts(folder: Path, kind: str, count: int) -> list[list[int]]:
    """Beginnings of held-out texts: 24 tokens of a story, a conversation up to its first answer."""
    tokens, starts = np.load(folder / f"held_{kind}.npy"), np.load(folder / f"held_{kind}_starts.npy")
    found = []
    for start in starts[:count]:
        window = tokens[start : start + 400].tolist()
        found.append(window[: window.index(2) + 2 if kind == "chat" and 2 in window[:300] else 24])
    return found


def judge_stage(folders: dict[str, str], prompts: Sequence[Sequence[list[int]]], *, num_draft_tokens: int) -> None:
    """Tokens per pass on held-out prompts, greedy, chains of one length; texts compared with plain decoding."""
    texts, params, plain = [prompt for part in prompts for prompt in part], SamplingParams(max_tokens=96), None
    for name, folder in folders.items():
        llm = LLM(method="draft-model", draft=folder, max_batch_size=16, num_draft_tokens=num_draft_tokens)
        plain = plain or llm.generate(texts, params, method=llm.compose("plain"))
        outputs = llm.generate(texts, params)
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, outputs, strict=True))
        rates, left = [], list(outputs)
        for part in prompts:
            mine, left = left[: len(part)], left[len(part) :]
            rates.append(sum(o.stats.num_tokens for o in mine) / sum(o.stats.num_passes for o in mine))
        total = sum(o.stats.num_tokens for o in outputs) / sum(o.stats.num_passes for o in outputs)
        found = f"{total:.3f} tokens per pass, by kind {' '.join(f'{rate:.3f}' for rate in rates)}"
        print(f"{name:10} {found}; {same} of {len(texts)} texts equal plain decoding", flush=True)


def few_stage(prompts: Path, out: Path, *, count: int, num_draft_tokens: int) -> None:
    """A draft that never read a conversation learns from 64 of them: the same texts, steps and beginning for every way."""
    target = load_model(bundled_path("target"), device="cpu")
    tokens, starts = np.load(prompts / "held_chat.npy"), np.load(prompts / "held_chat_starts.npy")
    parts = [tokens[a:b].tolist()[:320] for a, b in pairwise(starts[200:312])]
    corpus = Corpus([Document(tuple(part)) for part in parts[:64]], [Document(tuple(part)) for part in parts[96:]])
    settings = Settings(
        max_steps=48, batch_size=4, row_len=320, learning_rate=5e-4, warmup_steps=5, judge_every=1000, save_every=1000, seed=2
    )

    def new(name: str, loss: str, reference: str | None = None) -> DistillObjective:
        draft = DraftLM.load(str(out / "stories"), target.device)
        known = None if reference is None else DraftLM.load(str(out / reference), target.device).requires_grad_(False)
        return DistillObjective(name, draft, target, DistillSettings(loss), reference=known)

    run([new("few-text", "text"), new("few-distill", "mixed")], target, corpus, out, settings)
    run([new("few-adaspec", "mixed", reference="few-distill")], target, corpus, out, settings)
    names = ("stories", "few-text", "few-distill", "few-adaspec")
    texts = [held_prompts(prompts, "chat", count)]
    judge_stage({name: str(out / name) for name in names}, texts, num_draft_tokens=num_draft_tokens)


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


TRAIN_STAGES = {
    "base": base_stage,
    "distill": distill_stage,
    "adaspec": adaspec_stage,
    "own": own_stage,
    "layerskip": layerskip_stage,
}


def main() -> None:
    """Run the named stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=STAGES, required=True)
    parser.add_argument("--data", type=Path, default=Path("build/heads/own.npy"), help="written by recipes/heads.py")
    parser.add_argument("--out", type=Path, default=Path("build/distill"))
    parser.add_argument("--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy, held_chat.npy")
    parser.add_argument("--count", type=int, default=32, help="prompts of each kind")
    parser.add_argument("-K", type=int, default=4, help="guesses per round")
    parser.add_argument("--smoke", action="store_true", help="toy scale, to try the code on a CPU")
    arguments = parser.parse_args()
    recipe, out = smoke_recipe() if arguments.smoke else full_recipe(), arguments.out
    wanted = [stage for stage in arguments.stage if stage in TRAIN_STAGES]
    if wanted:
        on_gpu = torch.cuda.is_available()
        target = load_model(bundled_path("target"), device="cuda" if on_gpu else "cpu", fast=not on_gpu)
        corpus = read_corpus(arguments.data, recipe)
        for stage in wanted:
            began = time.monotonic()
            TRAIN_STAGES[stage](target, corpus, out, recipe)
            print(f"{stage}: done in {time.monotonic() - began:.0f} s", flush=True)
    if "few" in arguments.stage:
        few_stage(arguments.prompts, out, count=arguments.count, num_draft_tokens=arguments.K)
    if "exits" in arguments.stage:
        exits_stage(arguments.prompts, out, count=arguments.count)
    if "stops" in arguments.stage:
        stops_stage(arguments.prompts, out, count=arguments.count)
    if "judge" in arguments.stage:
        names = ("base", "text", "distill", "own", "adaspec", "stories")
        texts = [held_prompts(arguments.prompts, kind, arguments.count) for kind in ("story", "chat")]
        folders = {**{name: str(out / name) for name in names}, "bundled": bundled_path("draft")}
        judge_stage(folders, texts, num_draft_tokens=arguments.K)


if __name__ == "__main__":
    main()
