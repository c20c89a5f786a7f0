"""Prompts of the text that the bundled draft knows, and of three applications that it does not know.

    stories  beginnings of stories that neither model was trained on
    manual   passages of the pages in docs/: the bundled target has read no such text either, and answers with nonsense
    code     passages of this package's Python source
    sums     arithmetic questions in the chat format, with names, things and numbers drawn

Nothing but the repository is read. A seed gives the same prompts everywhere, as many different ones as are wanted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider import LLM

Prompts = Callable[[LLM, int, random.Random, int], list[list[int]]]
ROOT = Path(__file__).parents[1]
HOME = "stories"
"""What the draft knows."""
_NAMES = "Tom Lily Ben Mia Sam Anna Max Lucy Tim Sara Jack Leo Nora Ella Oscar Finn Rosa Hugo Ida Paul".split()
_THINGS = "apple book kite car doll boat drum cake hat lamp cup box bag toy shoe pen coin card stone flower".split()
_QUESTIONS = (
    "{name} has {a} {thing}s. {other} gives {name} {b} more. How many {thing}s does {name} have now?",
    "{name} buys {a} {thing}s for {b} dollars each. How much does {name} pay?",
    "There are {c} {thing}s in a box. {name} takes {a} of them and {other} takes {b}. How many {thing}s are left?",
    "{name} has {a} boxes with {b} {thing}s each. {name} sells {d} {thing}s. How many {thing}s are left?",
    "{name} makes {a} {thing}s a day. How many {thing}s does {name} make in {b} weeks?",
    "{name} is {a} years older than {other}. {other} is {b} years old. How old is {name}?",
    "A {thing} costs {a} dollars. {name} has {c} dollars and buys {b} {thing}s. How much money does {name} have left?",
    "{name} and {other} share {c} {thing}s. {name} gets {a} more than {other}. How many {thing}s does {other} get?",
)


def shifted(text: str, llm: LLM, count: int, seed: int, length: int = 32) -> list[list[int]]:
    """Different prompts of an application, as tokens; passages have ``length`` of them."""
    return _TEXTS[text](llm, count, random.Random(seed), length)


def _stories(llm: LLM, count: int, rng: random.Random, length: int) -> list[list[int]]:
    """Beginnings of ``length`` to twice as many tokens."""
    lines = (ROOT / "benchmarks/held_out_stories.jsonl").read_text().splitlines()
    stories = [llm.codec.encode(json.loads(line)["text"]) for line in lines]
    return [rng.choice(stories)[: rng.randint(length, 2 * length)] for _ in range(count)]


def _passages(files: Sequence[Path]) -> Prompts:
    def drawn(llm: LLM, count: int, rng: random.Random, length: int) -> list[list[int]]:
        texts = [text for file in files if len(text := llm.codec.encode(file.read_text())) > 2 * length]
        found = list[list[int]]()
        while len(found) < count:
            text = rng.choice(texts)
            begin = rng.randrange(len(text) - length)
            found.append(text[begin : begin + length])
        return found

    return drawn


def _sums(llm: LLM, count: int, rng: random.Random, length: int) -> list[list[int]]:
    del length
    questions = list[str]()
    for _ in range(count):
        name, other = rng.sample(_NAMES, 2)
        a, b = rng.randrange(2, 10), rng.randrange(2, 10)
        numbers = {"a": a, "b": b, "c": a * b + rng.randrange(10, 40), "d": rng.randrange(1, a * b)}
        questions.append(rng.choice(_QUESTIONS).format(name=name, other=other, thing=rng.choice(_THINGS), **numbers))
    said = [llm.codec.chat_text([{"role": "user", "content": question}]) for question in questions]
    return [llm.codec.encode(text, add_special_tokens=False) for text in said]


_TEXTS: dict[str, Prompts] = {
    HOME: _stories,
    "manual": _passages(sorted((ROOT / "docs").glob("*.md"))),
    "code": _passages(sorted((ROOT / "src").rglob("*.py"))),
    "sums": _sums,
}
TEXTS = tuple(name for name in _TEXTS if name != HOME)
"""The applications."""
