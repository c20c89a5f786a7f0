"""Random models and random samplers: is what speculation writes what plain decoding and transformers write?

    python benchmarks/random_exactness.py --configurations 200 --samplers 1000 --workers 16       the full size
    python benchmarks/random_exactness.py --configurations 0:1 --samplers 20 --seconds 300        a look

Models: random configurations of every architecture that transformers builds as a causal language model (``random_models.py``),
opened as a user would open them. Each writes what ``generate`` writes, in a ragged batch, with lookup, with recycled trees and
with deep trees, or is refused with the reason. Samplers: random parameter sets on the bundled models; every method writes plain
decoding's text. A configuration that transformers cannot run is drawn again. ``--shard 2/8`` runs every eighth case, ``--out``
writes a results file, ``--join`` makes one of several. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from random_models import DRAWS, KINDS, BuildError, small_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from outrider import LLM, OutriderError, SamplingParams, compose
from outrider.bench.provenance import results_head
from outrider.core.interfaces import Target
from outrider.core.request import Request
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.models.load import load_model

NUM_TOKENS, PATIENCE = 9, 120
PROMPTS = [[5, 9, 33, 4, 17, 8, 44, 21, 3, 11, 2, 40, 6], [7, 7, 12], [50, 4, 29, 30, 31, 50, 4, 29, 30]]
STORIES = ["Once upon a time", "One day, a girl", "The dog said: the dog said:"]
MODEL_METHODS = ("plain", "prompt-lookup", "token-recycling", "draft-tree")
SAMPLER_METHODS = ("draft-model", "draft-tree", "best-first", "rsd-s", "spectr", "prompt-lookup", "token-recycling", "suffix")
_runs: set[str] = set()
"""Architectures of which some draw could be run."""
_failed: dict[str, list[str]] = defaultdict(list)
"""Why no draw of a seed could be run, seed after seed."""
_GIVE_UP = 2
"""Such seeds before an architecture is given up that never ran."""
OUTCOMES = ("equal", "refused", "cannot be built", "unfinished", "DIFFERENT", "FAILED")


class TooSlow(BaseException):
    """A case took longer than it may."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what takes longer, in CPU seconds: the machine may be shared."""

    def end(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def generated(model: Any) -> list[list[int]]:
    """What transformers writes, prompt by prompt."""
    texts: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
    return texts


def written(target: Target, method: str) -> list[list[int]]:
    """What we write, all prompts in one ragged batch; shorter where the context ends."""
    options = {} if method == "plain" else {"num_draft_tokens": 5}
    draft = target if method == "draft-tree" else None  # a draft that is always right: paths are deep
    engine = Engine(target, compose(method, target, draft=draft, options=options))
    requests = [Request(prompt, SamplingParams(max_tokens=NUM_TOKENS)) for prompt in PROMPTS]
    done = {step.request: step.state.output_ids for step in run(engine, requests, max_batch_size=len(PROMPTS))}
    return [list(done[index]) for index in range(len(PROMPTS))]


@torch.no_grad()
def parts(model: Any, expected: list[list[int]], found: list[list[int]], max_len: int) -> bool:
    """Whether texts differ, but for a place where the two best logits are equal up to rounding, and the end of the context."""
    for prompt, mine, other in zip(PROMPTS, expected, found, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if place is None and len(other) < min(NUM_TOKENS, max_len - len(prompt)):
            return True
        if place is not None:
            logits = model(torch.tensor([[*prompt, *mine[:place]]])).logits[0, -1]
            best = logits.topk(2).values
            if float(best[0] - best[1]) > 1e-4 * float(logits.std()):
                return True
    return False


def saved_model(kind: str, seed: int, folder: str) -> Any:
    """A random model in a folder, as transformers opens it: some are not saved as they were. Drawn until it can be run."""
    if kind not in _runs and len(_failed[kind]) >= _GIVE_UP:
        raise BuildError(_failed[kind][-1])
    reason = ""
    for draw in range(DRAWS):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            small_model(kind, seed, draw).save_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
            model.save_pretrained(folder)  # some are not opened as they were saved: a row for padding becomes zero
            model.generate(torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=2)
        except Exception as error:  # transformers raises many kinds
            reason = " ".join(str(error).split())[:120]
        else:
            _runs.add(kind)
            return model
    _failed[kind].append(reason)
    raise BuildError(reason)


def try_model(kind: str, seed: int) -> str:
    """One of ``OUTCOMES``, with the reason where there is one."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = saved_model(kind, seed, folder)
        except BuildError as error:
            return f"cannot be built: {error}"
        try:
            target = load_model(folder, dtype="float32", device="cpu")
        except OutriderError as error:
            return f"refused: {str(error).replace(folder, kind)}"
    expected = generated(model)
    for method in MODEL_METHODS:
        if parts(model, expected, written(target, method), target.max_len):
            return f"DIFFERENT: {method} on {type(target).__name__}"
    return f"equal: {type(target).__name__}"


def outcome_of(kind: str, seed: int) -> str:
    """``try_model``, whatever happens."""
    try:
        with limited(PATIENCE):
            return try_model(kind, seed)
    except TooSlow:
        return f"unfinished: {PATIENCE} CPU seconds"
    except Exception as error:  # neither equal nor refused: a defect of ours
        return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def random_params(chance: random.Random) -> SamplingParams:
    """Any sampling parameters."""

    def perhaps(value: Any, other: Any) -> Any:
        return value if chance.random() < 0.4 else other

    return SamplingParams(
        max_tokens=chance.randrange(4, 20),
        temperature=chance.choice((0.0, 0.3, 0.7, 1.0, 1.5)),
        top_k=perhaps(chance.randrange(1, 60), 0),
        top_p=perhaps(chance.uniform(0.05, 1.0), 1.0),
        min_p=perhaps(chance.uniform(0.0, 0.3), 0.0),
        typical_p=perhaps(chance.uniform(0.2, 1.0), 1.0),
        repetition_penalty=perhaps(chance.uniform(0.7, 1.6), 1.0),
        presence_penalty=perhaps(chance.uniform(-1, 2), 0.0),
        frequency_penalty=perhaps(chance.uniform(-1, 2), 0.0),
        logit_bias=perhaps({chance.randrange(4096): chance.choice((3.0, -5.0, -float("inf"))) for _ in range(4)}, {}),
        banned_token_ids=perhaps([chance.randrange(4096) for _ in range(3)], ()),
        min_tokens=perhaps(chance.randrange(6), 0),
        seed=chance.randrange(1 << 32),
    )


def try_sampler(llm: LLM, number: int) -> list[str]:
    """Methods that wrote another text than plain decoding for a random parameter set; its prompts share their passes."""
    chance = random.Random(f"sampler {number}")
    params = [random_params(chance) for _ in STORIES]
    expected = [output.token_ids for output in llm.generate(STORIES, params, method="plain")]
    return [
        name
        for name in SAMPLER_METHODS
        if [output.token_ids for output in llm.generate(STORIES, params, method=name)] != expected
    ]


def cases(seeds: range, num_samplers: int, shard: tuple[int, int], done: dict[str, int] | None = None) -> list[tuple[str, int]]:
    """(architecture, seed) and ("", sampler), in a random order that is always the same: a run that ends early is even. Of an
    architecture of which some are ``done``, the first so many seeds are left out."""
    models = [(kind, seed) for kind in KINDS for seed in seeds[(done or {}).get(kind, 0) :]]
    every = models + [("", number) for number in range(num_samplers)]
    random.Random(0).shuffle(every)
    return every[shard[0] :: shard[1]]


def run_shard(todo: list[tuple[str, int]], seconds: float) -> dict[str, Any]:
    """Outcomes by architecture, and what the samplers did, within the time."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    llm = LLM(dtype="float32", device="cpu") if any(not kind for kind, _ in todo) else None
    models: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, str] = {}
    samplers, different = 0, Counter[str]()
    for kind, number in todo:
        if time.monotonic() > end:
            break
        if llm is not None and not kind:
            samplers += 1
            different.update(try_sampler(llm, number))
            continue
        outcome = outcome_of(kind, number)
        name, _, reason = outcome.partition(": ")
        models[kind][name] += 1
        reasons[f"{kind} {name}" if name not in ("DIFFERENT", "FAILED") else f"{kind} {number} {name}"] = reason
        print(f"{kind:<28}{number:<5}{outcome}", file=sys.stderr, flush=True)
    return {"models": models, "reasons": reasons, "samplers": samplers, "different": different, "asked": len(todo)}


def merged(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The shards as one run."""
    models: dict[str, Counter[str]] = defaultdict(Counter)
    total: dict[str, Any] = {"asked": 0, "samplers": 0, "different": Counter[str](), "reasons": {}}
    for shard in shards:
        for kind, counts in shard["models"].items():
            models[kind].update(counts)
        total["different"].update(shard["different"])
        total["reasons"].update(shard["reasons"])
        total["asked"] += shard["asked"]
        total["samplers"] += shard["samplers"]
    return {**total, "models": models}


def counted(result: dict[str, Any]) -> Counter[str]:
    """Outcomes of all architectures."""
    return sum((Counter(each) for each in result["models"].values()), Counter[str]())


def spread(arguments: list[str], workers: int) -> dict[str, Any]:
    """One process for each shard; a process that died counts as a failure."""
    words = [sys.executable, __file__, *arguments]
    started = [
        subprocess.Popen([*words, "--shard", f"{i}/{workers}"], stdout=subprocess.PIPE, text=True) for i in range(workers)
    ]
    found: list[dict[str, Any]] = []
    for i, process in enumerate(started):
        lines = (process.communicate()[0] or "").splitlines()
        died = {"models": {f"shard {i}": {"FAILED": 1}}, "reasons": {}, "samplers": 0, "different": {}, "asked": 0}
        found.append(json.loads(lines[-1]) if lines and lines[-1].startswith("{") else died)
    return merged(found)


def write(path: Path, result: dict[str, Any], head: dict[str, Any]) -> None:
    """A results file: one row for the totals, one for the samplers, one for each architecture."""
    rows: list[dict[str, Any]] = [{"architectures": len(result["models"]), **counted(result)}]
    rows.append({"sampler sets": result["samplers"], "methods": list(SAMPLER_METHODS), "different": result["different"]})
    why = result["reasons"]
    for kind, outcomes in sorted(result["models"].items()):
        told = {name: why[f"{kind} {name}"] for name in outcomes if why.get(f"{kind} {name}")}
        told |= {
            key.removeprefix(f"{kind} "): text for key, text in why.items() if key.startswith(f"{kind} ") and key[-1].isupper()
        }
        rows.append({"architecture": kind, **outcomes, "why": told})
    path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def read(document: dict[str, Any]) -> dict[str, Any]:
    """What ``write`` wrote, as the result of a run."""
    _, samplers, *kinds = document["rows"]
    models = {row["architecture"]: {name: row[name] for name in OUTCOMES if name in row} for row in kinds}
    reasons = {f"{row['architecture']} {name}": text for row in kinds for name, text in row["why"].items()}
    counts = {"samplers": samplers["sampler sets"], "different": samplers["different"], "asked": 0}
    return {**counts, "models": models, "reasons": reasons}


def join(paths: list[Path], out: Path) -> dict[str, Any]:
    """Results files of runs over different cases as one file."""
    documents = [json.loads(path.read_text()) for path in paths]
    result = merged([read(document) for document in documents])
    head = {name: documents[0][name] for name in ("command", "machine", "date", "commit", "what")}
    commands = [re.sub(r"(--out )\S*/", r"\1", document["command"]) for document in documents]
    write(out, result, head | {"command": "; ".join(commands)})
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", default="200", help="of each architecture: how many, or FIRST:LAST")
    parser.add_argument("--samplers", type=int, default=1000, help="random parameter sets")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after about so long")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="run every N-th case, from the I-th on")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a shard")
    parser.add_argument("--beyond", type=Path, help="results file: leave out as many of each architecture as it has")
    parser.add_argument("--join", type=Path, nargs="+", help="run nothing: join these results files of different cases")
    parser.add_argument("--out", type=Path, help="results file")
    arguments = parser.parse_args()
    first, colon, last = arguments.configurations.partition(":")
    begin, end = (int(first), int(last)) if colon else (0, int(first))
    index, _, count = arguments.shard.partition("/")
    if arguments.join:
        result = join(arguments.join, arguments.out)
    elif arguments.workers > 1:
        passed = [f"--configurations={begin}:{end}", f"--samplers={arguments.samplers}", f"--seconds={arguments.seconds}"]
        passed += [f"--beyond={arguments.beyond}"] if arguments.beyond else []
        result = spread(passed, arguments.workers)
    else:
        known = read(json.loads(arguments.beyond.read_text()))["models"] if arguments.beyond else {}
        done, shard = {kind: sum(counts.values()) for kind, counts in known.items()}, (int(index), int(count))
        result = run_shard(cases(range(begin, end), arguments.samplers, shard, done), arguments.seconds)
    counts = counted(result)
    if arguments.out and not arguments.join:
        what = "random small models against transformers' generate, and random samplers against plain decoding"
        write(arguments.out, result, results_head(what, script="benchmarks/random_exactness.py"))
    print(json.dumps(result if arguments.workers == 1 else {**counts, "samplers": result["samplers"], **result["different"]}))
    return 1 if counts["DIFFERENT"] or counts["FAILED"] or sum(result["different"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
