"""A new user's first ten minutes as a transcript: every command, what it printed and when, and how long it took.

    python scripts/first_minutes.py                       the bundled models, and a copy of one as "your own"
    python scripts/first_minutes.py --model FOLDER        your own

The package is installed into a temporary folder first, and every command runs from there. A silence of more than two seconds
must be explained by the line before it (``outrider/cli/progress.py``). The transcript marks those that are not, and then the
exit code is 1. A Python program has the screen to itself: there a silence is marked and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PATIENCE = 2.0
"""Seconds that need no explanation."""
LATE = 1.0
"""Seconds that a line may come late on a busy machine."""
LIMIT = 600.0
"""Seconds after which a command is ended."""
BRIEF = ("--prompts", "2", "--rounds", "2", "--max-tokens", "16", "--no-curves")
STORY = "Once upon a time, there was a little fox who"
_BUSY = re.compile(r"(\.\.\.|\.\.\. \d+ s|started|packages: .*|Processing .*|%\|.*)\s*$")
"""How a line ends that says what is being waited for: ours, pip's and a progress bar."""

THREE_LINES = """from outrider import LLM, SamplingParams
llm = LLM({model!r})
print(llm.generate("Once upon a time", SamplingParams(max_tokens=16))[0].text)"""


@dataclass(frozen=True)
class Shown:
    """Something that appeared on the screen."""

    seconds: float
    text: str


@dataclass(frozen=True)
class Step:
    """One command and what came of it."""

    command: str
    screen: tuple[Shown, ...]
    code: int
    seconds: float

    @property
    def output(self) -> str:
        return "".join(shown.text for shown in self.screen)

    @property
    def silences(self) -> list[tuple[float, str]]:
        """Waits that nothing on the screen explained: seconds, and the line before."""
        found: list[tuple[float, str]] = []
        since, line = 0.0, ""
        for shown in (*self.screen, Shown(self.seconds, "")):
            if shown.seconds - since > PATIENCE + LATE and not _BUSY.search(line):
                found.append((shown.seconds - since, line.strip()))
            since, line = shown.seconds, shown.text if shown.text.strip() else line
        return found

    def text(self) -> str:
        waits = ", ".join(f"{wait:.0f} s after {line!r}" for wait, line in self.silences)
        mark = f"; waits that nothing explained: {waits}" if waits else ""
        body = self.output.replace("\r", "\n").strip("\n")
        return f"$ {self.command}\n{body}\n[exit code {self.code}, {self.seconds:.1f} s{mark}]\n"


def commands(model: str | None) -> list[tuple[tuple[str, ...], str]]:
    """What a new user types after ``outrider``, and what is typed into the program."""
    own = ("--model", model) if model else ()
    return [
        (("--version",), ""),
        (("--help",), ""),
        (("demo", "--max-tokens", "40"), ""),
        (("generate", STORY, "--max-tokens", "40", "--show", "--compare", *own), ""),
        (("generate", STORY, "--max-tokns", "40"), ""),
        (("methods", "prompt-lookup"), ""),
        (("info", *((model,) if model else ())), ""),
        (("chat", "--max-tokens", "24", "--system", "You are a poet.", *own), "Tell me a story about a dog.\n/quit\n"),
        (("bench", "--seconds", "10", "--methods", "prompt-lookup", "--suites", "stories", *BRIEF, *own), ""),
        (("serve", "--help"), ""),
    ]


def take(
    shown_as: str,
    words: Sequence[str],
    typed: str = "",
    *,
    folder: Path | None = None,
    on_text: Callable[[str, subprocess.Popen[str]], str] = lambda *_: "",
) -> Step:
    """Run a command as a user would. ``folder`` holds the installed package. ``on_text`` hears what the command says; what it
    answers is put on the screen too."""
    began = time.perf_counter()
    env = {**os.environ, "OUTRIDER_QUIET": "0", "PYTHONUNBUFFERED": "1"}
    if folder is not None:
        env["PYTHONPATH"] = str(folder)
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, cwd=folder)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    texts: queue.Queue[str | None] = queue.Queue()
    for stream in (process.stdout, process.stderr):
        threading.Thread(target=_read, args=(stream, texts), daemon=True).start()
    ender = threading.Timer(LIMIT, process.kill)
    ender.start()
    process.stdin.write(typed)
    process.stdin.close()
    screen: list[Shown] = []
    num_open = 2
    while num_open:
        text = texts.get()
        if text is None:
            num_open -= 1
            continue
        for part in filter(None, (text, on_text(text, process))):
            screen.append(Shown(time.perf_counter() - began, part))
    code = process.wait()
    ender.cancel()
    return Step(shown_as, tuple(screen), code, time.perf_counter() - began)


def _read(stream: IO[str], texts: queue.Queue[str | None]) -> None:
    """Puts what a stream says in pieces as they come: whole lines, or what a terminal would overwrite."""
    piece = ""
    while letter := stream.read(1):
        piece += letter
        if letter in "\n\r" or piece.endswith("..."):
            texts.put(piece)
            piece = ""
    texts.put(piece)
    texts.put(None)


def install(folder: Path) -> Step:
    """``pip install .`` of a copy of the checkout, without the packages it needs, which are here."""
    copy = folder / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    words = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "installed"), str(copy)]
    return take("pip install .", words)


def outrider(folder: Path, words: Sequence[str], typed: str = "") -> Step:
    shown = " ".join(f'"{word}"' if " " in word else word for word in words)
    return take(f"outrider {shown}", [sys.executable, "-m", "outrider", *words], typed, folder=folder)


def three_lines(folder: Path, model: str) -> Step:
    """The README's program."""
    code = THREE_LINES.format(model=model)
    return take(f"python -c '{code}'", [sys.executable, "-c", code], folder=folder)


def serve(folder: Path, model: str) -> Step:
    """A server that answers one request and is then asked to leave."""

    def ask(text: str, process: subprocess.Popen[str]) -> str:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/", text)
        if found is None:
            return ""
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{found[1]}/v1/completions", data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=LIMIT) as answer:
            said = json.load(answer)["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        return f"(POST /v1/completions: {said!r}; then SIGTERM)\n"

    words = ("serve", "--model", model, "--port", "0", "--log-level", "error")
    return take(f"outrider {' '.join(words)}", [sys.executable, "-m", "outrider", *words], folder=folder, on_text=ask)


def transcript(folder: Path, model: str | None) -> Iterator[Step]:
    """All steps, one after the other; ``folder`` takes the installed package."""
    yield install(folder)
    home = folder / "installed"
    own = model or str(folder / "own-model")
    if model is None:
        shutil.copytree(home / "outrider" / "bundled" / "draft", own)
    for words, typed in commands(None):
        yield outrider(home, words, typed)
    for words, typed in commands(own):
        if own in words:
            yield outrider(home, words, typed)
    yield three_lines(home, own)
    yield serve(home, own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of your own")
    model = parser.parse_args().model
    steps: list[Step] = []
    with tempfile.TemporaryDirectory() as folder:
        for step in transcript(Path(folder), model):
            steps.append(step)
            print(step.text().replace(folder, "~"), flush=True)
    num_silent = sum(len(step.silences) for step in steps if step.command.startswith("outrider "))
    print(f"{len(steps)} commands, {sum(step.seconds for step in steps):.0f} s, {num_silent} unexplained waits")
    return 1 if num_silent else 0


if __name__ == "__main__":
    sys.exit(main())
