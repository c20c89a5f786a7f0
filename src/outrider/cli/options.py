"""Command-line options that several subcommands share: which model, which method, how to sample."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.cli.progress import waiting
from outrider.cli.terminal import dim
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams

CONFIG_KIND = "outrider config"
"""What a file written by ``outrider tune`` says it is."""


def add_model_options(parser: argparse.ArgumentParser, *, model_action: str = "store") -> None:
    """``model_action`` "append" lets ``--model`` be repeated, for commands that run several models."""
    group = parser.add_argument_group("model and method")
    group.add_argument("--config", type=Path, metavar="FILE", help="written by `outrider tune`; options given here come first")
    group.add_argument(
        "--model", metavar="NAME", action=model_action, help="folder, hub name or .gguf file (default: the bundled model)"
    )
    group.add_argument(
        "--draft", action="append", metavar="NAME", help="draft model, repeatable (default: the bundled model's own)"
    )
    group.add_argument("--method", metavar="NAME", help="see `outrider methods`")
    group.add_argument("--acceptance", metavar="RULE", help="acceptance rule (default: the method's own)")
    group.add_argument("--policy", metavar="NAME", help="how the draft length is chosen (default: adaptive, or fixed with -K)")
    group.add_argument("--num-draft-tokens", "-K", type=int, metavar="K", help="guesses per round")
    group.add_argument("--reference", action="append", default=[], metavar="FILE", help="a document to copy from (repeatable)")
    group.add_argument(
        "--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="any other option of the method"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16, float16, int8 or stored (GGUF on a CPU)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    group.add_argument("--numerics", default="fast", help="fast, or invariant: bit for bit the text of plain decoding (GPU)")
    group.add_argument("--max-len", type=int, metavar="N", help="open the model for so many tokens (default: all it knows)")
    text = "divide the model among so many processes, a GPU each where there are enough"
    group.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help=text)
    group.add_argument("--draft-process", action="store_true", help="give the draft model a process of its own (for pearl)")
    text = "spread the draft's layers over so many processes and run them at once (EasySpec)"
    group.add_argument("--draft-parallel", type=int, default=1, metavar="N", help=text)
    group.add_argument("--draft-dtype", metavar="DTYPE", help="of draft models, where it differs: int8 drafts in fewer bytes")
    text = "LOSSY: read only this share of every prompt, chosen by the draft model (default: 1, all of it)"
    group.add_argument("--keep-prompt", type=float, default=1.0, metavar="SHARE", help=text)
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the hub")
    group.add_argument("--trust-remote-code", action="store_true", help="let a checkpoint run Python code of its own")
    group.add_argument("--no-fast", dest="fast", action="store_false", help="run the plain PyTorch decoder")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", "-n", type=int, default=128, help="most tokens to write")
    group.add_argument("--temperature", "-t", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top-k", type=int, default=0, help="choose among the k likeliest tokens; 0 is all of them")
    group.add_argument("--top-p", type=float, default=1.0, help="choose among the likeliest tokens that hold this share")
    group.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest one")
    group.add_argument("--typical-p", type=float, default=1.0, help="keep the most typical tokens that hold this share")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 repeats less, the prompt included")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="taken once from tokens that were written")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="taken once for each time a token was written")
    group.add_argument("--min-tokens", type=int, default=0, help="write at least so many")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--seed", type=int, help="same seed, same text")
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="FILE", type=Path, help="write JSON that validates against this schema")
    grammar.add_argument("--regex", metavar="PATTERN", help="write text that matches this regular expression")
    grammar.add_argument("--ebnf", metavar="FILE", type=Path, help="write text of this grammar (Lark or GBNF notation)")
    group.add_argument("--ignore-eos", action="store_true", help="write on after the end-of-sequence token")


_SAMPLING = (
    "max_tokens temperature top_k top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty min_tokens "
    "stop seed ignore_eos"
).split()


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Everything but the grammar, which needs the model's tokenizer: see ``with_grammar``."""
    return SamplingParams(**{name: vars(arguments)[name] for name in _SAMPLING})


def with_grammar(params: SamplingParams, llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    """The same, constrained to the grammar that was asked for."""
    for name in ("json_schema", "ebnf", "regex"):
        source = vars(arguments)[name]
        if isinstance(source, Path) and not source.is_file():
            raise OptionError(f"--{name.replace('_', '-')} {source} does not exist; check the path")
        if source is not None:
            text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
            return replace(params, grammar=llm.grammar(**{name: text}))
    return params


def method_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """``-O name=value`` pairs, values read as numbers where they are numbers."""
    options: dict[str, Any] = {}
    for pair in arguments.option:
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"--option {pair!r} is not valid; write NAME=VALUE")
        options[name.replace("-", "_")] = value_of(value)
    if arguments.reference:
        options["references"] = [_read(path) for path in arguments.reference]
    if arguments.num_draft_tokens is not None:
        options["num_draft_tokens"] = arguments.num_draft_tokens
    return options


def load_llm(arguments: argparse.Namespace, **more: Any) -> LLM:
    config = read_config_file(arguments.config) if arguments.config else {}
    same_method = arguments.method in (None, config.get("method"))  # options of one method mean nothing to another
    options = {**(config.get("options", {}) if same_method else {}), **method_options(arguments)}
    name = arguments.model or config.get("model")
    if arguments.keep_prompt != 1:
        print(dim(f"lossy: about {arguments.keep_prompt:.0%} of every prompt is read"), file=sys.stderr)
    with waiting(f"loading {name or 'the bundled model'}"):
        return _load(name, arguments, config, same_method=same_method, options={**more, **options})


def _load(name: str | None, arguments: argparse.Namespace, config: dict[str, Any], *, same_method: bool, options: Any) -> LLM:
    return LLM(
        name,
        method=arguments.method or config.get("method"),
        draft=arguments.draft or config.get("draft"),
        acceptance=arguments.acceptance or (config.get("acceptance") if same_method else None),
        policy=arguments.policy or (config.get("policy") if same_method else None),
        dtype=arguments.dtype if arguments.dtype != "auto" else config.get("dtype", "auto"),
        device=arguments.device or config.get("device"),
        fast=arguments.fast,
        numerics=arguments.numerics,
        max_len=arguments.max_len,
        tensor_parallel=arguments.tensor_parallel,
        draft_process=arguments.draft_process,
        draft_parallel=arguments.draft_parallel,
        draft_dtype=arguments.draft_dtype,
        keep_prompt=arguments.keep_prompt,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        **options,
    )


def read_config_file(path: Path) -> dict[str, Any]:
    """A config as ``outrider tune`` writes it."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"config {path} cannot be read ({error.strerror}); make one with `outrider tune`") from None
    except ValueError:
        raise OptionError(f"config {path} is not JSON; make one with `outrider tune`") from None
    if not isinstance(config, dict) or config.get("kind") != CONFIG_KIND:
        raise OptionError(f'config {path} was not written by `outrider tune` (no "kind": "{CONFIG_KIND}"); make one with it')
    return config


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"reference {path} cannot be read ({error.strerror}); check the path") from None


def value_of(text: str) -> int | float | str | bool:
    """A number, a truth value, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
