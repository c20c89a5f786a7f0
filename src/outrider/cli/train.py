"""Runs ``outrider train``: heads, draft models, and tasks beside them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.cli.train_options import check_names, filled, read_options
from outrider.cli.train_router import run_router
from outrider.cli.train_tasks import run_judge, run_regenerate
from outrider.codecs.load import load_codec
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Target
from outrider.models.heads import HEAD_KINDS, KINDS, new_head
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import SHAPES, new_config, signature_of
from outrider.models.load import load_model
from outrider.models.source import Source, local_path
from outrider.opening import open_target
from outrider.train.data import Corpus, read_documents
from outrider.train.devices import current_team, team_of_torchrun
from outrider.train.kinds import OTHER_KINDS, TrainingRequest
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings, Objective
from outrider.train.provenance import training_notes
from outrider.train.vocabulary import commonest
from outrider.vision.embedding_and_output import read_vision_target
from outrider.vision.load import can_see

TASKS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "judge": run_judge,
    "regenerate": run_regenerate,
    "router": run_router,
}
"""Tasks without the training loop, by name."""


def run(arguments: argparse.Namespace) -> int:
    if arguments.method in TASKS:
        return TASKS[arguments.method](arguments)
    with team_of_torchrun(arguments.device) as arguments.device:
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    kinds = [kind.strip() for kind in arguments.method.split(",")]
    valid = [*HEAD_KINDS, *OTHER_KINDS]
    for kind in kinds:
        if kind not in valid:
            raise OptionError(f"there is no training of {kind!r}; {nearest(kind, [*valid, *TASKS])}")
    if len(kinds) > 1 and not set(kinds) <= set(HEAD_KINDS):
        raise OptionError("only heads can be trained together; train other things alone")
    given = read_options(arguments.option)
    _check_options(given, kinds)
    name = arguments.target or bundled_path("target")
    with waiting(f"loading {name}"):
        codec, load = load_codec(name), partial(load_model, device=arguments.device)
        target, vision = open_target(load, Source(name), codec, 1, fast=not _on_gpu(arguments.device))
    max_len = min(arguments.max_len, target.max_len)
    documents = read_documents(arguments.data, codec, max_len=max_len, vision=vision)
    corpus = Corpus.of(documents, held_out=arguments.held_out)
    settings = filled(Settings, given, {"row_len": max_len, "bf16": target.device.type == "cuda"})
    objectives = [_objective(kind, name, target, corpus, arguments, given=given) for kind in kinds]
    notes = training_notes(name, target, arguments.data, documents=len(documents), options=given)
    runs = train(objectives, target, corpus, arguments.out, settings=settings, notes=notes, progress=sys.stderr.isatty())
    for one in runs if current_team().is_first else ():
        by_depth = " ".join(f"{share:.2f}" for share in one.history[-1]["by_depth"])
        print(f"{one.folder}: {one.objective.verdict(one.best)} {by_depth}")
    return 0


def _on_gpu(device: str | None) -> bool:
    return torch.cuda.is_available() if device in (None, "auto") else str(device).startswith("cuda")


def _check_options(given: dict[str, Any], kinds: list[str]) -> None:
    heads = {item.name for item in fields(HeadSettings)} | set(SHAPES)
    own = OTHER_KINDS[kinds[0]].options if kinds[0] in OTHER_KINDS else heads
    valid = {item.name for item in fields(Settings)} | own
    check_names(given, valid, what=", ".join(kinds))


def _objective(
    kind: str, name: str, target: Target, corpus: Corpus, arguments: argparse.Namespace, *, given: dict[str, Any]
) -> Objective:
    if kind in OTHER_KINDS:
        return OTHER_KINDS[kind].build(TrainingRequest(kind, name, target, arguments.draft, arguments.reference, given))
    defaults = {**KINDS[kind].training, **given}
    path = local_path(name)
    raw, ends = read_vision_target(path) if can_see(path) else read_target(name)
    changes = {key: defaults[key] for key in SHAPES if key in defaults}
    config = new_config(kind, raw, **changes)
    config = replace(config, signature=signature_of(target, config.hidden_size))
    settings = filled(HeadSettings, defaults, {})
    whole = config.draft_vocab_size >= config.vocab_size
    ids = None if whole else commonest(corpus.train, config.draft_vocab_size, config.vocab_size).ids
    return HeadObjective(new_head(config, ends, ids=ids).to(target.device), target, settings)
