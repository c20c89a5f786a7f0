"""``outrider viz``: a recorded trace as one HTML file that replays it, round by round."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.codecs.load import load_codec
from outrider.core.errors import OptionError
from outrider.viz.page import replay_page
from outrider.viz.trace_file import read_trace


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("viz", description=__doc__)
    parser.add_argument("trace", type=Path, help="rounds, one per line: saved by the server's page or `chat --save-trace`")
    parser.add_argument("--output", "-o", type=Path, help="the page to write (default: beside the trace)")
    parser.add_argument("--request", type=int, help="which request of the trace (default: the first)")
    parser.add_argument("--model", help="a model whose tokenizer turns ids into words, where the trace has none")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    words_of = load_codec(arguments.model).token_text if arguments.model else None
    page = replay_page(read_trace(arguments.trace, request=arguments.request, words_of=words_of))
    output = arguments.output or arguments.trace.with_suffix(".html")
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{output} cannot be written ({error.strerror}); choose another --output") from None
    print(f"{output}: open it in a browser")
    return 0
