"""Prompts as people write them: a string, a list of token ids, either with images, or a list of these. Anything else is refused
in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": either, "images": [...]}``."""
Message = Mapping[str, Any]

_FORMS = "give a string, a list of token ids, or a list of either"


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images. Its text holds a placeholder for each of them."""

    prompt: str | Sequence[int]
    images: tuple[Any, ...]


ReadPrompt = str | Sequence[int] | ImagePrompt
"""A prompt of a call, checked."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[ReadPrompt]:
    """All prompts of a call, each a string, a list of token ids, or either with images."""
    if isinstance(prompts, str):
        return [prompts]
    if _has_images(prompts):
        return [_with_images(prompts, "the prompt")]
    many = _listed(prompts, "prompts")
    if not many:
        raise RequestError(f"there are no prompts; {_FORMS}")
    if _is_token(many[0]):
        return [_token_ids(many, "the prompt")]
    return [_prompt(one, f"prompt {number}") for number, one in enumerate(many)]


def _prompt(one: Any, name: str) -> ReadPrompt:
    if _has_images(one):
        return _with_images(one, name)
    return one if isinstance(one, str) else _token_ids(one, name)


def _has_images(one: Any) -> bool:
    return isinstance(one, Mapping) and "images" in one


def _with_images(given: Any, name: str) -> ReadPrompt:
    other = sorted(set(map(str, given)) - {"prompt", "images"})
    if other or "prompt" not in given:
        what = f"has {', '.join(other)}, which is not known" if other else "has images and no prompt"
        raise RequestError(f"{name} {what}; give a dict with prompt and images")
    inner, images = given["prompt"], given.get("images", ())
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        raise RequestError(f"images of {name} = {_shown(images)} is not a list; give a list, even for one image")
    prompt = inner if isinstance(inner, str) else _token_ids(inner, name)
    return ImagePrompt(prompt, tuple(images)) if images else prompt


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """All conversations of a call, each a list of messages."""
    forms = 'give [{"role": "user", "content": "..."}], or a list of such lists'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages = {_shown(messages)} is not a conversation; {forms}")
    many: Any = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in many:
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise RequestError(f"messages holds {_shown(conversation)}; {forms}")
        bad = next((one for one in conversation if not isinstance(one, Mapping) or {"role", "content"} - set(one)), None)
        if bad is not None or not conversation:
            raise RequestError(f"messages holds {_shown(bad)}; every message needs a role and a content: {forms}")
    return list(many)


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, Mapping):
        hint = "; a conversation goes to chat()" if {"role", "content", "messages"} & set(value) else ""
        raise RequestError(f"{name} is a dict, {_shown(value)}; {_FORMS}{hint}")
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        hint = "; turn an array or a tensor into a list with .tolist()" if type(value).__name__ in ("Tensor", "ndarray") else ""
        raise RequestError(f"{name} = {_shown(value)} is not valid; {_FORMS}{hint}")
    return list(value)


def _token_ids(value: Any, name: str) -> list[int]:
    ids = _listed(value, name)
    bad = next((token for token in ids if not _is_token(token)), None)
    if bad is not None or any(token is None for token in ids):
        raise RequestError(f"{name} holds {_shown(bad)} where a token id should be; {_FORMS}")
    return ids


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value as error messages quote it: shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
