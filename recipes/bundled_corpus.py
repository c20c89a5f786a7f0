"""Collect the documents the bundled models learn from, train their tokenizer, and pack everything as token arrays.

Most documents are plain stories and the conversations made of them; readable passages from books, documented Python
functions and school arithmetic make up the rest.
The work is divided over processes, each of which decodes, builds and encodes its own slice of the stories.
"""

from __future__ import annotations

import ast
import json
import lzma
import multiprocessing
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bundled_chat import EOT, SPECIALS, chat_document, read_story, rename, render
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Tokens = NDArray[np.uint16]
KINDS = ("story", "chat", "book", "code", "maths")


@dataclass(frozen=True)
class CorpusConfig:
    """Shares of the mixture, vocabulary size, and how the work is divided."""

    vocab: int
    chat_share: float  # of the stories; each becomes a conversation instead of a plain story
    rename_share: float  # of the stories; a hero's new name makes copying it worth learning
    books_chars: float  # characters of books per character of stories; likewise the next one
    code_chars: float
    source_step: int  # of the books and of the code files, one in this many is read
    held_out: int  # one document in this many is kept for evaluation
    tokenizer_stories: int
    processes: int
    seed: int


@dataclass(frozen=True)
class Slice:
    """One process's share of the work: a range of stories, and other texts by kind."""

    stories: Path
    teacher_tokenizer: Path
    tokenizer: Path
    begin: int
    end: int
    texts: dict[str, list[str]]
    config: CorpusConfig


def clean_story(text: str) -> str:
    """Plain quotes, single spaces, one line break between paragraphs; empty when the text is not a proper story."""
    text = text.replace("\u201c", '"').replace("\u201d", '"').replace("\u2019", "'").replace("\u2018", "'")
    text = re.sub(r" *\n\s*", "\n", re.sub(r"[ \t]+", " ", text)).strip()
    proper = text.isascii() and text[-1:] in '.!?"' and text.count('"') % 2 == 0 and "@" not in text
    return text if proper else ""


def decode_stories(folder: Path, tokenizer: Path, begin: int, end: int) -> list[str]:
    """The text of stories `begin` to `end`, without those that did not come out well."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    ids = [tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(begin, min(end, len(offsets) - 1))]
    texts = (clean_story(text) for text in Tokenizer.from_file(str(tokenizer)).decode_batch(ids))
    return [text for text in texts if text]


def read_lines(path: Path) -> list[str]:
    """The strings of a compressed JSON-lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def book_passages(book: str) -> list[str]:
    """Passages of whole paragraphs, 600 to 2000 characters, out of the middle of a book excerpt."""
    passages, held = [], ""
    for paragraph in re.split(r"\n\s*\n", book)[1:-1]:  # the outer two are usually cut off mid-sentence
        plain = re.sub(r"\s+", " ", paragraph).strip().replace("\u201c", '"').replace("\u201d", '"').replace("\u2019", "'")
        held = f"{held}\n{plain}" if held else plain
        if len(held) >= 600:
            passages.append(held)
            held = ""
    return [passage for passage in passages if len(passage) <= 2000 and passage.isascii()]


def plain_share(passage: str, common: frozenset[str]) -> float:
    """The share of a passage's words that are common: a rough measure of how easy it is to read."""
    words = re.findall(r"[a-z']+", passage.lower())
    return sum(word in common for word in words) / max(1, len(words))


def readable_passages(books: list[str], limit: int) -> list[str]:
    """The easiest passages of all books, up to `limit` characters."""
    passages = [passage for book in books for passage in book_passages(book)]
    counts = Counter(word for passage in passages for word in re.findall(r"[a-z']+", passage.lower()))
    common = frozenset(word for word, _ in counts.most_common(3000))
    passages.sort(key=lambda passage: -plain_share(passage, common))
    return take(passages, limit)


def take(texts: list[str], limit: int) -> list[str]:
    """Texts from the front, until they hold `limit` characters."""
    total = np.cumsum([len(text) for text in texts]) if texts else np.zeros(0)
    return texts[: int(np.searchsorted(total, limit))]


def python_functions(source: str) -> list[str]:
    """Short documented functions as conversations: the docstring's first line is the wish, the source the answer."""
    try:
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in nodes:
        wish = (ast.get_docstring(node) or "").strip().split("\n")[0]
        body = ast.get_source_segment(source, node) or ""
        if 15 < len(wish) < 120 and 80 < len(body) < 1600 and source.isascii():
            asked = f"Write a Python function `{node.name}`: {wish}"
            found.append(render([(asked, f"```python\n{body}\n```")], random.Random(len(body))))
    return found


def maths_document(line: str) -> str:
    """A school arithmetic problem and its worked answer, without the calculator marks."""
    row = json.loads(line)
    worked, _, result = re.sub(r"<<[^>]*>>", "", row["answer"]).partition("\n#### ")
    return render([(row["question"], f"{worked}\nThe answer is {result}.")], random.Random(len(line)))


def gather_texts(data: Path, story_chars: int, config: CorpusConfig) -> dict[str, list[str]]:
    """The documents that are not stories, by kind, in amounts that fit the stories."""
    with multiprocessing.get_context("spawn").Pool(config.processes) as pool:
        sources = read_lines(data / "text/code.jsonl.xz")[:: config.source_step][: 20 + int(story_chars / 2e4)]
        functions = [text for found in pool.map(python_functions, sources, chunksize=32) for text in found]
    books = read_lines(data / "text/books.jsonl.xz")[:: config.source_step][: 20 + int(story_chars / 5e4)]
    maths = (data / "prompts/gsm8k_train.jsonl").read_text().splitlines()
    random.Random(config.seed).shuffle(functions)
    return {
        "book": readable_passages(books, max(20_000, int(story_chars * config.books_chars))),
        "code": take(functions, max(20_000, int(story_chars * config.code_chars))),
        "maths": [maths_document(line) for line in maths[: 50 + int(story_chars / 2e4)]],
    }


def new_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level pair encoding over every byte, with digits kept apart and no normalisation: it restores any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(data: Path, work: Path, config: CorpusConfig) -> None:
    """Train the tokenizer on a sample of the mixture; stories weigh most because most text is stories."""
    teacher = data / "models/stories15M/tokenizer.json"
    texts = decode_stories(work / "stories", teacher, 0, config.tokenizer_stories)
    total = np.load(work / "stories/offsets.npy")
    chars = int(sum(map(len, texts)) * max(1.0, (len(total) - 1) / config.tokenizer_stories))
    others = gather_texts(data, chars, config)
    (work / "texts.json").write_text(json.dumps(others))
    rng = random.Random(config.seed)
    for kind, found in others.items():
        texts += rng.sample(found, min(len(found), len(texts) // 20))
        print(f"texts: {len(found)} of kind {kind}, {sum(map(len, found)) / 1e6:.1f}M characters", flush=True)
    tokenizer = new_tokenizer(texts, config.vocab)
    tokenizer.save(str(work / "tokenizer.json"))
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries from {len(texts)} texts", flush=True)


def story_documents(texts: list[str], config: CorpusConfig, rng: random.Random) -> dict[str, list[str]]:
    """Divide stories into plain ones and conversations, with new names for some heroes."""
    made: dict[str, list[str]] = {"story": [], "chat": []}
    stories = [read_story(text) for text in texts]
    for found in stories:
        chatty = rng.random() < config.chat_share
        anew = found.hero and rng.random() < config.rename_share * (2 if chatty else 1)
        story = rename(found, rng) if anew else found
        if chatty:
            made["chat"].append(chat_document(story, rng.sample(stories, min(len(stories), rng.randint(1, 5))), rng))
        else:
            made["story"].append(story.text)
    return made


def build_slice(job: Slice) -> dict[str, list[Tokens]]:
    """Make and encode the documents of one slice."""
    rng = random.Random(f"{job.config.seed}/{job.begin}")
    texts = decode_stories(job.stories, job.teacher_tokenizer, job.begin, job.end)
    made = story_documents(texts, job.config, rng) | job.texts
    tokenizer = Tokenizer.from_file(str(job.tokenizer))
    return {
        kind: [np.array(code.ids, dtype=np.uint16) for code in tokenizer.encode_batch([EOT + text for text in found])]
        for kind, found in made.items()
    }


def plan_slices(data: Path, work: Path, config: CorpusConfig) -> list[Slice]:
    """Divide all work evenly; there are more slices than processes so that a slow one delays nothing."""
    count = len(np.load(work / "stories/offsets.npy")) - 1
    others = json.loads((work / "texts.json").read_text())
    parts = 8 * config.processes
    size = -(-count // parts)
    teacher = data / "models/stories15M/tokenizer.json"
    return [
        Slice(
            stories=work / "stories",
            teacher_tokenizer=teacher,
            tokenizer=work / "tokenizer.json",
            begin=part * size,
            end=(part + 1) * size,
            texts={kind: found[part::parts] for kind, found in others.items()},
            config=config,
        )
        for part in range(parts)
    ]


def save_stream(documents: list[Tokens], out: Path) -> None:
    """Save documents as one stream with the position where each begins."""
    lengths = [len(document) for document in documents]
    np.save(f"{out}.npy", np.concatenate(documents))
    np.save(f"{out}_starts.npy", np.cumsum([0, *lengths[:-1]]))


def build_corpus(data: Path, work: Path, config: CorpusConfig) -> None:
    """Encode everything; hold out some documents of each kind; shuffle and save the rest."""
    found: dict[str, list[Tokens]] = {kind: [] for kind in KINDS}
    with multiprocessing.get_context("spawn").Pool(config.processes) as pool:
        for part in pool.imap(build_slice, plan_slices(data, work, config)):
            for kind, documents in part.items():
                found[kind] += documents
    train: list[Tokens] = []
    for kind, documents in found.items():
        if not documents:  # a toy run can find too few sources
            continue
        held = documents[:: config.held_out]
        save_stream(held, work / f"held_{kind}")
        kept = [document for index, document in enumerate(documents) if index % config.held_out]
        train += kept
        size = sum(map(len, kept))
        print(f"corpus: {kind}: {len(kept)} documents, {size / 1e6:.2f}M tokens; {len(held)} held out", flush=True)
    random.Random(config.seed).shuffle(train)
    save_stream(train, work / "train")
    print(f"corpus: {sum(map(len, train)) / 1e6:.1f}M tokens in {len(train)} documents", flush=True)
