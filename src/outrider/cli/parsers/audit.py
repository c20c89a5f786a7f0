"""``outrider audit MODEL METHOD``: is this method lossless on this model, here?

    outrider audit bundled draft-model
    outrider audit DIR draft-tree --draft DIR --acceptance traversal --dtype float32
    outrider audit bundled all            every method, then every acceptance rule

Exit code 0: no violation found. 1: one was, or the rule is lossy by design; the report says by how much.
With ``all``: 0 if every lossless setting passes and every lossy rule is flagged.
"""

from __future__ import annotations

import argparse

from outrider.bench.audit.config import AuditConfig
from outrider.cli.parsers.shared import add_key_storage


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("audit", description=__doc__)
    parser.add_argument("model", help="folder, hub name or .gguf file; 'bundled' for the bundled pair")
    parser.add_argument("method", help="a name of `outrider methods`, or 'all'")
    parser.add_argument("--draft", action="append", metavar="NAME", help="draft model, repeatable")
    parser.add_argument("--acceptance", metavar="RULE", help="acceptance rule (default: the method's own)")
    parser.add_argument(
        "--policy",
        metavar="NAME",
        default="fixed",
        help="how the draft length is chosen (default: fixed, which never stops guessing, so every guess is tested)",
    )
    parser.add_argument("--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    add_key_storage(parser)
    parser.add_argument("--threads", type=int, help="CPU threads")
    group = parser.add_argument_group("size of the audit")
    defaults = AuditConfig()
    group.add_argument("--suites", default="stories,extraction", help="where prompts come from (default: %(default)s)")
    group.add_argument("--prompts", type=int, default=defaults.num_prompts, help="prompts of the identity tests")
    group.add_argument("--max-tokens", "-n", type=int, default=defaults.max_tokens, help="tokens of a text")
    group.add_argument(
        "--tokens",
        type=int,
        default=defaults.num_tokens,
        help="tokens drawn to compare the distribution of the text with the model's",
    )
    group.add_argument("--temperature", "-t", type=float, default=defaults.temperature, help="sampling temperature")
    group.add_argument(
        "--top-p",
        type=float,
        default=defaults.top_p,
        help="sample from the likeliest tokens whose probabilities reach this sum",
    )
    group.add_argument("--alpha", type=float, default=defaults.alpha, help="error rate of each sequential test")
    group.add_argument("--json", action="store_true", help="print one JSON document")
