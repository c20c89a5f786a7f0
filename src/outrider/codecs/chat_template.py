"""Chat templates: the Jinja program that ships with a chat model and writes a conversation in its format.

Templates come with downloaded weights, so they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.core.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The conversation as text, ending where the assistant's answer begins."""
    for message in messages:
        if message.get("role") not in _ROLES or "content" not in message:
            raise RequestError(
                f"message {dict(message)!r} is not valid; give it 'content' and a 'role', one of {', '.join(_ROLES)}"
            )
    if not messages:
        raise RequestError("the conversation is empty; give at least one message")
    try:
        return _compile(template).render(**{"messages": list(messages), "add_generation_prompt": True, **variables})
    except Exception as error:  # a template is a program: what it does with odd messages is not known
        what = f"the model's chat template refused the conversation ({error})"
        raise RequestError(f"{what}; correct the order or the roles of its messages") from None


def open_ended(text: str, last: str) -> str:
    """A rendered conversation up to the end of its ``last`` message, so that the model continues that message."""
    said = last.strip()
    place = text.rfind(said)
    if place < 0:
        raise RequestError("the model's chat template changes the last message, so it cannot be continued; open a new turn")
    end = place + len(said)
    trailing = last[len(last.rstrip()) :]
    return text[: end + len(trailing)] if text.startswith(trailing, end) else text[:end]


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
