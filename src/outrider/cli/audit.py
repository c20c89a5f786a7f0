"""Runs ``outrider audit``: one method, or all of them, with a line for each finding."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

from outrider.api import LLM
from outrider.bench.audit.audit import audit
from outrider.bench.audit.catalogue import audit_all
from outrider.bench.audit.config import AuditConfig
from outrider.bench.runner import RunConfig
from outrider.bench.session import Bench, encode_suites
from outrider.bench.settings import Provider, Setting, runnable
from outrider.bench.suites import load_suites
from outrider.cli.bench import load_pair, names_of
from outrider.cli.options import value_of
from outrider.cli.progress import waiting
from outrider.core.errors import CompositionError, OptionError
from outrider.methods import METHODS

EVERYTHING = "all"


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.alpha < 1 or arguments.temperature <= 0:
        raise OptionError("--alpha or --temperature is not valid; use 0 to 1 for alpha and more than 0 for the temperature")
    config = AuditConfig(
        num_prompts=arguments.prompts,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        num_tokens=arguments.tokens,
        alpha=arguments.alpha,
    )
    if arguments.method != EVERYTHING:
        METHODS[arguments.method]  # an unknown name is refused with the nearest one, before anything is loaded
    llm, _ = load_pair(arguments)
    bench = Bench(suites=load_suites(names_of(arguments.suites)), run=RunConfig(max_tokens=arguments.max_tokens))
    suites = list(encode_suites(llm, bench).values())
    prompts = [many[i] for i in range(max(map(len, suites))) for many in suites if i < len(many)]
    with tempfile.TemporaryDirectory() as folder:
        provide = Provider(llm, prompts, Path(folder))
        if arguments.method == EVERYTHING:
            return _run_all(llm, prompts, arguments, provide=provide, config=config)
        return _run_one(llm, prompts, arguments, provide=provide, config=config)


def _run_one(llm: LLM, prompts: list[list[int]], arguments: Namespace, *, provide: Provider, config: AuditConfig) -> int:
    options = {pair.partition("=")[0].replace("-", "_"): value_of(pair.partition("=")[2]) for pair in arguments.option}
    settings, skipped = runnable(llm, [Setting(arguments.method, arguments.acceptance, arguments.policy, options)], provide)
    if skipped:
        raise CompositionError(skipped[0].reason)
    with waiting(f"auditing {arguments.method}"):
        found = audit(llm, settings[0], prompts, config=config)
    print(json.dumps(found.to_json()) if arguments.json else found.text())
    return 1 if found.violated or not found.declared_lossless else 0


def _run_all(llm: LLM, prompts: list[list[int]], arguments: Namespace, *, provide: Provider, config: AuditConfig) -> int:
    if arguments.acceptance or arguments.option:
        raise OptionError("'all' audits every row with its own rule and options; leave out --acceptance and --option")
    say = partial(print, file=sys.stderr, flush=True)
    found = audit_all(llm, prompts, provide=provide, config=config, policy=arguments.policy, say=say)
    print(json.dumps(found.to_json()) if arguments.json else found.text())
    return 1 if found.wrong else 0
