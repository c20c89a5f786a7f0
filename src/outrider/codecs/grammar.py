"""Grammars: text that is certain to match a JSON schema, a regular expression or an EBNF grammar.

A matcher follows the bytes of the tokens and says which tokens may come next. The sampler gives all others probability 0, at
every node of a tree by the path that leads there. So constrained text is exact under speculation. A state is a value: a matcher
that never changes, with the allowed tokens computed once. A token gives a copy of the matcher after it, stored under its
parent. So paths with a common prefix share states, and states that no request needs are freed. End-of-sequence tokens are
allowed exactly where the grammar may end.

    p(v | path)  =  0  unless  bytes(path) bytes(v) begins some text of the grammar  (v = end: is one)

The matcher is llguidance (derivatives of regular expressions and an Earley parser over the tokenizer's byte trie;
Microsoft, MIT licence), an optional dependency: pip install 'outrider[grammar]'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from outrider.codecs.grammar_source import GrammarSource, ebnf_source, first_line, json_schema_source, regex_source
from outrider.codecs.grammar_trial import compiled, complaint
from outrider.codecs.text import TextCodec
from outrider.core.errors import OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@final
class GrammarState:
    """A state of a grammar. Equal only to itself."""

    def __init__(self, matcher: LLMatcher, *, ended: bool = False) -> None:
        self.matcher = matcher
        self.ended = ended
        """Whether an end-of-sequence token was emitted. After it, only another one may follow."""
        self.allowed: Tensor | None = None
        self.forced: tuple[int, ...] | None = None
        self.next: dict[int, GrammarState | None] = {}


@final
class TokenGrammar:
    """A compiled grammar over one tokenizer's tokens; made by ``GrammarCompiler``, given as ``SamplingParams.grammar``."""

    def __init__(self, matcher: LLMatcher, *, end_ids: frozenset[int], encode: Callable[[str], list[int]]) -> None:
        """``encode`` tokenizes text that must follow."""
        self._matcher = matcher
        self._end_ids = end_ids
        self._encode = encode

    def initial(self) -> GrammarState:
        """A new tree of states, which lives as long as its request."""
        return GrammarState(self._matcher.deep_copy())

    def advance(self, state: GrammarState, token: int) -> GrammarState | None:
        if token not in state.next:
            state.next[token] = self._moved(state, token)
        return state.next[token]

    def allowed(self, state: GrammarState, vocab_size: int) -> Tensor:
        if state.allowed is None or len(state.allowed) != vocab_size:
            state.allowed = self._mask(state, vocab_size)
        return state.allowed

    def forced(self, state: GrammarState) -> tuple[int, ...]:
        if state.forced is None:
            state.forced = () if state.ended or state.matcher.is_stopped() else self._forced(state)
        return state.forced

    def _forced(self, state: GrammarState) -> tuple[int, ...]:
        """The tokens of the bytes that must follow, up to the first that the grammar refuses. Incomplete characters are left
        out."""
        matcher = state.matcher.deep_copy()
        tokens = self._encode(matcher.compute_ff_bytes().decode(errors="ignore"))
        return tuple(tokens[: max(0, matcher.validate_tokens(tokens))])

    def may_end(self, state: GrammarState) -> bool:
        """Whether the text so far is complete."""
        return state.ended or state.matcher.is_accepting()

    def _moved(self, state: GrammarState, token: int) -> GrammarState | None:
        if token in self._end_ids:
            return GrammarState(state.matcher, ended=True) if self.may_end(state) else None
        if state.ended or state.matcher.validate_tokens([token]) != 1:
            return None
        matcher = state.matcher.deep_copy()
        return GrammarState(matcher) if matcher.consume_token(token) else None

    def _mask(self, state: GrammarState, vocab_size: int) -> Tensor:
        """[V] boolean. Padding ids of the model's vocabulary are never allowed."""
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        if not state.ended and not state.matcher.is_stopped():
            # The copy, because a matcher that runs into a limit of the library stays in an error for good.
            packed = np.frombuffer(state.matcher.deep_copy().compute_bitmask(), np.uint8)
            bits = torch.from_numpy(np.unpackbits(packed, bitorder="little").view(np.bool_))
            mask[: len(bits)] = bits[:vocab_size]
        mask[[token for token in self._end_ids if token < vocab_size]] = self.may_end(state)
        return mask


@final
class GrammarCompiler:
    """Compiles grammars for one tokenizer. Reading the vocabulary takes up to a second, so keep it."""

    def __init__(self, codec: TextCodec) -> None:
        if not codec.eos_ids:
            raise OptionError("grammars need an end-of-sequence token, and this tokenizer declares none; set eos_token")
        self._end_ids = codec.eos_ids
        self._tokenizer = _tokenizer_of(codec)
        self._encode = lambda text: codec.tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def end_ids(self) -> list[int]:
        return sorted(self._end_ids)

    def json_schema(self, schema: Mapping[str, Any] | str, *, whitespace: bool = False) -> TokenGrammar:
        """JSON that validates, spaced as ``json.dumps`` does; ``whitespace`` allows any. ``{}`` is any JSON."""
        return self.compile(json_schema_source(schema, whitespace=whitespace))

    def regex(self, pattern: str) -> TokenGrammar:
        """Text that matches the whole pattern (no look-around and no back-references: they are not regular)."""
        return self.compile(regex_source(pattern))

    def ebnf(self, grammar: str) -> TokenGrammar:
        """Text of a context-free grammar: rules ``start: ...`` in Lark's notation, or ``root ::= ...`` in GBNF's."""
        return self.compile(ebnf_source(grammar))

    def compile(self, source: GrammarSource) -> TokenGrammar:
        """Compile a grammar, and follow it for a few tokens: one that cannot be satisfied is refused here."""
        matcher = compiled(self._tokenizer, source.text)
        if matcher.is_error():
            raise not_valid(source, matcher.get_error())
        problem = complaint(matcher)
        if problem:
            raise not_usable(source, problem)
        return TokenGrammar(matcher, end_ids=self._end_ids, encode=self._encode)


def grammar_source(*, json_schema: Mapping[str, Any] | str | None, regex: str | None, ebnf: str | None) -> GrammarSource:
    """The one grammar that is set among the three."""
    if sum(source is not None for source in (json_schema, regex, ebnf)) != 1:
        raise OptionError("grammar() was given none or several kinds of grammar; give one of json_schema=, regex= and ebnf=")
    if json_schema is not None:
        return json_schema_source(json_schema)
    return regex_source(regex) if regex is not None else ebnf_source(ebnf or "")


def not_valid(source: GrammarSource, error: str) -> OptionError:
    return OptionError(f"the {source.noun} is not valid: {first_line(error)}; correct it")


def not_usable(source: GrammarSource, error: str) -> OptionError:
    """The error for a grammar that compiles, but that no text satisfies."""
    return OptionError(f"the {source.noun} cannot be followed: {first_line(error)}; make it smaller, or correct it")


def serialised_tokenizer(codec: TextCodec) -> str:
    """A tokenizer file without padding and truncation, which the library does not accept."""
    return json.dumps({**json.loads(codec.tokenizer.to_str()), "padding": None, "truncation": None})


def _tokenizer_of(codec: TextCodec) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise OptionError("grammars need the package llguidance; pip install 'outrider[grammar]'") from None
    return LLTokenizer(serialised_tokenizer(codec), eos_token=sorted(codec.eos_ids))
