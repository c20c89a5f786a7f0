"""The decoding loop for ``generate`` of transformers: ``custom_generate=outrider.transformers.generate(...)``.

transformers has prepared everything when it calls us: ids, masks, the list of logits processors, the stopping criteria. A call
becomes one request per row, all rows share the passes of Outrider's engine, and the answer has the form that transformers
gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, final

import torch

from outrider.core.choice import Choice
from outrider.core.errors import ModelError, OptionError, check_one_of
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, Stats
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import METHODS, TABLES, compose, rows_of
from outrider.models.load import load_model
from outrider.transformers.answers import Columns, Scorebook, check_padding, finished
from outrider.transformers.hf_held import Held
from outrider.transformers.hf_noise import TorchNoise
from outrider.transformers.hf_options import Answer, Caller, answer_of, check_options, check_room
from outrider.transformers.hf_processors import Processing, processing_of, try_processors
from outrider.transformers.hf_prompts import PaddedPrompts
from outrider.transformers.hf_stops import Stopping, stopping_of, try_criteria

Draft = Any
"""A transformers model in memory, or the name of a model: a folder, a hub name or a GGUF file."""
_NOISES = ("torch", "own")
_NAMES = ("method", "draft", "acceptance", "policy", "noise")


def generate(
    method: str = "suffix",
    *,
    draft: Draft | Sequence[Draft] | None = None,
    acceptance: str | None = None,
    policy: str | None = None,
    noise: str | None = None,
    **options: Any,
) -> DropIn:
    """A decoding loop for ``model.generate(..., custom_generate=...)``. ``method`` is a row of ``outrider methods``. ``draft``
    is a model in memory, a folder, a hub name, or a list of them. ``noise`` says where the random numbers of sampled text come
    from: "torch" writes the text of plain ``generate`` with the same seed, "own" another text of the same law. None means
    "torch", and "own" for a lossy rule. ``options`` are the method's own (``num_draft_tokens`` ...). Names and options are
    checked here, before any model is touched."""
    drafts = tuple(draft) if isinstance(draft, list | tuple) else () if draft is None else (draft,)
    default = "fixed" if {"num_draft_tokens", "num_tree_nodes"} & set(options) else METHODS[method].policy
    return DropIn(Choice(method, acceptance, policy or default, options), drafts, noise)


@final
class DropIn:
    """A speculative method for ``generate`` of transformers. One object serves any number of models and calls."""

    def __init__(self, choice: Choice, drafts: tuple[Draft, ...] = (), noise: str | None = None) -> None:
        _check(choice, len(drafts))
        self.choice, self.drafts, self.noise = choice, drafts, _noise_for(choice, noise)
        self._loaded: dict[tuple[str, str, str], Target] = {}
        self.stats: list[Stats] = []
        """The cost of each row of the last call: passes, guesses, accepted guesses, seconds."""

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Continue a prepared batch. ``generate`` of transformers calls this."""
        check_options(generation_config)
        do_sample = bool(generation_config.do_sample)
        noise = TorchNoise(len(input_ids), input_ids.device) if do_sample and self.noise == "torch" else None
        streamer = Caller.find().streamer if streamer is None else streamer
        held = Held.of(model)
        target = held.target(model)
        held.warn_of_rounding(model)
        prompts, wanted = PaddedPrompts.of(input_ids, model_kwargs), answer_of(generation_config)
        stopping = stopping_of(stopping_criteria, prompts)
        processing = processing_of(logits_processor, prompts, do_sample=do_sample, noise=noise)
        _check_call(prompts, processing, stopping, wanted, target)
        columns = Columns(prompts, wanted, streamer)
        book = Scorebook(prompts, wanted, logits_processor, target.vocab_size)
        requests = requests_of(prompts, processing, stopping)
        self.stats = [Stats() for _ in requests]
        for step in run(
            Engine(target, self._method(held, target, model.name_or_path)), requests, max_batch_size=prompts.num_rows
        ):
            columns.add(step)
            book.add(step)
            self.stats[step.request] = step.state.stats
        sequences = columns.end()
        if noise is not None:
            noise.settle(sequences.shape[1] - prompts.padded_len)
        return finished(sequences, book, wanted)

    def __deepcopy__(self, memo: dict[int, Any]) -> DropIn:
        """A copied model shares the loop: draft models are not copied with it."""
        del memo
        return self

    def _method(self, held: Held, target: Target, name: str) -> Method:
        """The method on this model. A method whose options can name it is kept for later calls."""
        choice, drafts = self.choice, tuple(self._draft(one, target) for one in self.drafts)
        key = (choice.name, choice.acceptance, choice.policy, tuple(sorted(choice.options.items())), drafts)
        try:
            hash(key)
        except TypeError:  # an option is a list
            return _compose(choice, target, drafts, name)
        return held.method(key, lambda: _compose(choice, target, drafts, name))

    def _draft(self, draft: Draft, target: Target) -> Target:
        if not isinstance(draft, str | PathLike):
            return Held.of(draft).target(draft)
        name, dtype, device = fspath(draft), str(target.dtype).removeprefix("torch."), str(target.device)
        if (name, dtype, device) not in self._loaded:
            self._loaded[name, dtype, device] = load_model(name, dtype=dtype, device=device)
        return self._loaded[name, dtype, device]


def _check(choice: Choice, num_drafts: int) -> None:
    """Find mistakes in names and options before any model is touched."""
    choice.check(TABLES, num_drafts=num_drafts, translates=False, also=_NAMES)
    for name in {name for row in rows_of(choice.name, choice.options).values() for name in row.texts} & set(choice.options):
        value = choice.options[name]
        if isinstance(value, str) or any(isinstance(text, str) for text in value):
            raise OptionError(f"{name} holds text, and there is no tokenizer here; give lists of token ids")


def _noise_for(choice: Choice, noise: str | None) -> str:
    """The source of random numbers. A lossy rule keeps guesses that are not the drawn token, so it needs the law."""
    is_lossless = choice.rule(TABLES).rule.lossless
    if noise is None:
        return "torch" if is_lossless else "own"
    check_one_of("noise", noise, _NOISES)
    if noise == "torch" and not is_lossless:
        name = choice.acceptance or METHODS[choice.name].acceptance
        raise OptionError(f"noise = 'torch' promises the text of plain generate, and rule {name!r} is lossy; use noise='own'")
    return noise


def _check_call(prompts: PaddedPrompts, processing: Processing, stopping: Stopping, wanted: Answer, target: Target) -> None:
    """Refuse arguments that cannot be honoured, before the first pass."""
    check_padding(prompts, wanted, may_end_early=bool(stopping.end_ids or stopping.criteria))
    check_room(prompts, stopping.max_tokens, target.max_len)
    try_processors(processing.processors, prompts, target.vocab_size)
    try_criteria(stopping.criteria, prompts)


def _compose(choice: Choice, target: Target, drafts: Sequence[Target], name: str) -> Method:
    for draft in drafts:
        _check_vocabulary(draft, target)
    options = _with_target_folder(choice, name)
    rule, policy = choice.acceptance, choice.policy
    return compose(choice.name, target, draft=drafts or None, acceptance=rule, policy=policy, options=options)


def _with_target_folder(choice: Choice, name: str) -> dict[str, Any]:
    """The options. Trained heads also get the model's checkpoint, from which they read the embedding and the output matrix."""
    has_heads = any("heads" in row.needs for row in rows_of(choice.name, choice.options).values())
    return {"target_folder": name, **choice.options} if has_heads else dict(choice.options)


def _check_vocabulary(draft: Target, target: Target) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"the draft model has another vocabulary ({draft.vocab_size} tokens) than the target ({target.vocab_size}); use a "
            "draft of the same family, or method 'suffix', which needs none"
        )


def requests_of(prompts: PaddedPrompts, processing: Processing, stopping: Stopping) -> list[Request]:
    """One request per row. The seeds of sampled text come from torch's generator, so ``torch.manual_seed`` fixes it."""
    is_greedy = processing.params["temperature"] == 0
    seeds = [0] * prompts.num_rows if is_greedy else torch.randint(1 << 62, (prompts.num_rows,)).tolist()
    return [
        Request(
            ids,
            SamplingParams(
                max_tokens=stopping.max_tokens,
                seed=seeds[row],
                stop=stopping.strings,
                logits_processors=processing.row(prompts, row),
                **processing.params,
            ),
            stopping.end_ids,
            stopping.new_stream(prompts, row),
        )
        for row, ids in enumerate(prompts.rows)
    ]
