"""A new user's first ten minutes as a transcript: every command, what it printed, and how long it took.

    python scripts/first_minutes.py                       the bundled models
    python scripts/first_minutes.py --model FOLDER        and your own

Waits above two seconds are explained on the screen (``outrider/cli/progress.py``); the transcript marks those that were not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 2.0
"""Seconds that need no explanation."""
BRIEF = ("--prompts", "2", "--rounds", "2", "--max-tokens", "16", "--no-curves")
STORY = "Once upon a time, there was a little fox who"


@dataclass(frozen=True)
class Step:
    """One command and what came of it."""

    command: tuple[str, ...]
    output: str
    screen: str
    """Standard error: progress and statistics."""
    code: int
    seconds: float

    @property
    def is_explained(self) -> bool:
        """Either there was nothing to wait for, or something was on the screen meanwhile."""
        return self.seconds <= PATIENCE or bool(self.screen.strip() or self.output.strip())

    def text(self) -> str:
        shown = " ".join(f'"{word}"' if " " in word else word for word in self.command)
        mark = "" if self.is_explained else "   (a wait that nothing explained)"
        body = "\n".join(part.rstrip() for part in (self.output, self.screen) if part.strip())
        return f"$ outrider {shown}\n{body}\n[exit code {self.code}, {self.seconds:.1f} s{mark}]\n"


def commands(model: str | None) -> list[tuple[tuple[str, ...], str]]:
    """What a new user types, and what is typed into the program."""
    own = ("--model", model) if model else ()
    return [
        (("--version",), ""),
        (("--help",), ""),
        (("generate", STORY, "--max-tokens", "40", "--show", "--compare", *own), ""),
        (("generate", STORY, "--max-tokns", "40"), ""),
        (("methods", "prompt-lookup"), ""),
        (("info", *((model,) if model else ())), ""),
        (("chat", "--max-tokens", "24", "--system", "You are a poet.", *own), "Tell me a story about a dog.\n/quit\n"),
        (("bench", "--seconds", "10", "--methods", "prompt-lookup", "--suites", "stories", *BRIEF, *own), ""),
        (("serve", "--help"), ""),
    ]


def take(command: Sequence[str], typed: str) -> Step:
    """Run one command as a user would."""
    began = time.perf_counter()
    words = [sys.executable, "-m", "outrider", *command]
    done = subprocess.run(words, input=typed, capture_output=True, text=True, check=False)
    return Step(tuple(command), done.stdout, done.stderr, done.returncode, time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of your own")
    steps: list[Step] = []
    for command, typed in commands(parser.parse_args().model):
        steps.append(take(command, typed))
        print(steps[-1].text(), flush=True)
    unexplained = [step for step in steps if not step.is_explained]
    print(f"{len(steps)} commands, {sum(step.seconds for step in steps):.0f} s, {len(unexplained)} unexplained waits")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
