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
from os import PathLike
from typing import Any, final

from tqdm import tqdm

from outrider import opening
from outrider.bundled import bundled_path
from outrider.codecs.grammar import GrammarCompiler, grammar_source
from outrider.codecs.load import load_codec
from outrider.codecs.translation import TextTranslation
from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import Grammar, SamplingParams
from outrider.core.prompts import Message, Prompt, ReadPrompt, as_conversations, as_prompts
from outrider.core.report import Progress
from outrider.core.request import Request, RequestState
from outrider.core.trace import Round
from outrider.cuda_graphs import Rounds
from outrider.engine.beam import BeamOptions, beam_search
from outrider.engine.beam_forest import ModelForest
from outrider.engine.step import Engine
from outrider.methods import METHODS, compose
from outrider.models.heads import Head
from outrider.models.load import load_model
from outrider.models.source import Source, local_path
from outrider.outputs import BeamOutput, RequestOutput, StreamChunk, beams_of, held_back, output_of
from outrider.rehearsal.rehearsal import KnownPrices, expect_prices, weight_of
from outrider.requests import PromptReader, requests_of


@final
class LLM:
    """A model, a method to speed it up, and a tokenizer.

    - ``model`` and ``draft`` are a folder, a hub name or a GGUF file. With neither, the bundled pair is opened.
    - ``max_batch_size`` is the most requests that share a round (default: 8; on a GPU, what memory holds).
    - ``max_len`` is the longest context in tokens. ``page_len`` is the size of a page of keys.
    - ``fast=False`` runs the plain PyTorch decoder. ``numerics`` "invariant" insists on plain decoding's text, bit for bit;
      "fast" lets near ties fall otherwise on a GPU (default: invariant, except for weights of few bits).
    - ``kv_cache`` "fp8" or "int8" stores keys and values in 8 bits: LOSSY, half the memory a token (docs/kv_cache.md).
    - ``revision`` is a branch, tag or commit on the hub. ``trust_remote_code`` lets a checkpoint run Python code.
    - ``tensor_parallel`` divides the target among processes. ``draft_process`` gives every draft model a process of its
      own, ``draft_parallel`` several that run its layers at once, and ``draft_dtype`` a type of its own ("int8").
    - ``keep_prompt`` below 1 is LOSSY: the target reads only that share of every prompt (docs/sparse_prompts.md).
    - ``options`` are the method's own, such as ``num_draft_tokens``; ``outrider methods`` lists them.
    """

    _grammars: GrammarCompiler | None = None
    """Made when the first grammar is asked for."""

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        method: str | None = None,
        draft: str | PathLike[str] | Sequence[str] | None = None,
        acceptance: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_batch_size: int | None = None,
        fast: bool = True,
        numerics: str = "auto",
        page_len: int = 0,
        kv_cache: str = "auto",
        max_len: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel: int = 1,
        draft_process: bool = False,
        draft_parallel: int = 1,
        draft_dtype: str | None = None,
        keep_prompt: float = 1.0,
        **options: Any,
    ) -> None:
        self.max_batch_size = opening.checked_batch_size(max_batch_size)
        names = [opening.name_of(name) for name in ([draft] if isinstance(draft, str | PathLike) else draft or ())]
        if model is None and not names and (method is None or keep_prompt != 1 or opening.needs_draft(method, options)):
            names = [bundled_path("draft")]
        source = Source(opening.name_of(model or bundled_path("target")), revision, trust_remote_code)
        self.model_name = str(local_path(source)) if revision else source.name
        self.method_name = method or ("draft-model" if names else "prompt-lookup")
        opening.check_share(keep_prompt, names)
        opening.check_choice(self.model_name, self.method_name, acceptance, names, options, also=signature(LLM).parameters)
        self.codec = load_codec(self.model_name)
        self.draft_names = names if opening.needs_draft(self.method_name, options) else []
        self.draft_codecs = [load_codec(name) for name in self.draft_names]
        opening.check_vocabularies(self.codec, self.draft_codecs, self.method_name, self.model_name)
        load = partial(load_model, dtype=dtype, device=device, fast=fast)
        source = replace(source, name=self.model_name, revision=None)
        more: dict[str, Any] = {"numerics": numerics, "page_len": page_len, "kv_cache": kv_cache, "max_len": max_len}
        self.target, vision = opening.open_target(load, source, self.codec, tensor_parallel, **more)
        self.reading = PromptReader(self.codec, vision, self.model_name)
        self.target = opening.with_sparse_prompts(self.target, self.codec, keep_prompt, names, load)
        self.rounds, self._types = Rounds(self.target), [dtype, draft_dtype or dtype, kv_cache]
        places: dict[str, Any] = {"dtype": draft_dtype or dtype, "apart": draft_process, "at_once": draft_parallel}
        self.drafts = opening.open_drafts(load, self.draft_names, **places)
        self.draft, self.prices = self.drafts[0] if self.drafts else None, KnownPrices()
        self._by_name, self._heads = dict[str, Method](), dict[str, Head]()
        self._compose_default = partial(self.compose, self.method_name, acceptance=acceptance, **options)
        self.method = self._compose_default()

    def compose(self, name: str, *, acceptance: str | None = None, policy: str | None = None, **options: Any) -> Method:
        """Another method on the loaded models, for the ``method=`` of a call. Without ``policy``, a given draft length is
        fixed, and otherwise the method's own policy (mostly ``adaptive``) chooses it."""
        options = opening.with_token_texts(self.codec, name, options)
        if opening.needs_draft(name, options):
            opening.check_vocabularies(self.codec, self.draft_codecs, name, self.model_name)
        options = opening.with_heads(self.model_name, name, options, self._heads)
        translates = self.drafts and METHODS[name].any_tokenizer
        method = compose(
            name,
            self.target,
            draft=self.drafts or None,
            acceptance=acceptance,
            policy=policy or ("fixed" if {"num_draft_tokens", "num_tree_nodes"} & set(options) else METHODS[name].policy),
            options=options,
            translation=TextTranslation(self.codec, self.draft_codecs[0]) if translates else None,
        )
        models = [weight_of(model) for model in (self.model_name, *self.draft_names)]
        label = {"models": models, "types": self._types, "method": name}
        label |= {option: value for option, value in options.items() if option not in METHODS[name].texts}
        expect_prices(method, self.target, label, self.rounds.graphs_of, self.prices)
        return method

    def replace_draft(self, draft: Target) -> None:
        """Draft with another model of the same vocabulary from now on; methods composed before keep theirs."""
        if not self.drafts:
            raise OptionError(f"method {self.method_name!r} has no draft model to replace; load one with draft=")
        self.drafts = [draft, *self.drafts[1:]]
        self.draft = draft
        self.method, self._by_name = self._compose_default(), {}

    def option(self, name: str) -> Any:
        """The value that was given for an option of the method; None if it was not given."""
        return self._compose_default.keywords.get(name)

    @property
    def heads_name(self) -> str | None:
        """Folder of the heads that the method was made with; None if it has no heads, or they were replaced."""
        named = self.option("heads")
        if named is None and opening.has_bundled_heads(self.model_name, self.method_name):
            return bundled_path(f"heads/{self.method_name}")
        return named if isinstance(named, str) else None

    def replace_heads(self, head: Head) -> None:
        """Draft with other heads of the same kind from now on; methods composed before keep theirs."""
        kind, default = head.config.kind, self._compose_default
        if kind != self.method_name:
            raise OptionError(f"{kind} heads cannot draft for method {self.method_name!r}; load the model with method={kind!r}")
        self._compose_default = partial(default.func, *default.args, **{**default.keywords, "heads": head})
        self._heads[kind] = head
        self.method, self._by_name = self._compose_default(), {}

    def can_compose(self, name: str) -> bool:
        """Whether a method can run on the loaded models with its default options."""
        return opening.can_run(name, self.model_name, self.target, self.drafts)

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
        """Continue every prompt. Results are in the order of the prompts. ``method`` is another method for this call, by name
        (``"suffix"``) or composed. With ``n``, each prompt gets n texts in a row, with the seeds seed, seed + 1 and so on."""
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

    def warm_up(
        self,
        *,
        method: Method | None = None,
        batch_sizes: Sequence[int] | None = None,
        progress: bool = False,
    ) -> None:
        """Compile and capture now what the first requests would wait for, in batches of these sizes: 1 and ``max_batch_size``
        if not given. Only a GPU has anything to prepare."""
        sizes = set(batch_sizes or {1, self.max_batch_size or 8})
        self.rounds.warm_up(method or self.method, sizes, progress=progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        method: Method | str | None = None,
        n: int = 1,
    ) -> Iterator[StreamChunk]:
        """Generate, yielding a chunk per request and round. Text that could still become a stop string is held back."""
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
        return self.generate([self.reading.chat(one) for one in as_conversations(messages)], params, **options)

    def stream_chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[StreamChunk]:
        """Answer as ``chat`` does, yielding a chunk per conversation and round."""
        return self.stream([self.reading.chat(one) for one in as_conversations(messages)], params, **options)

    def grammar(
        self, *, json_schema: Mapping[str, Any] | str | None = None, regex: str | None = None, ebnf: str | None = None
    ) -> Grammar:
        """A grammar for ``SamplingParams(grammar=...)``: exactly one of a JSON schema, a regular expression, an EBNF text."""
        source = grammar_source(json_schema=json_schema, regex=regex, ebnf=ebnf)
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.codec)
        return self._grammars.compile(source)

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

    def _beams(self, prompt: ReadPrompt, options: BeamOptions, forest: ModelForest | None) -> list[BeamOutput]:
        ids = self.reading.text(prompt, "beam search")
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
        """Requests for the engine, ``n`` for each prompt."""
        return requests_of(self.reading, prompts, params, streaming=streaming, n=n)

    def _output(self, state: RequestState, rounds: list[Round]) -> RequestOutput:
        return output_of(self.codec, state, rounds, is_invariant=self.target.traits.is_invariant)

    def _method_of(self, method: Method | str | None) -> Method:
        """The method of a call. A method given by name is composed once, so that it keeps what it learns."""
        if isinstance(method, str) and method not in self._by_name:
            self._by_name[method] = self.compose(method)
        return self._by_name[method] if isinstance(method, str) else method or self.method
