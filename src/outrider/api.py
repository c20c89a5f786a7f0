"""The Python API: load a model, generate, stream, chat.

    from outrider import LLM, SamplingParams
    llm = LLM("folder-or-hub-name-or-gguf", method="draft-model", draft="folder")     # LLM() is the bundled pair
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=64, temperature=0.8, seed=7))[0].text

This is where target, method and engine meet; everything below can be used without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from os import PathLike, fspath
from typing import Any, final

from tqdm import tqdm

from outrider.bundled import bundled_path, has_bundled
from outrider.captured import Rounds
from outrider.codecs.grammar import GrammarCompiler
from outrider.codecs.load import load_codec
from outrider.codecs.translation import TextTranslation
from outrider.core.choice import Choice
from outrider.core.errors import ModelError, OptionError, RequestError
from outrider.core.interfaces import Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.method import Method
from outrider.core.params import Grammar, SamplingParams, as_params
from outrider.core.prompts import Message, Prompt, as_conversations, as_prompts
from outrider.core.report import Progress
from outrider.core.request import Request, RequestState
from outrider.core.trace import Round
from outrider.engine.beam import BeamOptions, beam_search
from outrider.engine.beam_forest import ModelForest
from outrider.engine.step import Engine
from outrider.methods import METHODS, TABLES, compose, rows_of
from outrider.models.importance import ImportantTokens, PromptShare
from outrider.models.load import load_model
from outrider.models.source import Source, local_path
from outrider.outputs import BeamOutput, RequestOutput, StreamChunk, beams_of, held_back, output_of
from outrider.rehearsal import Rehearsal, weight_of


@final
class LLM:
    """A model, a method to speed it up, and a tokenizer."""

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        method: str | None = None,
        draft: str | PathLike[str] | Sequence[str] | None = None,
        acceptance: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_batch_size: int = 8,
        fast: bool = True,
        numerics: str = "fast",
        page_len: int = 0,
        max_len: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel: int = 1,
        draft_process: bool = False,
        keep_prompt: float = 1.0,
        **options: Any,
    ) -> None:
        """``model`` and ``draft``: a folder, a hub name or a GGUF file; with neither, the bundled pair; ``draft`` may name
        several. ``fast`` False runs the plain PyTorch decoder; ``numerics`` "invariant" (GPU) makes speculative text equal
        plain text bit for bit; ``page_len`` keeps the target's keys in pages (``models/load.py``). ``max_len`` opens the
        target for so many tokens; ``revision`` is a branch, tag or commit on the hub; ``trust_remote_code`` lets a
        checkpoint run Python code of its own; ``tensor_parallel`` divides the target among so many processes;
        ``draft_process`` gives every draft model a process of its own (for ``pearl``); ``keep_prompt`` below 1 is LOSSY: the
        target reads only that share of every prompt, chosen by the draft model (docs/sparse_prompts.md).
        ``options`` are the method's own (``num_draft_tokens`` ...; ``outrider methods`` lists them). Names and options are
        checked before anything is loaded."""
        if max_batch_size < 1:
            raise OptionError(f"max_batch_size = {max_batch_size} is not valid; use at least 1")
        self.max_batch_size = max_batch_size
        names = [_named(name) for name in ([draft] if isinstance(draft, str | PathLike) else draft or ())]
        if model is None and not names and (method is None or keep_prompt != 1 or _needs_draft(method, options)):
            names = [bundled_path("draft")]
        source = Source(_named(model or bundled_path("target")), revision, trust_remote_code)
        self.model_name = str(local_path(source)) if revision else source.name
        self.method_name = method or ("draft-model" if names else "prompt-lookup")
        _check_share(keep_prompt, names)
        self._check_choice(acceptance, names, options)
        self.codec = load_codec(self.model_name)
        self._grammars: GrammarCompiler | None = None
        self.draft_names = names if _needs_draft(self.method_name, options) else []
        self.draft_codecs = [load_codec(name) for name in self.draft_names]
        self._check_vocabularies(self.method_name)
        load = partial(load_model, dtype=dtype, device=device, fast=fast)
        source = replace(source, name=self.model_name, revision=None)
        if tensor_parallel == 1:
            self.target = load(source, numerics=numerics, page_len=page_len, max_len=max_len)
        else:
            self.target = _divided(tensor_parallel, load, source, numerics=numerics, page_len=page_len, max_len=max_len)
        if keep_prompt != 1:
            self.target = self._sparse(keep_prompt, names, load)
        self.rounds = Rounds(self.target)
        self.drafts = [_elsewhere(load, name) if draft_process else load(name) for name in self.draft_names]
        self.draft = self.drafts[0] if self.drafts else None
        self._compose_default = partial(self.compose, self.method_name, acceptance=acceptance, **options)
        self.method = self._compose_default()
        self._by_name: dict[str, Method] = {}

    def compose(self, name: str, *, acceptance: str | None = None, policy: str | None = None, **options: Any) -> Method:
        """Another method on the models already loaded, for the ``method=`` of a call. Without a policy, the draft length is
        the one that pays (the row's policy, mostly ``adaptive``), or fixed if it is given."""
        for option in {text for row in rows_of(name, options).values() for text in row.texts} & set(options):
            texts = [options[option]] if isinstance(options[option], str) else options[option]
            options[option] = [self.codec.encode(t, add_special_tokens=False) if isinstance(t, str) else t for t in texts]
        if _needs_draft(name, options):
            self._check_vocabularies(name)
        headed = next((part for part, row in rows_of(name, options).items() if "heads" in row.needs), None)
        if headed:
            options.setdefault("ends", self.model_name)
        if headed and self._has_bundled_heads(headed):
            options.setdefault("heads", bundled_path(f"heads/{headed}"))
        method = compose(
            name,
            self.target,
            draft=self.drafts or None,
            acceptance=acceptance,
            policy=policy or ("fixed" if {"num_draft_tokens", "num_tree_nodes"} & set(options) else METHODS[name].policy),
            options=options,
            translation=TextTranslation(self.codec, self.draft_codecs[0]) if self.drafts and METHODS[name].foreign else None,
        )
        label = {"models": [weight_of(model) for model in (self.model_name, *self.draft_names)], "method": name, **options}
        method.policy.expect(Rehearsal(self.target, method.drafter, label))
        return method

    def replace_draft(self, draft: Target) -> None:
        """Draft with another model of the same vocabulary from now on; methods composed before keep theirs."""
        if not self.drafts:
            raise OptionError(f"method {self.method_name!r} has no draft model to replace; load one with draft=")
        self.drafts = [draft, *self.drafts[1:]]
        self.draft = draft
        self.method, self._by_name = self._compose_default(), {}

    def can_compose(self, name: str) -> bool:
        """Whether a method, with nothing but its defaults, can run on what is loaded."""
        row = METHODS[name]
        missing = set(row.needs) - ({"heads"} if self._has_bundled_heads(name) else set())
        divided = self.drafts[:1] if row.needs_draft else [self.target]
        has_layers = not row.needs_layers or all(isinstance(model, LayeredTarget) for model in divided)
        return not missing and not row.foreign and has_layers and (bool(self.drafts) or not row.needs_draft)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        method: Method | str | None = None,
        n: int = 1,
        trace: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts. ``method`` is another one for this call, by name
        (``"suffix"``) or composed; ``n`` texts of every prompt come one after the other, from the seeds seed, seed + 1 ..."""
        requests = self.requests(prompts, params, n=n)
        rounds: list[list[Round]] = [[] for _ in requests]
        steps = self.steps(requests, method=method, traced=trace)
        outputs: dict[int, RequestOutput] = {}
        with tqdm(total=len(requests), disable=not progress, unit="request") as bar:
            for step in steps:
                if trace:
                    rounds[step.request].append(step.trace)
                if step.state.is_finished:
                    outputs[step.request] = self._output(step.state, rounds[step.request])
                    bar.update()
        return [outputs[index] for index in range(len(requests))]

    def steps(
        self, requests: Sequence[Request], *, method: Method | str | None = None, traced: bool = False
    ) -> Iterator[Progress]:
        """Serve requests round by round. This is the loop under ``generate``, ``stream`` and ``outrider chat``. With ``traced``
        every round reports its tree (``Progress.trace``)."""
        return self.rounds.run(self._method_of(method), requests, max_batch_size=self.max_batch_size, traced=traced)

    def warm_up(self, *, method: Method | None = None, num_tokens: int = 1024, progress: bool = False) -> None:
        """Compile and capture now what the first requests of up to ``num_tokens`` tokens, prompt included, would wait for.
        Only a GPU has anything to prepare."""
        sizes = sorted({1, self.max_batch_size}, reverse=True)  # the largest first: memory that grows moves
        with tqdm(disable=not progress, unit="round", desc="preparing") as bar:
            for size in sizes:
                for _, total in self.rounds.prepare(method or self.method, batch_size=size, num_tokens=num_tokens):
                    bar.total = total * len(sizes)
                    bar.update()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        method: Method | str | None = None,
        n: int = 1,
    ) -> Iterator[StreamChunk]:
        """As ``generate``, a chunk per request and round. Text that could still become a stop string is held back."""
        requests = self.requests(prompts, params, streaming=True, n=n)
        shown = [0] * len(requests)
        for step in self.steps(requests, method=method):
            state, index = step.state, step.request
            output = self._output(state, []) if state.is_finished else None
            text = output.text if output else state.text[: len(state.text) - held_back(state)]
            yield StreamChunk(index, text[shown[index] :], step.new_tokens, step.origins, output)
            shown[index] = max(shown[index], len(text))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None, **options: Any
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the format of the model's chat template."""
        return self.generate([self.codec.encode_chat(one) for one in as_conversations(messages)], params, **options)

    def stream_chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[StreamChunk]:
        """As ``chat``, a chunk per conversation and round."""
        return self.stream([self.codec.encode_chat(one) for one in as_conversations(messages)], params, **options)

    def grammar(
        self, *, json_schema: Mapping[str, Any] | str | None = None, regex: str | None = None, ebnf: str | None = None
    ) -> Grammar:
        """A grammar for ``SamplingParams(grammar=...)``: exactly one of a JSON schema, a regular expression, an EBNF text."""
        if sum(source is not None for source in (json_schema, regex, ebnf)) != 1:
            raise OptionError("grammar() takes exactly one of json_schema=, regex= and ebnf=")
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.codec)
        if json_schema is not None:
            return self._grammars.json_schema(json_schema)
        return self._grammars.regex(regex) if regex is not None else self._grammars.ebnf(ebnf or "")

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: BeamOptions | None = None,
        *,
        width: int | None = None,
        depth: int = 4,
    ) -> list[list[BeamOutput]]:
        """The best continuations of every prompt, best first; a draft model searches ahead."""
        options = options or BeamOptions()
        draft = self.draft if self.drafts and self.codec.same_vocabulary(self.draft_codecs[0]) else None
        forest = ModelForest(draft, width=width or 2 * options.num_beams, depth=depth) if draft else None
        return [self._beams(prompt, options, forest) for prompt in as_prompts(prompts)]

    def _beams(self, prompt: Prompt, options: BeamOptions, forest: ModelForest | None) -> list[BeamOutput]:
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        found = beam_search(self.target, ids, options=options, end_ids=self.codec.eos_ids, forest=forest)
        return beams_of(self.codec, found, ids)

    def engine(self) -> Engine:
        """The engine itself, to step by hand: ``batch = engine.start(llm.requests(...)); engine.step(batch)``."""
        return Engine(self.target, self.method)

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        streaming: bool = False,
        n: int = 1,
    ) -> list[Request]:
        """Prompts and parameters as the engine takes them, ``n`` requests for each prompt."""
        many, each = as_prompts(prompts), as_params(params)
        each = each * len(many) if params is None or isinstance(params, SamplingParams) else each
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts came with {len(each)} sampling parameters; give one, or one per prompt")
        pairs = [(prompt, again) for prompt, one in zip(many, each, strict=True) for again in one.repeated(n)]
        return [self._request(prompt, one, streaming) for prompt, one in pairs]

    def _request(self, prompt: Prompt, params: SamplingParams, streaming: bool) -> Request:
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        reads = self.codec.has_tokenizer and (streaming or bool(params.stop))
        stream = self.codec.new_stream(ids, skip_special_tokens=params.skip_special_tokens) if reads else None
        return Request(ids, params, self.codec.eos_ids, stream)

    def _output(self, state: RequestState, rounds: list[Round]) -> RequestOutput:
        return output_of(self.codec, state, rounds, is_invariant=self.target.is_invariant)

    def _method_of(self, method: Method | str | None) -> Method:
        """A method by name is composed once, so that what it learns is kept."""
        if not isinstance(method, str):
            return method or self.method
        if method not in self._by_name:
            self._by_name[method] = self.compose(method)
        return self._by_name[method]

    def _sparse(self, keep: float, names: Sequence[str], load: partial[Target]) -> Target:
        """The target behind a small model that leaves out part of every prompt; that model is opened once more, as the plain
        decoder, whose attention can be looked at."""
        from outrider.models.sparse_prompts import SparsePrompts

        if not self.codec.same_vocabulary(load_codec(names[0])):
            what = f"keep_prompt = {keep} needs a draft model with the target's vocabulary, and {names[0]!r} has another"
            raise ModelError(f"{what}; give a draft of the same family, or leave keep_prompt out")
        reader = load(names[0], fast=False, dtype="auto")
        return SparsePrompts(self.target, ImportantTokens.of(reader, PromptShare(keep)))

    def _check_choice(self, acceptance: str | None, drafts: Sequence[str], options: Mapping[str, Any]) -> None:
        """Find mistakes in names and options before anything is loaded."""
        given = {name: value for name, value in options.items() if name != "policy"}
        row = METHODS[self.method_name]
        if "heads" in row.needs and self._has_bundled_heads(self.method_name):
            given.setdefault("heads", bundled_path(f"heads/{self.method_name}"))
        choice = Choice(self.method_name, acceptance, options.get("policy") or row.policy, given)
        own = [name for name in signature(LLM).parameters if name != "options"]
        choice.check(TABLES, num_drafts=len(drafts), translates=bool(drafts), also=own)
        for name in drafts:
            local_path(name)

    def _has_bundled_heads(self, method: str) -> bool:
        return self.model_name == bundled_path("target") and has_bundled(f"heads/{method}")

    def _check_vocabularies(self, method: str) -> None:
        """A draft whose tokens mean something else can only be used by the methods that translate."""
        codec = next((codec for codec in self.draft_codecs if not self.codec.same_vocabulary(codec)), None)
        if codec is not None and not METHODS[method].foreign:
            raise ModelError(
                f"the draft model has another vocabulary ({codec.vocab_size} tokens) than {self.model_name!r} "
                f"({self.codec.vocab_size}), and method {method!r} needs the same one; use method 'tli' or 'reencode', which "
                "translate, or a draft of the same family, or method 'prompt-lookup'"
            )


def _check_share(keep: float, drafts: Sequence[str]) -> None:
    """Refuse a share of the prompt that nobody could choose."""
    PromptShare(keep)
    if keep != 1 and not drafts:
        raise OptionError(f"keep_prompt = {keep} needs a small model that chooses among tokens; give draft=, or leave it out")


def _divided(size: int, load: partial[Target], source: Source, *, numerics: str, **options: Any) -> Target:
    """The target divided among processes, opened as ``load`` would."""
    if numerics != "fast":
        raise OptionError(f"numerics = {numerics!r} is not available for a divided model; leave it or tensor_parallel out")
    from outrider.models.parallel import load_parallel

    return load_parallel(source, size, **load.keywords, **options)


def _elsewhere(load: partial[Target], name: str) -> Target:
    """A model in a process of its own, opened as ``load`` would."""
    from outrider.models.remote import RemoteModel

    return RemoteModel(name, **load.keywords)


def _named(name: Any) -> str:
    if not isinstance(name, str | PathLike):
        raise OptionError(f"{name!r} is not the name of a model; give a folder, a hub name or a .gguf file")
    return fspath(name)


def _needs_draft(method: str, options: Mapping[str, Any]) -> bool:
    return any(row.needs_draft for row in rows_of(method, options).values())
