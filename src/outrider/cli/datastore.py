"""Runs ``outrider datastore build`` and ``outrider datastore info``."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.codecs.load import load_codec
from outrider.codecs.text import TextCodec
from outrider.core.errors import OptionError
from outrider.drafters.copying.datastore import Datastore
from outrider.drafters.copying.datastore_build import build_datastore

_PIECE = 1 << 20
"""Characters tokenized at once. A longer text is split at a line end near this length, to bound memory."""


def run(arguments: argparse.Namespace) -> int:
    return _build(arguments) if arguments.action == "build" else _info(arguments)


def _build(arguments: argparse.Namespace) -> int:
    missing = next((file for file in arguments.files if not file.is_file()), None)
    if missing is not None:
        raise OptionError(f"file {missing} does not exist; check the path")
    name = arguments.model or bundled_path("target")
    codec = load_codec(name)
    total = sum(file.stat().st_size for file in arguments.files)
    in_terminal = sys.stderr.isatty()
    lines = nullcontext() if in_terminal else waiting(f"tokenizing and sorting {total / 1e6:.1f} MB")
    with lines, tqdm(total=total, unit="B", unit_scale=True, desc="tokenize and sort", disable=not in_terminal) as bar:
        store = build_datastore(
            _documents(arguments.files, codec, bar),
            arguments.out,
            vocab_size=codec.vocab_size,
            shard_tokens=arguments.shard_tokens,
            notes={"model": Path(name).name, "vocabulary": fingerprint(codec)},
        )
    print(f"{arguments.out}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, {store.num_bytes / 1e6:.1f} MB")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    store = Datastore(arguments.folder)
    store.verify()
    facts = {
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "shards": store.num_shards,
        "bytes": store.num_bytes,
        "vocab_size": store.vocab_size,
        **store.notes,
    }
    if arguments.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"  {name:<12}{value:,}" if isinstance(value, int) else f"  {name:<12}{value}")
    return 0


def fingerprint(codec: TextCodec) -> str:
    """A digest that is equal for two tokenizers exactly when their ids mean the same."""
    vocabulary = sorted(codec.tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def _documents(files: Sequence[Path], codec: TextCodec, bar: tqdm) -> Iterator[list[int]]:
    for file in files:
        with file.open("rb") as raw:
            seen = 0
            for text in _texts(file, raw):
                ids: list[int] = []
                for piece in _pieces(text):
                    ids += codec.encode(piece, add_special_tokens=False)
                bar.update(raw.tell() - seen)
                seen = raw.tell()
                yield ids


def _texts(file: Path, raw: BinaryIO) -> Iterator[str]:
    """The documents of one file."""
    unpack = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix)
    name = file.with_suffix("").name if unpack else file.name
    stream: BinaryIO = unpack(raw, "rb") if unpack else raw  # type: ignore[assignment]
    try:
        lines = io.TextIOWrapper(stream, encoding="utf-8", errors="replace")
        if name.endswith(".jsonl"):
            yield from (_text_of(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip())
        else:
            yield lines.read()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise OptionError(f"{file} cannot be unpacked: {error}; check the file") from None


def _text_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        raise OptionError(f"{place} is not JSON; write one JSON string, or object with a 'text' field, per line") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise OptionError(f"{place} holds no text; write one JSON string, or object with a 'text' field, per line")
    return text


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = len(text) if len(text) - begin <= _PIECE else text.rfind("\n", begin, begin + _PIECE) + 1
        end = end if end > begin else begin + _PIECE
        yield text[begin:end]
        begin = end
