"""Options of a ``GenerationConfig`` that are neither logits processors nor stopping criteria: honoured, or refused by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any, final

from outrider.core.errors import OptionError
from outrider.transformers.hf_prompts import PaddedPrompts


@final
@dataclass(frozen=True)
class _Refusal:
    """An option of which only some values are supported."""

    name: str
    allowed: tuple[Any, ...]
    remedy: str


_PLAIN = "leave it out, or call generate without custom_generate"
_STATIC = ("static", "dynamic", "dynamic_full", "hybrid", "sliding_window", "offloaded_static")
_ARGUMENTS = frozenset({"streamer", "assistant_model", "synced_gpus", "custom_generate"})
"""Arguments that identify ``generate`` of transformers."""
_REFUSALS = (
    _Refusal("num_beams", (None, 1), "use outrider.LLM.beam_search, or call generate without custom_generate"),
    _Refusal("num_beam_groups", (None, 1), _PLAIN),
    _Refusal("diversity_penalty", (None, 0.0), _PLAIN),
    _Refusal("penalty_alpha", (None, 0.0), _PLAIN),
    _Refusal("dola_layers", (None,), _PLAIN),
    _Refusal("constraints", (None,), _PLAIN),
    _Refusal("force_words_ids", (None,), _PLAIN),
    _Refusal("guidance_scale", (None, 1, 1.0), _PLAIN),
    _Refusal("prompt_lookup_num_tokens", (None,), "use outrider.transformers.generate(method='prompt-lookup')"),
    _Refusal("assistant_early_exit", (None,), "choose another method, such as 'suffix'"),
    _Refusal("use_mtp", (None, False), "choose another method, such as 'suffix'"),
    _Refusal("speculation_type", (None,), "choose the method with outrider.transformers.generate(method=...)"),
    _Refusal("is_assistant", (None, False), _PLAIN),
    _Refusal("output_attentions", (None, False), _PLAIN),
    _Refusal("output_hidden_states", (None, False), _PLAIN),
    _Refusal("cache_implementation", (None, *_STATIC), "speculative decoding keeps its own cache; leave it out"),
)


@final
@dataclass(frozen=True)
class Answer:
    """The form of the answer that the caller wants."""

    as_dict: bool
    scores: bool
    logits: bool
    pad_id: int | None


def check_options(config: Any) -> None:
    """Refuse the first option that cannot be honoured."""
    for refusal in _REFUSALS:
        value = getattr(config, refusal.name, None)
        if value not in refusal.allowed:
            raise OptionError(f"{refusal.name} = {value!r} is not supported by speculative decoding here; {refusal.remedy}")


def answer_of(config: Any) -> Answer:
    """The form of the answer that a config asks for."""
    as_dict = bool(config.return_dict_in_generate)
    pad = getattr(config, "_pad_token_tensor", None)
    pad_id = None if pad is None else int(pad.reshape(-1)[0])
    return Answer(as_dict, as_dict and bool(config.output_scores), as_dict and bool(config.output_logits), pad_id)


def check_room(prompts: PaddedPrompts, max_tokens: int, max_len: int) -> None:
    """Refuse a length beyond the model's context. The text would end there, but plain ``generate`` would continue."""
    wanted = prompts.longest + max_tokens
    if wanted > max_len:
        left = max_len - prompts.longest
        remedy = f"use max_new_tokens of at most {left}" if left > 0 else "shorten the prompt"
        raise OptionError(
            f"the longest prompt has {prompts.longest} tokens, and {max_tokens} new ones are more than the model's context of "
            f"{max_len} holds; {remedy}"
        )


def name_of(part: Any) -> str:
    """The name of a processor or criterion in error messages: a function's own name, or an object's class."""
    return part.__name__ if isinstance(part, FunctionType) else type(part).__name__


@final
@dataclass(frozen=True, eq=False)
class Caller:
    """Arguments that ``generate`` of transformers 5 does not pass on to a custom loop."""

    streamer: Any = None

    @staticmethod
    def find() -> Caller:
        """Read the arguments from the stack frame of the ``generate`` that calls us. Without them a streamer would wait for
        ever."""
        frame = inspect.currentframe()
        while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_locals.keys() >= _ARGUMENTS):
            frame = frame.f_back
        return Caller() if frame is None else Caller._of(frame.f_locals)

    @staticmethod
    def _of(arguments: dict[str, Any]) -> Caller:
        if arguments.get("assistant_model") is not None:
            raise OptionError(
                "assistant_model is transformers' own speculative decoding; give the model as draft= instead: "
                "outrider.transformers.generate(method='draft-model', draft=model)"
            )
        if arguments.get("synced_gpus"):
            raise OptionError("synced_gpus is not supported: rows end at different passes; call generate without it")
        return Caller(arguments.get("streamer"))
