"""What distillation is worth, on the bundled target: drafts of one shape and one beginning, taught in different ways.

Text comes first. Stage `corpus` makes stories and conversations as in the target's own corpus (sampled again from stories15M,
not written by the target). Stage `write` lets the target continue the same beginnings. A one-layer draft of the bundled shape
is pre-trained on the corpus by cross-entropy, as any small sibling of a model is (`base`). From there the same number of steps
goes on in several ways. `control` is more of the same. On the target's text, `words` is cross-entropy, and DistillSpec uses
several divergences (`forward`, `mixed`, `tvd`, `ce`). It is also on-policy (`own`: half of the windows are the draft's own).
AdaSPEC keeps several shares of places. Its reference is the draft that DistillSpec made of the same text with the same seed,
and `compare` compares the two, prompt by prompt, over several seeds. Stage `shift` trains a draft that reads no conversations,
and one that reads all, for `online.py`.

    python recipes/distill.py --data ../shared/data --stage corpus --stage write --stage base --stage control --stage distill \
        --stage adaspec --stage own --stage judge                            # GPU
    python recipes/distill.py --losses ce --stage distill --stage adaspec --stage judge --count 472 --seed 2 --out build/two
    python recipes/distill.py --stage compare --beside build/two                         # AdaSPEC, after the same of seed 1
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accepted import Counts, chain_of, counts_of, held_prompts, new_llm, walk
from bundled import full_recipe as bundled_recipe
from bundled_corpus import build_corpus
from bundled_stories import CUT, Sampler, SamplerConfig, join_layer, read_shape, write_stories
from bundled_train import Windows, continue_windows
from safetensors.torch import load_file

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.models.heads import PackedTexts
from outrider.models.load import load_model
from outrider.train.data import Corpus, Document, read_documents
from outrider.train.distill import DistillObjective, DistillSettings
from outrider.train.draft_lm import DraftLM
from outrider.train.loop import Settings, train
from outrider.train.objective import BatchOutcome, Objective

SHAPE = {"intermediate_size": 1024}
CHAT_IDS = (1, 2, 3)
WINDOW = 512
LOSSES = {"words": "text", "forward": "forward", "mixed": "mixed", "tvd": "tvd", "ce": "ce"}
REFERENCE = "ce"
"""What AdaSPEC learns by, and the draft that its reference is."""
ADASPEC = {f"adaspec-{kept}": kept for kept in (0.4, 0.6, 0.8)}
"""Name: the share of places kept."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result."""

    settings: Settings
    base_steps: int
    more_steps: int
    story_seconds: float
    rounds: int  # of windows that the target writes, one batch of the sampler each
    sampler: SamplerConfig
    held_out: int
    own_every: int  # steps between two times that the draft writes


def full_recipe() -> Recipe:
    """For one large GPU."""
    settings = Settings(
        batch_size=64,
        row_len=WINDOW,
        learning_rate=2e-3,
        warmup_steps=40,
        bf16=True,
        judge_every=1_000_000,
        save_every=1_000_000,
    )
    sampler = SamplerConfig(batch=8192, context=WINDOW + 1, coolest=0.0, hottest=1.0, opening=0, min_p=1e-6, seed=12)
    return Recipe(settings, 1200, 800, 14.0, rounds=3, sampler=sampler, held_out=192, own_every=100)


def smoke_recipe() -> Recipe:
    """The same path in a few minutes on a CPU."""
    full = full_recipe()
    settings = replace(full.settings, batch_size=2, bf16=False, warmup_steps=2)
    return Recipe(settings, 3, 2, 1.0, rounds=1, sampler=replace(full.sampler, batch=8), held_out=1, own_every=2)


@dataclass(frozen=True, eq=False)
class Bench:
    """Where things are, and what teaches."""

    recipe: Recipe
    text: Path
    out: Path
    seed: int
    target: Target
    begun: Path  # the draft that all begin with
    losses: Sequence[str]

    def corpus(self, name: str) -> Corpus:
        """The windows called so."""
        return Corpus.of(read_documents([self.text / f"{name}.npy"], None, max_len=10_000), held_out=self.recipe.held_out)

    def draft(self, name: str) -> DraftLM:
        """As an earlier stage left it."""
        return DraftLM.load(str(self.begun if name == "base" else self.out / name), self.target.device)

    def fresh(self) -> DraftLM:
        return DraftLM.fresh(bundled_path("target"), SHAPE, self.target.device, seed=self.seed)

    def run(self, objectives: Sequence[Objective], corpus: Corpus, *, steps: int, rate: float = 1e-3) -> None:
        """Train, and say what came out."""
        began, label = time.monotonic(), "-".join(objective.name for objective in objectives)
        notes = {"data": "stories, conversations and the bundled target's text (recipes/distill.py)", "seed": self.seed}
        settings = replace(self.recipe.settings, max_steps=steps, learning_rate=rate, seed=self.seed)
        runs = train(objectives, self.target, corpus, self.out / "runs" / label, settings=settings, notes=notes)
        seconds = time.monotonic() - began
        for one in runs:
            shutil.copytree(one.folder, self.out / one.objective.name, dirs_exist_ok=True)
            print(f"{one.objective.name}: {one.history[-1]} ({seconds:.0f} s for {len(runs)})", flush=True)
        shutil.rmtree(self.out / "runs" / label)  # every stage is a run of its own


def settings_of(**changes: Any) -> DistillSettings:
    on_gpu = torch.cuda.is_available()
    return DistillSettings(chunk=1 << 29 if on_gpu else 1 << 24, recompute=not on_gpu, compiled=on_gpu, **changes)


class Stories(Objective):
    """Another objective that learns only from windows without conversations."""

    def __init__(self, inner: DistillObjective) -> None:
        self.inner, self.name, self.module, self.taps = inner, inner.name, inner.module, inner.taps

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
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
        config = replace(recipe.sampler, batch=min(2048, recipe.sampler.batch), context=WINDOW, coolest=1.0, seed=5)
        self._sampler = Sampler(draft.state_dict(), read_shape(draft.origin), config, start=0)
        self._pool: list[Document] = []

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        random = np.random.default_rng([7, step])
        if step % self._recipe.own_every == 0:
            self._pool = self._written(random)
        half = len(documents) // 2
        return [*(self._pool[i] for i in random.integers(len(self._pool), size=half)), *documents[half:]]

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        return self.inner(batch)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.inner.save(folder, notes)

    def _written(self, random: np.random.Generator) -> list[Document]:
        """Prompts of all lengths up to half a window, continued by the draft as it is now."""
        count, device = self._sampler.config.batch, self._sampler.device
        refresh(self._sampler, self._draft)
        prompts = torch.from_numpy(self._windows[random.integers(len(self._windows), size=count)]).to(device)
        lengths = random.integers(4, WINDOW // 2, size=count)
        free = torch.arange(WINDOW, device=device) >= torch.from_numpy(lengths).to(device)[:, None]
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


def corpus_stage(data: Path, text: Path, recipe: Recipe, *, smoke: bool) -> None:
    """Stories and conversations as the target learned from, drawn anew, and windows of them."""
    known, work = bundled_recipe(), text / "corpus"
    work.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(bundled_path("target")) / "tokenizer.json", work / "tokenizer.json")
    (work / "texts.json").write_text("{}")  # no books, sums or code: the target hardly speaks them
    drawn = replace(known.stories.sampler, seed=21, batch=48 if smoke else known.stories.sampler.batch)
    config = replace(known.corpus, processes=2, held_out=3) if smoke else known.corpus
    write_stories(
        data / "models/stories15M", work / "stories", replace(known.stories, sampler=drawn, seconds=recipe.story_seconds)
    )
    build_corpus(data, work, config)
    tokens, starts = np.load(work / "train.npy"), np.load(work / "train_starts.npy")
    np.save(text / "truth.npy", windows_of(tokens, starts))


def windows_of(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[N, 512] windows that begin with a text and do not overlap; half leave out the opening mark, as prompts do."""
    begins, at = list[int](), 0
    while at < len(starts) and starts[at] + WINDOW < len(tokens):
        begins.append(int(starts[at]) + len(begins) % 2)
        at = int(np.searchsorted(starts, begins[-1] + WINDOW))
    return np.stack([tokens[begin : begin + WINDOW] for begin in begins]).astype(np.int16)


def write_stage(text: Path, recipe: Recipe) -> None:
    """The target continues beginnings of the corpus, more than a quarter of them greedily."""
    folder = Path(bundled_path("target"))
    sampler = Sampler(load_file(folder / "model.safetensors"), read_shape(folder), recipe.sampler, start=0)
    source = Windows.load(text / "corpus/train", sampler.device, 3)
    rounds = [continue_windows(sampler, source, 0.5, 0)[0] for _ in range(recipe.rounds)]
    np.save(text / "own.npy", torch.cat(rounds)[:, :WINDOW].numpy().astype(np.int16))


def base_stage(bench: Bench) -> None:
    """Cross-entropy on the corpus, from nothing."""
    objective = DistillObjective("base", bench.fresh(), bench.target, settings_of(loss="text"))
    bench.run([objective], bench.corpus("truth"), steps=bench.recipe.base_steps, rate=2e-3)


def control_stage(bench: Bench) -> None:
    """More of the same."""
    objective = DistillObjective("control", bench.draft("base"), bench.target, settings_of(loss="text"))
    bench.run([objective], bench.corpus("truth"), steps=bench.recipe.more_steps)


def distill_stage(bench: Bench) -> None:
    """As many steps on the target's text, by several losses on the same passes."""
    objectives = [
        DistillObjective(name, bench.draft("base"), bench.target, settings_of(loss=LOSSES[name])) for name in bench.losses
    ]
    bench.run(objectives, bench.corpus("own"), steps=bench.recipe.more_steps)


def adaspec_stage(bench: Bench) -> None:
    """AdaSPEC: drafts trained at places that are chosen with the distilled draft."""
    reference = bench.draft(REFERENCE).requires_grad_(False)
    objectives = [
        DistillObjective(
            name, bench.draft("base"), bench.target, settings_of(loss=LOSSES[REFERENCE], kept=kept), reference=reference
        )
        for name, kept in ADASPEC.items()
    ]
    bench.run(objectives, bench.corpus("own"), steps=bench.recipe.more_steps)


def own_stage(bench: Bench) -> None:
    """On-policy."""
    draft, corpus = bench.draft("base"), bench.corpus("own")
    inner = DistillObjective("own", draft, bench.target, settings_of(loss="mixed"))
    bench.run([OwnText(inner, draft, corpus, bench.recipe)], corpus, steps=bench.recipe.more_steps)


def shift_stage(bench: Bench) -> None:
    """A draft that reads stories alone, and one that reads everything."""
    stories, both = (
        DistillObjective(name, bench.fresh(), bench.target, settings_of(loss="mixed")) for name in ("stories", "both")
    )
    bench.run([Stories(stories), both], bench.corpus("own"), steps=bench.recipe.base_steps, rate=2e-3)


STAGES: dict[str, Callable[[Bench], None]] = {
    "base": base_stage,
    "control": control_stage,
    "distill": distill_stage,
    "adaspec": adaspec_stage,
    "own": own_stage,
    "shift": shift_stage,
}


def judge_stage(folders: dict[str, str], prompts: Sequence[Sequence[list[int]]], out: Path, *, lengths: Sequence[int]) -> None:
    """Tokens and accepted guesses per pass, and how much more than where it began and than the control. The engine itself
    serves with the last draft, and must count the same."""
    draft: DraftLM | None = None
    llm, asked = new_llm(batch=64), [prompt for part in prompts for prompt in part]
    texts = counts_of(llm, asked, llm.compose("plain")).texts
    for length in lengths:
        found = dict[str, Counts]()
        for name, folder in folders.items():
            draft = DraftLM.load(folder, llm.target.device)
            found[name] = walk(draft, asked, texts, length)
            row = row_of(name, found, half=len(prompts[0]), chain=length)
            print(json.dumps({key: value for key, value in row.items() if key != "by_prompt"}), flush=True)
            with (out / "judged.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    assert draft is not None
    check(llm, asked, texts, draft, num_draft_tokens=lengths[-1])


def check(llm: LLM, prompts: Sequence[list[int]], texts: list[list[int]], draft: DraftLM, *, num_draft_tokens: int) -> None:
    """The engine with a draft beside what walking says."""
    real = counts_of(llm, prompts, chain_of(llm, draft.served(llm.target.dtype), num_draft_tokens))
    walked = walk(draft, prompts, texts, num_draft_tokens)
    same = sum(mine == theirs for mine, theirs in zip(real.texts, texts, strict=True))
    print(f"engine {real.per_pass:.4f} tokens per pass, walking {walked.per_pass:.4f}; {same} of {len(texts)} texts equal")


def row_of(name: str, found: dict[str, Counts], *, half: int, chain: int) -> dict[str, Any]:
    """A line of the table: rates, by kind too, and gains with their standard errors, in tokens and in guesses."""
    counts = found[name]
    kinds = [counts.of(slice(half)).per_pass, counts.of(slice(half, None)).per_pass]
    row: dict[str, Any] = {"draft": name, "chain": chain, "by_kind": kinds}
    row |= {"tokens": counts.per_pass, "guesses": counts.guesses}
    row["by_prompt"] = [array.astype(int).tolist() for array in (counts.tokens, counts.accepted, counts.passes)]
    for other in ("base", "control", REFERENCE):
        if other in found and other != name:
            row[f"over_{other}"] = [counts.gain(found[other], guesses=guesses) for guesses in (False, True)]
    return row


def compare_stage(folders: Sequence[Path]) -> None:
    """AdaSPEC against DistillSpec from what `judge` wrote in every folder, one seed each. Two errors: over prompts (drawn
    again, the same for all seeds and drafts), and over seeds."""
    judged = [[json.loads(line) for line in (folder / "judged.jsonl").read_text().splitlines()] for folder in folders]
    for chain in sorted({row["chain"] for row in judged[0]}):
        found = [{row["draft"]: counts_in(row) for row in rows if row["chain"] == chain} for rows in judged]
        for name in ADASPEC:
            if all(name in drafts for drafts in found):
                gains = [drafts[name].gain(drafts[REFERENCE], guesses=False) for drafts in found]
                pooled = sum_of([drafts[name] for drafts in found]).gain(
                    sum_of([drafts[REFERENCE] for drafts in found]), guesses=False
                )
                shares = np.array([gain for gain, _ in gains])
                spread = float(shares.std(ddof=1) / len(shares) ** 0.5) if len(shares) > 1 else 0.0
                row = {"chain": chain, "draft": name, "seeds": [drafts[name].per_pass for drafts in found], "gains": gains}
                row |= {"pooled": pooled, "over_seeds": spread, "error": float(np.hypot(pooled[1], spread))}
                print(json.dumps(row), flush=True)


def counts_in(row: dict[str, Any]) -> Counts:
    """What `row_of` wrote."""
    tokens, accepted, passes = np.array(row["by_prompt"], dtype=np.float64)
    return Counts(tokens, accepted, passes, [])


def sum_of(parts: Sequence[Counts]) -> Counts:
    """The same prompts, several times."""
    tokens, accepted, passes = (sum(arrays) for arrays in zip(*((p.tokens, p.accepted, p.passes) for p in parts), strict=True))
    return Counts(np.asarray(tokens), np.asarray(accepted), np.asarray(passes), [])


CHANGEABLE = {
    "base_steps": "of pre-training, and of stage shift",
    "more_steps": "from there, in every way",
    "story_seconds": "of sampling stories",
    "rounds": "of 8192 windows that the target writes",
}


def main() -> None:
    """Run the named stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=("corpus", "write", *STAGES, "judge", "compare"), required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with models/stories15M")
    parser.add_argument("--text", type=Path, default=Path("build/distill"), help="where corpus and write put their windows")
    parser.add_argument("--out", type=Path, default=Path("build/distill"))
    parser.add_argument("--seed", type=int, default=1, help="of beginnings and of the order of the text")
    parser.add_argument("--begun", type=Path, help="the draft that all begin with, if not OUT/base")
    parser.add_argument("--losses", default=",".join(LOSSES), help="of stage distill")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="folders with other seeds, for compare")
    parser.add_argument("--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy, held_chat.npy")
    parser.add_argument("--count", type=int, default=128, help="prompts of each kind")
    parser.add_argument("-K", type=int, action="append", help="guesses per round (4 and 8)")
    parser.add_argument("--smoke", action="store_true", help="toy scale, to try the code on a CPU")
    for name, meaning in CHANGEABLE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float if "seconds" in name else int, help=meaning)
    arguments = parser.parse_args()
    recipe, out = smoke_recipe() if arguments.smoke else full_recipe(), arguments.out
    recipe = replace(recipe, **{name: vars(arguments)[name] for name in CHANGEABLE if vars(arguments)[name] is not None})
    out.mkdir(parents=True, exist_ok=True)
    bench: Bench | None = None
    for stage in arguments.stage:
        began = time.monotonic()
        if stage == "corpus":
            corpus_stage(arguments.data, arguments.text, recipe, smoke=arguments.smoke)
        elif stage == "write":
            write_stage(arguments.text, recipe)
        elif stage == "judge":
            judge_stage(folders_in(out, arguments.begun), prompts_of(arguments), out, lengths=arguments.K or (4, 8))
        elif stage == "compare":
            compare_stage([out, *arguments.beside])
        else:
            bench = bench or new_bench(recipe, arguments)
            STAGES[stage](bench)
        print(f"{stage}: done in {time.monotonic() - began:.0f} s", flush=True)


def new_bench(recipe: Recipe, arguments: argparse.Namespace) -> Bench:
    on_gpu, out = torch.cuda.is_available(), arguments.out
    target = load_model(bundled_path("target"), device="cuda" if on_gpu else "cpu", fast=not on_gpu)
    losses = arguments.losses.split(",")
    return Bench(recipe, arguments.text, out, arguments.seed, target, begun=arguments.begun or out / "base", losses=losses)


def folders_in(out: Path, begun: Path | None) -> dict[str, str]:
    """Every draft that is there, by name."""
    names = ("control", *LOSSES, "own", *ADASPEC, "stories", "both")
    found = {"base": begun or out / "base", **{name: out / name for name in names}}
    return {**{name: str(folder) for name, folder in found.items() if folder.is_dir()}, "bundled": bundled_path("draft")}


def prompts_of(arguments: argparse.Namespace) -> list[list[list[int]]]:
    return [held_prompts(arguments.prompts, kind, arguments.count) for kind in ("story", "chat")]


if __name__ == "__main__":
    main()
