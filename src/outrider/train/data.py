"""Texts to train on: token files, plain text, JSON lines with texts, conversations, tokens or images; and the order they are
read in.

The batch of a step is a function of the seed and the step alone, so a killed run continues exactly where it was. Held-out
documents are chosen by a hash of their tokens: the same ones whatever else is in the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np

from outrider.codecs.text import TextCodec
from outrider.core.errors import OptionError
from outrider.vision.prompts import EmbeddedPrompt, Vision


@dataclass(frozen=True)
class Document:
    """Tokens, and the first one that is learned: a prompt is read but not learned."""

    tokens: tuple[int, ...]
    begin: int = 0
    counted: tuple[int, ...] | None = None
    """Positions to learn; None for all from ``begin`` on."""
    seen: Callable[[], EmbeddedPrompt] | None = None
    """Reads the images of its prompt; None for text."""

    @staticmethod
    def with_images(vision: Vision, prompt: Sequence[int], images: Sequence[Any], answer: Sequence[int]) -> Document:
        """A prompt with a placeholder for each image, and the answer to learn."""
        seen = partial(vision.prompt, list(prompt), list(images))
        ids = seen().ids
        return Document((*ids, *answer), len(ids), seen=seen)


@final
class Corpus:
    """Documents for training, and held-out documents for evaluation."""

    def __init__(self, train: Sequence[Document], held_out: Sequence[Document]) -> None:
        self.train, self.held_out = train, held_out
        self._orders: dict[tuple[int, int], Any] = {}

    @staticmethod
    def of(documents: Sequence[Document], *, held_out: int) -> Corpus:
        """Hold out ``held_out`` documents."""
        order = sorted(range(len(documents)), key=lambda i: digest_of(documents[i]))
        apart = set(order[:held_out])
        train = [document for i, document in enumerate(documents) if i not in apart]
        if not train or not apart:
            raise OptionError(
                f"{len(documents)} documents cannot give {held_out} to evaluate with and any to train on; give more data, or a "
                "smaller held_out"
            )
        return Corpus(train, [documents[i] for i in order[:held_out]])

    def batch(self, step: int, size: int, seed: int) -> list[Document]:
        """The documents of a step. Every epoch has a new order."""
        count = len(self.train)
        found: list[Document] = []
        for place in range(step * size, (step + 1) * size):
            epoch, index = divmod(place, count)
            found.append(self.train[self._order(epoch, seed)[index]])
        return found

    def _order(self, epoch: int, seed: int) -> Any:
        key = (epoch, seed)
        if key not in self._orders:
            self._orders.clear()
            self._orders[key] = np.random.default_rng([seed, epoch]).permutation(len(self.train))
        return self._orders[key]


def digest_of(document: Document) -> bytes:
    """A digest of a document's tokens."""
    return hashlib.blake2b(np.asarray(document.tokens, dtype=np.int64).tobytes(), digest_size=8).digest()


def read_documents(
    files: Sequence[Path], codec: TextCodec | None, *, max_len: int, min_len: int = 8, vision: Vision | None = None
) -> list[Document]:
    """All documents of the files, split into pieces of at most ``max_len`` tokens. ``vision`` reads documents with
    images, which are truncated instead."""
    found: list[Document] = []
    for file in files:
        if not file.is_file():
            raise OptionError(f"data file {file} does not exist; check the path")
        for document in _documents(file, codec, vision):
            if document.seen is not None:
                found.append(_shortened(document, max_len, file))
                continue
            for begin in range(0, len(document.tokens), max_len):
                piece = document.tokens[begin : begin + max_len]
                if len(piece) >= min_len:
                    found.append(Document(piece, min(max(document.begin - begin, 0), len(piece))))
    if not found:
        raise OptionError(f"no document of at least {min_len} tokens in {', '.join(map(str, files))}; give more data")
    return found


def _shortened(document: Document, max_len: int, file: Path) -> Document:
    if document.begin >= max_len:
        what = f"{file}: a prompt with images takes {document.begin} tokens, and max_len is {max_len}"
        raise OptionError(f"{what}; raise max_len, or leave it out")
    return replace(document, tokens=document.tokens[:max_len])


def _documents(file: Path, codec: TextCodec | None, vision: Vision | None) -> Iterator[Document]:
    if file.suffix == ".npy":
        yield from _arrays(file)
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _from_json(line, codec, vision, f"{file}:{number}")
    else:
        yield Document(tuple(_codec(codec, file).encode(file.read_text(encoding="utf-8", errors="replace"))))


def _arrays(file: Path) -> Iterator[Document]:
    """Tokens [N, L], or tokens [N] with the documents' offsets in a file NAME_starts.npy beside it."""
    tokens = np.load(file)
    if tokens.ndim == 2:
        yield from (Document(tuple(row)) for row in tokens.tolist())
        return
    starts = file.with_name(file.stem + "_starts.npy")
    bounds = [*np.load(starts).tolist(), len(tokens)] if starts.is_file() else [0, len(tokens)]
    for begin, end in pairwise(bounds):
        yield Document(tuple(tokens[begin:end].tolist()))


def _from_json(line: str, codec: TextCodec | None, vision: Vision | None, place: str) -> Document:
    try:
        value = json.loads(line)
    except ValueError:
        raise OptionError(f"{place} is not JSON; write a string or an object per line") from None
    if isinstance(value, dict) and value.get("images"):
        return _with_images(value, codec, vision, place)
    if isinstance(value, dict) and "tokens" in value:
        return Document(tuple(value["tokens"]), int(value.get("prompt_len", 0)))
    if isinstance(value, dict) and ("messages" in value or "conversations" in value):
        return _conversation(value.get("messages") or value["conversations"], _codec(codec, place))
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise OptionError(f"{place} has no 'text', 'messages' or 'tokens'; write one of them, or a JSON string")
    return Document(tuple(_codec(codec, place).encode(text)))


def _with_images(value: dict[str, Any], codec: TextCodec | None, vision: Vision | None, place: str) -> Document:
    """A prompt with images, named by files relative to the data file, and its answer."""
    if vision is None:
        raise OptionError(f"{place} has images and the target reads text; train with a vision-language target")
    if not isinstance(value.get("prompt"), str) or not isinstance(value.get("text"), str):
        raise OptionError(f"{place} has images without 'prompt' and 'text'; write the question and the answer there")
    known, folder = _codec(codec, place), Path(place.rpartition(":")[0]).parent
    answer = known.encode(value["text"], add_special_tokens=False)
    return Document.with_images(vision, known.encode(value["prompt"]), [folder / name for name in value["images"]], answer)


def _conversation(messages: Sequence[dict[str, str]], codec: TextCodec) -> Document:
    """The rendered conversation. Everything before the first answer is its prompt."""
    known = [_message(message) for message in messages]
    first = next((i for i, message in enumerate(known) if message["role"] == "assistant"), len(known))
    render: Callable[..., list[int]] = codec.encode_chat
    prompt = render(known[:first]) if first < len(known) else []
    return Document(tuple(render(known, add_generation_prompt=False)), len(prompt))


def _message(message: dict[str, str]) -> dict[str, str]:
    """A message; ShareGPT's field names are accepted too."""
    role = message.get("role") or {"human": "user", "gpt": "assistant"}.get(message.get("from", ""), "user")
    return {"role": role, "content": message.get("content") or message.get("value", "")}


def _codec(codec: TextCodec | None, place: object) -> TextCodec:
    if codec is None:
        raise OptionError(f"{place} is text and there is no tokenizer; give token files, or a target with a tokenizer")
    return codec
