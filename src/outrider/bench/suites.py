"""Prompts to measure with: built-in suites, any JSONL file, and the formats of Spec-Bench and MT-Bench.

A suite is a list of conversations or plain texts. Files may hold, per line, a string, ``{"prompt": ...}``, ``{"text": ...}``,
``{"question": ...}``, ``{"messages": [...]}`` or ``{"turns": [...], "category": ...}`` (Spec-Bench, MT-Bench); lines with a
category become one suite per category. Of several turns the first ``num_turns`` are asked, each after the reply that plain
decoding gave to the one before, so that every method meets the same context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import OptionError, nearest

if TYPE_CHECKING:
    from outrider.codecs.text import TextCodec

Message = Mapping[str, Any]
_TEXT_KEYS = ("prompt", "text", "question", "instruction", "input")
SPEC_BENCH_TASKS = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""Categories that Spec-Bench counts as one task, multi-turn conversation (they are MT-Bench's)."""
BEGINNINGS = (
    "Once upon a time",
    "One day, a little girl",
    "Tom and his dog",
    "There was a big red",
    "The old man",
    "Lily liked to",
)
"""Beginnings of stories, for loads of many short requests."""


@dataclass(frozen=True)
class Item:
    """One request: a plain text to continue, or the user's turns of a conversation."""

    text: str | None = None
    turns: tuple[str, ...] = ()
    before: tuple[Message, ...] = ()
    """Messages before the first turn (a system message, earlier turns)."""


@dataclass(frozen=True)
class Suite:
    """Prompts that are measured and reported together."""

    name: str
    items: tuple[Item, ...]

    def first(self, count: int | None) -> Suite:
        return self if count is None else Suite(self.name, self.items[:count])


def builtin_names() -> list[str]:
    """Names of the built-in suites."""
    folder = resources.files("outrider.bench") / "prompts"
    return sorted(entry.name.removesuffix(".jsonl") for entry in folder.iterdir() if entry.name.endswith(".jsonl"))


def load_suites(names: Sequence[str]) -> list[Suite]:
    """Suites by name, or from files (anything that ends in .jsonl or has a path in it). "all" is every built-in suite."""
    suites: list[Suite] = []
    for name in names:
        if name == "all":
            suites += [_builtin(each) for each in builtin_names()]
        elif name.endswith((".jsonl", ".json")) or "/" in name:
            suites += read_suites(Path(name))
        else:
            suites.append(_builtin(name))
    return suites


def _builtin(name: str) -> Suite:
    if name not in builtin_names():
        raise OptionError(f"unknown suite {name!r}; {nearest(name, builtin_names())}, or the path of a .jsonl file")
    text = (resources.files("outrider.bench") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    return Suite(name, tuple(_item_of(json.loads(line), name) for line in text.splitlines() if line.strip()))


def read_suites(path: Path) -> list[Suite]:
    """The suites of a JSONL file: one, or one per category."""
    if not path.is_file():
        raise OptionError(f"prompt file {path} does not exist; give a .jsonl file, or one of {', '.join(builtin_names())}")
    groups: dict[str, list[Item]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise OptionError(f"{path}, line {number} is not JSON ({error.msg}); write one JSON value per line") from None
        groups.setdefault(_group_of(row, path.stem), []).append(_item_of(row, f"{path}, line {number}"))
    if not groups:
        raise OptionError(f"{path} holds no prompts; write one JSON value per line")
    return [Suite(name, tuple(items)) for name, items in groups.items()]


def _group_of(row: Any, stem: str) -> str:
    category = row.get("category") if isinstance(row, Mapping) else None
    if category is None:
        return stem
    return f"{stem}/conversation" if category in SPEC_BENCH_TASKS else f"{stem}/{category}"


def _item_of(row: Any, place: str) -> Item:
    if isinstance(row, str):
        return Item(text=row)
    if isinstance(row, Mapping):
        if row.get("turns"):
            return Item(turns=tuple(row["turns"]))
        if row.get("messages"):
            *before, last = row["messages"]
            return Item(turns=(str(last["content"]),), before=tuple(before))
        for key in _TEXT_KEYS:
            if isinstance(row.get(key), str) and row[key]:
                return Item(turns=(row[key],)) if key == "question" else Item(text=row[key])
    keys = ", ".join(_TEXT_KEYS)
    raise OptionError(f"{place} holds no prompt; write a string, or an object with one of {keys}, messages, turns")


Reply = Callable[[list[int]], str]
"""Returns plain decoding's reply to a prompt."""


@dataclass(frozen=True)
class Encoder:
    """Turns items into token ids for one model. Prompts that leave no room are cut at their beginning."""

    codec: TextCodec
    room: int
    """Most tokens of a prompt."""
    num_turns: int = 1

    def encode(self, item: Item, reply: Reply) -> list[list[int]]:
        """The prompts of an item: one, or one per turn."""
        if item.text is not None:
            return [self._cut(self.codec.encode(item.text))]
        prompts: list[list[int]] = []
        messages: list[Message] = list(item.before)
        turns = item.turns[: self.num_turns]
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            prompts.append(self._cut(self._conversation(messages)))
            if number + 1 < len(turns):
                messages.append({"role": "assistant", "content": reply(prompts[-1])})
        return prompts

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        """A conversation in the model's chat format, or as plain paragraphs for a model without one."""
        if self.codec.chat_template is not None:
            return self.codec.encode_chat(messages)
        return self.codec.encode("\n\n".join(str(message["content"]) for message in messages) + "\n\n")

    def _cut(self, ids: list[int]) -> list[int]:
        return ids if len(ids) <= self.room else ids[len(ids) - self.room :]
