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
"""The kind of file that ``outrider tune`` writes."""


_SAMPLING = (
    "max_tokens temperature top_k top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty min_tokens "
    "stop seed ignore_eos"
).split()


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Sampling parameters without the grammar, which needs the model's tokenizer: see ``with_grammar``."""
    return SamplingParams(**{name: vars(arguments)[name] for name in _SAMPLING})


def with_grammar(params: SamplingParams, llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    """The parameters with the grammar that was asked for."""
    for name in ("json_schema", "ebnf", "regex"):
        source = vars(arguments)[name]
        if isinstance(source, Path) and not source.is_file():
            raise OptionError(f"--{name.replace('_', '-')} {source} does not exist; check the path")
        if source is not None:
            text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
            return replace(params, grammar=llm.grammar(**{name: text}))
    return params


def method_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """``-O name=value`` pairs. Values that look like numbers become numbers."""
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
    if arguments.kv_cache != "auto":
        print(dim(f"keys and values in {arguments.kv_cache}: the model's scores change a little"), file=sys.stderr)
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
        kv_cache=arguments.kv_cache,
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
    """Read a config that ``outrider tune`` wrote."""
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
