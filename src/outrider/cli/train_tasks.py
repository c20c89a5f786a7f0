"""The tasks of ``outrider train`` that do not run the training loop: a judge's head, and texts in the target's own words."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.offline import Regenerated, run_job, settings_of
from outrider.cli.progress import waiting
from outrider.cli.train_options import check_names, filled, read_options
from outrider.core.method_rows import option_names
from outrider.core.params import SamplingParams
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.judge_head import basis_of
from outrider.models.source import local_path
from outrider.train.data import read_documents
from outrider.train.judge import JudgeSettings, examples_of, last_number, read_questions, train_judge
from outrider.train.provenance import training_notes
from outrider.train.regenerate import prompts_of, regenerate


def run_judge(arguments: argparse.Namespace) -> int:
    """``outrider train judge``: label the draft's guesses by whether the answers change, and train a head on them."""
    given = read_options(arguments.option)
    check_names(given, option_names(JudgeSettings), what="judge")
    settings = filled(JudgeSettings, given, {})
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


def run_regenerate(arguments: argparse.Namespace) -> int:
    """``outrider train regenerate``: let the target write training texts."""
    method = arguments.method_of_writing
    llm = LLM(arguments.target, method=method, device=arguments.device)
    llm.max_batch_size = 32 if llm.target.device.type == "cpu" else None
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
