"""Where prompts come from: families written here, JSONL in every accepted form, turns asked after plain replies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.suites import Encoder, Item, builtin_names, load_suites, read_suites
from outrider.bundled import bundled_path
from outrider.codecs.load import load_codec
from outrider.core.errors import OptionError


@pytest.fixture(scope="module")
def codec():
    return load_codec(bundled_path("target"))


def test_the_families_that_were_promised_are_there(codec) -> None:
    promised = {"chat", "code", "summary", "extraction", "translation", "reasoning", "stories", "long-context", "editing"}
    promised |= {"agent", "reasoning-long"}
    assert set(builtin_names()) == promised
    for suite in load_suites(["all"]):
        prompts = [prompt for item in suite.items for prompt in Encoder(codec, 1900).encode(item, lambda _: "")]
        assert len(prompts) >= 4 and len(set(map(tuple, prompts))) == len(prompts)
        sizes = [len(prompt) for prompt in prompts]
        longest = 1000 if suite.name == "agent" else 400
        assert min(sizes) > 900 if suite.name == "long-context" else max(sizes) < longest


def test_every_accepted_form_of_a_line(tmp_path: Path) -> None:
    rows = [
        "a string",
        {"prompt": "a prompt"},
        {"text": "a text"},
        {"question": "why?", "answer": "because"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (suite,) = read_suites(path)
    assert suite.name == "mine" and [item.text or item.turns[0] for item in suite.items] == [
        "a string", "a prompt", "a text", "why?", "hello",
    ]  # fmt: skip
    assert suite.items[4].before[0]["role"] == "system" and len(suite.first(2).items) == 2


def test_benchmark_files_are_grouped_by_task(tmp_path: Path) -> None:
    rows = [{"question_id": 1, "category": category, "turns": ["a", "b"]} for category in ("writing", "math", "rag", "qa")]
    path = tmp_path / "spec.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert [(suite.name, len(suite.items)) for suite in read_suites(path)] == [
        ("spec/conversation", 2), ("spec/rag", 1), ("spec/qa", 1),
    ]  # fmt: skip


def test_later_turns_follow_the_plain_reply(codec) -> None:
    encoder = Encoder(codec, 500, num_turns=2)
    first, second = encoder.encode(Item(turns=("One?", "Two?", "Three?")), lambda _: "REPLY")
    assert second[: len(first)] == first
    assert "REPLY" in codec.decode(second, skip_special_tokens=False) and "Three" not in codec.decode(second)


def test_a_prompt_that_does_not_fit_loses_its_beginning(codec) -> None:
    whole = Encoder(codec, 500).encode(Item(text="one two three four five six seven"), lambda _: "")[0]
    assert Encoder(codec, 3).encode(Item(text="one two three four five six seven"), lambda _: "") == [whole[-3:]]


@pytest.mark.parametrize(
    ("content", "word"), [("{", "line 1 is not JSON"), ('{"answer": "x"}', "holds no prompt"), ("", "holds no prompts")]
)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(OptionError, match=word):
        read_suites(path)


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(OptionError, match="did you mean 'stories'"):
        load_suites(["storie"])
    with pytest.raises(OptionError, match="does not exist"):
        load_suites(["nowhere/prompts.jsonl"])
