"""``outrider analyse MODEL``: how much its hidden states know about tokens beyond the next, before anybody trains heads.

outrider analyse                              the bundled target
outrider analyse MODEL --offsets 4 --texts 200
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("analyse", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub name or .gguf file (default: the bundled target)")
    parser.add_argument("--offsets", type=int, default=3, help="tokens beyond the next that are probed")
    parser.add_argument("--texts", type=int, default=200, help="texts that the target writes for the probes")
    parser.add_argument("--max-tokens", "-n", type=int, default=96, help="tokens of a text")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    parser.add_argument("--suites", default="stories,chat", help="prompts, by the names of `outrider bench` or as files")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a probe")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write figures, and how they were made, as JSON")
