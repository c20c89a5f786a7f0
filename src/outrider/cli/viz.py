"""Runs ``outrider viz``."""

from __future__ import annotations

import argparse

from outrider.codecs.load import load_codec
from outrider.core.errors import OptionError
from outrider.viz.page import replay_page
from outrider.viz.trace_file import read_trace


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
