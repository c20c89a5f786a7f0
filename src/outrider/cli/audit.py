"""``outrider audit MODEL METHOD``: is this method lossless on this model, here?

    outrider audit bundled draft-model
    outrider audit DIR draft-tree --draft DIR --acceptance traversal --dtype float32
    outrider audit bundled all            every method, then every acceptance rule

The exit code is 0 if no violation was found. It is 1 if one was found, or if the rule is lossy by design; the report says by
how much. With ``all`` it is 0 if every lossless setting passes and every lossy rule is flagged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

from outrider.api import LLM
from outrider.bench.audit.audit import AuditConfig, audit
from outrider.bench.audit.catalogue import audit_all
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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("audit", description=__doc__)
    parser.add_argument("model", help="folder, hub name or .gguf file; 'bundled' for the bundled pair")
    parser.add_argument("method", help="see `outrider methods`; 'all' for all of them")
    parser.add_argument("--draft", action="append", metavar="NAME", help="draft model, repeatable")
    parser.add_argument("--acceptance", metavar="RULE", help="acceptance rule (default: the method's own)")
    parser.add_argument(
        "--policy", metavar="NAME", default="fixed", help="(default: fixed, which never stops guessing: all of it is tested)"
    )
    parser.add_argument("--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--threads", type=int, help="CPU threads")
    group = parser.add_argument_group("how much")
    defaults = AuditConfig()
    group.add_argument("--suites", default="stories,extraction", help="where prompts come from (default: %(default)s)")
    group.add_argument("--prompts", type=int, default=defaults.num_prompts, help="prompts of the identity tests")
    group.add_argument("--max-tokens", "-n", type=int, default=defaults.max_tokens, help="tokens of a text")
    group.add_argument("--tokens", type=int, default=defaults.num_tokens, help="tokens of the test of the emitted law")
    group.add_argument("--temperature", "-t", type=float, default=defaults.temperature, help="of sampled texts")
    group.add_argument("--top-p", type=float, default=defaults.top_p, help="of sampled texts")
    group.add_argument("--alpha", type=float, default=defaults.alpha, help="error rate of each sequential test")
    group.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.alpha < 1 or arguments.temperature <= 0:
        raise OptionError("--alpha must be between 0 and 1, and --temperature above 0 (greedy text is audited anyway)")
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
