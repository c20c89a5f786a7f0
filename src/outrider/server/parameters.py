"""From the fields of a request to sampling parameters, and to the grammar that its answer has to match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.codecs.bans import banned_words, only_tokens
from outrider.codecs.grammar_source import (
    GrammarSource,
    SourceLimits,
    choice_source,
    ebnf_source,
    json_schema_source,
    regex_source,
)
from outrider.codecs.text import TextCodec
from outrider.core.errors import OutriderError
from outrider.core.params import Grammar, LogitsProcessor, SamplingParams
from outrider.server.failures import ApiError
from outrider.server.grammars import grammar_refusal
from outrider.server.protocol import SamplingFields

_SAME = (
    "temperature min_p typical_p presence_penalty frequency_penalty repetition_penalty min_tokens ignore_eos "
    "skip_special_tokens include_stop_str_in_output seed"
).split()

_LEAST_TOP_P = 1e-6
"""0 is taken for so much, which leaves the most probable token."""


def sampling_params(
    body: SamplingFields,
    codec: TextCodec,
    *,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
    grammar: Grammar | None,
) -> SamplingParams:
    """The sampling parameters of a request."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        **body.model_dump(include=set(_SAME)),
        max_tokens=max_tokens,
        top_p=max(body.top_p, _LEAST_TOP_P),
        top_k=max(0, body.top_k),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_bias_of(body.logit_bias or {}),
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        grammar=grammar,
        logits_processors=tuple(_processors(body, codec, vocab_size)),
    )


def with_seed(params: SamplingParams, offset: int) -> SamplingParams:
    """The parameters of choice number ``offset``, with a seed of its own."""
    if params.seed is None or offset == 0:
        return params
    return SamplingParams(**{**vars(params), "seed": (params.seed + offset) % 2**63})


def grammar_source(body: SamplingFields, limits: SourceLimits, *, schema: Mapping[str, Any] | None) -> GrammarSource | None:
    """The grammar that a request names, or that of ``schema``, the tools it must call."""
    asked = [(param, kind, value) for param, kind, value in _grammars_of(body) if value is not None]
    if schema is not None:
        asked.append(("tool_choice", "json", schema))
    if len(asked) > 1:
        names = " and ".join(param for param, *_ in asked)
        raise ApiError(400, f"{names} both constrain the answer; leave one of them out", param=asked[1][0])
    if not asked:
        return None
    param, kind, value = asked[0]
    try:
        return _source(kind, value, limits)
    except OutriderError as error:
        raise grammar_refusal(error, param) from None
    except ImportError:
        raise ApiError(400, "grammars need the package llguidance; pip install 'outrider[grammar]'", param=param) from None
    except (ValueError, RecursionError) as error:  # of the library: half a surrogate pair, brackets without end
        raise ApiError(400, f"the grammar cannot be read ({error}); correct it", param=param, code="invalid_grammar") from None


def _grammars_of(body: SamplingFields) -> list[tuple[str, str, Any]]:
    """Field, kind and value of every grammar in the request."""
    named: list[tuple[str, str, Any]] = [("response_format", "json", _format_schema(body))]
    named += [(f"guided_{kind}", kind, vars(body)[f"guided_{kind}"]) for kind in ("json", "regex", "choice", "grammar")]
    given = body.structured_outputs
    if given is not None:
        kinds = {"json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar}
        named += [("structured_outputs", kind, value) for kind, value in kinds.items()]
        named.append(("structured_outputs", "json", {"type": "object"} if given.json_object else None))
    return named


def _format_schema(body: SamplingFields) -> Mapping[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return wanted.schema_ or {"type": "object"}
    if wanted.json_schema is None:
        raise ApiError(400, "response_format has no schema; give json_schema", param="response_format")
    return wanted.json_schema.schema_


def _source(kind: str, value: Any, limits: SourceLimits) -> GrammarSource:
    if kind == "choice":
        limits.check_text("".join(value), "choice")
        return choice_source(value)
    if kind == "json" and not isinstance(value, str):
        return _schema(value, limits)
    limits.check_text(value, {"json": "JSON schema", "regex": "regular expression"}.get(kind, "grammar"))
    makers: dict[str, Callable[[str], GrammarSource]] = {"json": json_schema_source, "regex": regex_source}
    return makers.get(kind, ebnf_source)(value)


def _schema(schema: Mapping[str, Any], limits: SourceLimits) -> GrammarSource:
    limits.check_schema(schema)
    return json_schema_source(schema)


def _processors(body: SamplingFields, codec: TextCodec, vocab_size: int) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if body.bad_words:
        found.append(banned_words(codec, body.bad_words))
    if body.allowed_token_ids:
        found.append(only_tokens(body.allowed_token_ids, vocab_size))
    return found


def _bias_of(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise ApiError(400, "a key of logit_bias is no token id; use whole numbers", param="logit_bias") from None
