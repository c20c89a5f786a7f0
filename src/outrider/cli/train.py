"""``outrider train``: heads and draft models for a target, and training text in the target's own words."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.offline import Regenerated, add_ray, run_job, settings_of
from outrider.cli.options import value_of
from outrider.cli.progress import waiting
from outrider.codecs.load import load_codec
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.heads import HEAD_KINDS, KINDS, new_head
from outrider.models.heads.ends import read_target
from outrider.models.heads.folder import SHAPES, new_config, signature_of
from outrider.models.judge_head import basis_of
from outrider.models.load import load_model
from outrider.models.source import local_path
from outrider.train.data import Corpus, read_documents
from outrider.train.devices import current_team, team_of_torchrun
from outrider.train.judge import JudgeSettings, examples_of, last_number, read_questions, train_judge
from outrider.train.kinds import OTHER_KINDS, Asked
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings, Objective
from outrider.train.provenance import training_notes
from outrider.train.regenerate import prompts_of, regenerate
from outrider.train.vocabulary import commonest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", description=__doc__)
    valid = ", ".join([*HEAD_KINDS, *OTHER_KINDS])
    parser.add_argument("method", help=f"one of {valid}, several heads with commas between them, `judge`, or `regenerate`")
    parser.add_argument("--target", metavar="MODEL", help="folder, hub name or .gguf file (default: the bundled model)")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".npy, .jsonl or text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints; a run found there goes on")
    parser.add_argument("--draft", metavar="MODEL", help="the draft model to begin with; acceptance-head: whose guesses")
    parser.add_argument("--reference", metavar="MODEL", help="adaspec: the distilled model whose losses choose the tokens")
    parser.add_argument(
        "--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="any setting; see docs/train.md"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--max-len", type=int, default=512, help="tokens per document; longer ones are cut")
    parser.add_argument("--held-out", type=int, default=32, help="documents to judge by")
    group = parser.add_argument_group("regenerate")
    group.add_argument("--max-tokens", type=int, default=256, help="tokens of a text")
    group.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    group.add_argument("--prompt-len", type=int, default=16, help="tokens of a text that are its prompt")
    group.add_argument(
        "--method-of-writing", default=None, metavar="METHOD", help="speculation while writing (default: the usual)"
    )
    add_ray(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.method == "regenerate":
        return _regenerate(arguments)
    if arguments.method == "judge":
        return _judge(arguments)
    with team_of_torchrun(arguments.device) as arguments.device:
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    kinds = [kind.strip() for kind in arguments.method.split(",")]
    valid = [*HEAD_KINDS, *OTHER_KINDS]
    for kind in kinds:
        if kind not in valid:
            raise OptionError(f"nothing is known about training {kind!r}; {nearest(kind, [*valid, 'judge', 'regenerate'])}")
    if len(kinds) > 1 and not set(kinds) <= set(HEAD_KINDS):
        raise OptionError("only heads can be trained together; train other things alone")
    given = _options(arguments.option)
    _check_options(given, kinds)
    name = arguments.target or bundled_path("target")
    with waiting(f"loading {name}"):
        target = load_model(name, device=arguments.device, fast=not _on_gpu(arguments.device))
    codec = load_codec(name)
    max_len = min(arguments.max_len, target.max_len)
    documents = read_documents(arguments.data, codec, max_len=max_len)
    corpus = Corpus.of(documents, held_out=arguments.held_out)
    settings = _filled(Settings, given, {"row_len": max_len, "bf16": target.device.type == "cuda"})
    objectives = [_objective(kind, name, target, corpus, arguments, given=given) for kind in kinds]
    notes = training_notes(name, target, arguments.data, documents=len(documents), options=given)
    runs = train(objectives, target, corpus, arguments.out, settings=settings, notes=notes, progress=sys.stderr.isatty())
    for one in runs if current_team().is_first else ():
        by_depth = " ".join(f"{share:.2f}" for share in one.history[-1]["by_depth"])
        print(f"{one.folder}: {one.best:.2f} tokens per pass (chain, held out), acceptance by position {by_depth}")
    return 0


def _on_gpu(device: str | None) -> bool:
    return torch.cuda.is_available() if device in (None, "auto") else str(device).startswith("cuda")


def _options(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"--option {pair!r} is not valid; write NAME=VALUE")
        found[name.replace("-", "_")] = value_of(value)
    if "taps" in found:
        found["taps"] = [int(tap) for tap in str(found["taps"]).split(",")]
    return found


def _filled(kind: Any, given: dict[str, Any], defaults: dict[str, Any]) -> Any:
    names = {item.name for item in fields(kind)}
    return kind(**{name: value for name, value in {**defaults, **given}.items() if name in names})


def _check_options(given: dict[str, Any], kinds: list[str]) -> None:
    heads = {item.name for item in fields(HeadSettings)} | set(SHAPES)
    own = OTHER_KINDS[kinds[0]].options if kinds[0] in OTHER_KINDS else heads
    valid = {item.name for item in fields(Settings)} | own
    bad = next((name for name in given if name not in valid), None)
    if bad is not None:
        raise OptionError(f"training {', '.join(kinds)} has no setting {bad!r}; {nearest(bad, valid)}")


def _objective(
    kind: str, name: str, target: Target, corpus: Corpus, arguments: argparse.Namespace, *, given: dict[str, Any]
) -> Objective:
    if kind in OTHER_KINDS:
        return OTHER_KINDS[kind].build(Asked(kind, name, target, arguments.draft, arguments.reference, given))
    defaults = {**KINDS[kind].training, **given}
    raw, ends = read_target(name)
    changes = {key: defaults[key] for key in SHAPES if key in defaults}
    config = new_config(kind, raw, **changes)
    config = replace(config, signature=signature_of(target, config.hidden_size))
    settings = _filled(HeadSettings, defaults, {})
    whole = config.draft_vocab_size >= config.vocab_size
    ids = None if whole else commonest(corpus.train, config.draft_vocab_size, config.vocab_size).ids
    return HeadObjective(new_head(config, ends, ids=ids).to(target.device), target, settings)


def _judge(arguments: argparse.Namespace) -> int:
    """Label the draft's guesses by what becomes of the answers, and train a head on them."""
    given = _options(arguments.option)
    bad = next((name for name in given if name not in {item.name for item in fields(JudgeSettings)}), None)
    if bad is not None:
        raise OptionError(
            f"training judge has no setting {bad!r}; {nearest(bad, [item.name for item in fields(JudgeSettings)])}"
        )
    settings = _filled(JudgeSettings, given, {})
    llm = LLM(arguments.target, method="draft-model", draft=arguments.draft or bundled_path("draft"), device=arguments.device)
    _, ends = read_target(llm.model_name)
    questions = read_questions(arguments.data, llm.codec)
    with waiting(f"trying guesses in the answers to {len(questions)} questions"):
        examples = examples_of(llm, llm.drafts[0], questions, answer=last_number, settings=settings)
    head, verdict = train_judge(examples, basis_of(ends.readout * ends.norm), settings=settings)
    notes = training_notes(llm.model_name, llm.target, arguments.data, documents=len(questions), options=given)
    head.save(arguments.out, {**notes, "draft": llm.draft_names[0], "held_out": asdict(verdict), "lossy": True})
    print(f"{arguments.out}: {len(examples)} guesses, {verdict.num_examples} of them held out (LOSSY: changes the text)")
    print(f"  harmless {verdict.share_harmless:.1%}; kept of harmless {verdict.kept_of_harmless:.1%}, ", end="")
    print(f"of harmful {verdict.kept_of_harmful:.1%}; AUC {verdict.auc:.3f}; distance {verdict.distance:.3f} a step")
    return 0


def _regenerate(arguments: argparse.Namespace) -> int:
    method = arguments.method_of_writing
    llm = LLM(arguments.target, method=method, device=arguments.device, max_batch_size=32)
    local_path(llm.model_name)
    documents = read_documents(arguments.data, llm.codec, max_len=llm.target.max_len, min_len=2)
    room = llm.target.max_len - arguments.max_tokens - 1
    prompts = [prompt[:room] for prompt in prompts_of(documents, prompt_len=arguments.prompt_len)]
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=0)
    out = arguments.out if arguments.out.suffix == ".jsonl" else arguments.out / "regenerated.jsonl"
    if arguments.ray:
        return _regenerate_on_ray(arguments, prompts, out, params)
    with tqdm(total=len(prompts), disable=not sys.stderr.isatty(), unit="text") as bar:
        for count in regenerate(llm, prompts, out, params=params):
            bar.update(count - bar.n)
    print(f"{out}: {len(prompts)} texts")
    return 0


def _regenerate_on_ray(arguments: argparse.Namespace, prompts: list[tuple[int, ...]], out: Path, params: SamplingParams) -> int:
    opening = partial(Regenerated, arguments.target, arguments.method_of_writing, arguments.device, params)
    settings = settings_of(arguments, ("target", "method_of_writing", "max_tokens", "temperature"))
    count = run_job(arguments, [list(prompt) for prompt in prompts], opening, out, settings)
    print(f"{out}: {count} texts")
    return 0
