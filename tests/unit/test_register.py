"""Methods from outside, methods by name per call, several texts per prompt, awaited calls and streamed chats."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from fresh import run_fresh
from test_guesses import Nonsense

import outrider
from outrider import LLM, METHODS, AsyncLLM, CompositionError, MethodRow, OptionError, RequestError, SamplingParams, register
from outrider.cli.main import main

ROW = MethodRow(
    summary="always the same guess",
    paper="-",
    drafter=Nonsense,
    build=lambda parts: Nonsense([5, 6], [0, 0]),
    policy="fixed",
)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_items", dict(METHODS._items))
    register("same-guess", ROW)


@pytest.mark.usefixtures("registered")
def test_a_registered_method_is_known_everywhere(llm: LLM, capsys, tmp_path: Path) -> None:
    plain = llm.generate("Once upon a time", SAMPLED, method="plain")[0].token_ids
    assert llm.generate("Once upon a time", SAMPLED, method=llm.compose("same-guess"))[0].token_ids == plain
    assert main(["methods", "same-guess"]) == 0 and "always the same guess" in capsys.readouterr().out
    assert main(["generate", "Once", "-n", "4", "--method", "same-guess", "-O", "num_draft_tokens=2"]) == 0
    bench = ["bench", "--methods", "same-guess", "--suites", "stories", "--prompts", "1", "-n", "4", "--rounds", "1"]
    assert main([*bench, "--no-curves", "--quiet", "--json", str(tmp_path / "b.json")]) == 0
    assert "same-guess" in json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]


@pytest.mark.usefixtures("registered")
def test_what_cannot_be_registered() -> None:
    for name, row, words in (
        ("same-guess", ROW, "already"),
        ("Same Guess", ROW, "small letters"),
        ("other", "row", "give a MethodRow"),
        ("other", MethodRow("x", "-", Nonsense, ROW.build, acceptance="blok"), "did you mean 'block'"),
        ("other", MethodRow("x", "-", Nonsense, ROW.build, policy="fxed"), "did you mean 'fixed'"),
    ):
        with pytest.raises(OptionError, match=words):
            register(name, row)  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="Nonsense"):
        register("other", MethodRow("x", "-", Nonsense, ROW.build, acceptance="block"))


def test_packages_bring_methods_by_entry_points(tmp_path: Path) -> None:
    """A package on the path that declares a row is found; one that fails to load is named and left out."""
    (tmp_path / "my_drafting.py").write_text(
        "from dataclasses import replace\n"
        "from outrider.methods import METHODS\n"
        "ROW = replace(METHODS['plain'], summary='brought along')\n"
    )
    info = tmp_path / "my_drafting-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-drafting\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[outrider.methods]\nbrought = my_drafting:ROW\nbroken = no_such_module:ROW\n")
    source = Path(outrider.__file__).parents[1]
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(source)!r}]\nfrom outrider import METHODS\n"
    code += "print(METHODS['brought'].summary, 'broken' in METHODS)"
    done = run_fresh(code)
    assert done.stdout.strip() == "brought along False"
    assert "broken = no_such_module:ROW was left out (ModuleNotFoundError" in done.stderr


def test_methods_by_name_and_kept(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", SAMPLED)[0].token_ids
    for name in ("plain", "suffix", "draft-tree"):
        assert llm.generate("Once upon a time", SAMPLED, method=name)[0].token_ids == expected
        assert [chunk.output for chunk in llm.stream("Once upon a time", SAMPLED, method=name)][-1].token_ids == expected
    assert llm._method_of("suffix") is llm._method_of("suffix")
    with pytest.raises(OptionError, match="did you mean 'suffix'"):
        llm.generate("hi", method="sufix")


def test_several_texts_of_a_prompt(llm: LLM) -> None:
    outputs = llm.generate(["Once upon a time", "One day"], SAMPLED, n=3)
    assert [output.seed for output in outputs] == [4, 5, 6] * 2
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    alone = llm.generate("One day", SamplingParams(max_tokens=16, temperature=0.9, seed=6, ignore_eos=True))[0]
    assert outputs[5].token_ids == alone.token_ids
    unseeded = llm.generate("Once", SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True), n=2)
    assert unseeded[0].seed != unseeded[1].seed
    for bad in (0, -1, 1.5, None):
        with pytest.raises(RequestError, match="n = "):
            llm.generate("hi", n=bad)  # type: ignore[arg-type]


def test_awaited_calls_leave_the_loop_free(llm: LLM) -> None:
    async def both() -> tuple[list, list, int]:
        ticks, awaited = 0, AsyncLLM(llm=llm)

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        clock = asyncio.create_task(tick())
        outputs = await asyncio.gather(*(awaited.generate(p, SAMPLED) for p in ("Once upon a time", "One day")))
        chunks = [chunk async for chunk in awaited.stream("One day", SAMPLED)]
        chat = await awaited.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
        async for _ in awaited.stream_chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=8)):
            break
        clock.cancel()
        assert len(chat[0].token_ids) <= 4
        return [many[0] for many in outputs], chunks, ticks

    outputs, chunks, ticks = asyncio.run(both())
    assert outputs[0].token_ids == llm.generate("Once upon a time", SAMPLED)[0].token_ids
    assert "".join(chunk.text for chunk in chunks) == outputs[1].text and ticks > 2


def test_a_chat_streams_what_it_says(llm: LLM) -> None:
    messages, params = [{"role": "user", "content": "Tell me a story."}], SamplingParams(max_tokens=20)
    text = "".join(chunk.text for chunk in llm.stream_chat(messages, params))
    assert text == llm.chat(messages, params)[0].text


def test_chat_takes_a_system_message(capsys, monkeypatch) -> None:
    from outrider.cli import chat

    seen: list[list[dict[str, str]]] = []
    prompt = chat.Chat._prompt

    def watch(self: chat.Chat) -> object:
        seen.append([dict(message) for message in self.messages])
        return prompt(self)

    monkeypatch.setattr(chat.Chat, "_prompt", watch)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/new\nHello\n/system Speak softly.\nHello\n"))
    assert main(["chat", "-n", "3", "--system", "You are a poet.", "--dtype", "float32"]) == 0
    assert [messages[0]["content"] for messages in seen] == ["You are a poet.", "You are a poet.", "Speak softly."]
    assert all(len(messages) == 2 and messages[0]["role"] == "system" for messages in seen)


def test_a_line_of_a_terminal_can_be_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    """``input`` edits lines once GNU readline is imported; what is no terminal is read as it is."""
    from outrider.cli import chat

    monkeypatch.setattr("builtins.input", lambda prompt: f"typed after {prompt!r}")
    terminal = io.StringIO("not read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert chat._read_line(terminal) == "typed after '> '\n"
    assert "readline" in sys.modules or importlib.util.find_spec("readline") is None
    assert chat._read_line(io.StringIO("piped\n")) == "piped\n"


def test_max_len_shortens_the_context() -> None:
    llm = LLM(method="plain", dtype="float32", max_len=24)
    assert llm.target.max_len == 24
    output = llm.generate([5] * 20, SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert len(output.token_ids) == 4 and output.finish_reason == "length"
