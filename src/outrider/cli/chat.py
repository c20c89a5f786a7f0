"""Runs ``outrider chat``: the loop of a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, final

from outrider.api import LLM
from outrider.cli.options import load_llm, sampling_of, with_grammar
from outrider.cli.progress import first_explained
from outrider.cli.terminal import bold, can_colour, coloured, dim, legend
from outrider.cli.verdict import acceptance_of, share_text
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import RequestState
from outrider.core.trace import Round
from outrider.viz.trace_file import with_words

_HELP = "/plain and /fast switch speculation, /temperature X, /system TEXT, /new starts over, /quit or Ctrl+D ends"


def run(arguments: argparse.Namespace) -> int:
    llm = load_llm(arguments)
    params = with_grammar(sampling_of(arguments), llm, arguments)
    chat = Chat(llm, params, trace_file=arguments.save_trace, system=arguments.system)
    print(dim(_HELP), *([legend()] if can_colour() else []), sep="\n", file=sys.stderr)
    while chat.turn(sys.stdin):
        continue
    return 0


@final
class Chat:
    """A conversation with its settings."""

    def __init__(self, llm: LLM, params: SamplingParams, *, trace_file: Path | None = None, system: str | None = None) -> None:
        self.llm, self.params, self.trace_file = llm, params, trace_file
        self.methods = {"/fast": llm.method, "/plain": llm.compose("plain")}
        self.method = llm.method
        self.system = system
        self.messages = self._beginning()
        self.num_turns = 0

    def _beginning(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, source: TextIO) -> bool:
        """Read a line and answer it; False at the end."""
        line = _read_line(source)
        if not line or line.strip() == "/quit":
            return False
        text = line.strip()
        try:
            if text.startswith("/"):
                self._command(*text.split(maxsplit=1))
            elif text:
                self._answer(text)
        except OutriderError as error:
            print(f"outrider: {error}", file=sys.stderr)
        return True

    def _command(self, name: str, value: str = "") -> None:
        if name in self.methods:
            self.method = self.methods[name]
        elif name in ("/new", "/system"):
            self.system = value or None if name == "/system" else self.system
            self.messages = self._beginning()
        elif name == "/temperature":
            try:
                self.params = replace(self.params, temperature=float(value))
            except ValueError:
                print(f"outrider: {value!r} is not a temperature; write a number", file=sys.stderr)
        else:
            print(dim(_HELP), file=sys.stderr)

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        prompt = self._prompt()
        request = self.llm.requests([prompt], self.params, streaming=True)[0]
        pieces, traced, rounds = self.llm.codec.new_stream(request.prompt_ids)(), self.trace_file is not None, list[Round]()
        steps = self.llm.steps([request], method=self.method, traced=traced)
        for step in first_explained(steps, "reading the prompt"):
            tokens = zip(step.new_tokens, step.origins, strict=True)
            print(*(coloured(pieces.push(token), origin) for token, origin in tokens), sep="", end="", flush=True)
            if traced:
                rounds.append(replace(step.trace, request=self.num_turns))
            if step.state.is_finished:
                print()
                self._close(step.state, rounds)

    def _prompt(self) -> Any:
        if self.llm.codec.chat_template is None:  # a base model continues what was said
            return "\n".join(message["content"] for message in self.messages)
        return self.llm.codec.encode_chat(self.messages)

    def _close(self, state: RequestState, rounds: list[Round]) -> None:
        stats = state.stats
        self.messages.append({"role": "assistant", "content": state.text})
        self.num_turns += 1
        print(
            dim(
                f"{stats.num_tokens} tokens, {stats.tokens_per_second:.0f} per second, {stats.tokens_per_pass:.2f} per pass, "
                f"{share_text(acceptance_of([stats]))} of tested guesses accepted"
            ),
            file=sys.stderr,
        )
        if self.trace_file is not None:
            with self.trace_file.open("a", encoding="utf-8") as file:
                for seen in rounds:
                    line = with_words(seen.to_json(), self.llm.codec.token_text)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _read_line(source: TextIO) -> str:
    """Read a line. In a terminal it has GNU readline's editing and history, if Python has readline."""
    if not source.isatty():
        print(bold("> "), end="", flush=True, file=sys.stderr)
        return source.readline()
    with suppress(ImportError):
        import readline  # noqa: F401  # importing it is what makes input() editable
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""
