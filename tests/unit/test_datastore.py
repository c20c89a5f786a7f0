"""The datastore against brute force: the order, the search, the tree of most frequent continuations; files and the command."""

from __future__ import annotations

import json
import lzma
import random
from collections import Counter

import numpy as np
import pytest
from drafting import propose, start

from outrider.cli import datastore as command
from outrider.cli.parsers.datastore import add_parser
from outrider.core.errors import ModelError, OptionError
from outrider.drafters.copying.datastore import MAX_MATCH, Datastore
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.drafters.copying.rest import RestDrafter, RestOptions, most_frequent
from outrider.drafters.copying.suffix_array import suffix_array
from outrider.drafters.trees.trie import Trie


@pytest.mark.parametrize("seed", range(12))
def test_suffixes_are_sorted(seed: int) -> None:
    rng = random.Random(seed)
    size, alphabet, depth = rng.choice([1, 2, 9, 300]), rng.choice([1, 2, 5, 60_000]), rng.choice([1, 3, 32])
    tokens = [rng.randrange(alphabet) for _ in range(size)]
    order = suffix_array(np.array(tokens, ">u2" if alphabet < 60_000 else ">u4"), depth=depth).tolist()
    assert sorted(order) == list(range(size))
    texts = [tokens[place : place + depth] for place in order]
    assert texts == sorted(texts)
    assert len(suffix_array(np.zeros(0, np.uint16), depth=4)) == 0


def test_long_repeats_are_sorted() -> None:
    tokens = [1, 2, 3] * 200
    order = suffix_array(np.array(tokens, np.uint32), depth=32).tolist()
    assert [tokens[place : place + 32] for place in order] == sorted(tokens[place : place + 32] for place in range(600))


def some_documents(rng: random.Random, alphabet: int) -> list[list[int]]:
    return [[rng.randrange(alphabet) for _ in range(rng.randrange(1, 400))] for _ in range(12)]


def find_by_hand(documents, history, *, min_match: int, max_match: int, length: int) -> tuple[int, list[list[int]]]:
    for size in range(min(max_match, len(history)), min_match - 1, -1):
        end = history[-size:]
        found = [
            document[place + size : place + size + length]
            for document in documents
            for place in range(len(document) - size + 1)
            if document[place : place + size] == end
        ]
        if found:
            return size, found
    return 0, []


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_match_and_all_that_followed_it_are_found(tmp_path, seed: int) -> None:
    rng = random.Random(seed)
    alphabet, vocab_size = rng.choice([2, 4, 30]), rng.choice([100, 200_000])
    documents = some_documents(rng, alphabet)
    store = build_datastore(documents, tmp_path / "store", vocab_size=vocab_size, shard_tokens=rng.choice([1024, 1 << 20]))
    assert store.num_documents == 12 and store.num_tokens == sum(map(len, documents)) + 12
    for _ in range(60):
        source = rng.choice(documents)
        begin = rng.randrange(len(source))
        history = [rng.randrange(alphabet + 1) for _ in range(2)] + source[begin : begin + rng.randrange(1, 25)]
        low, top, length = rng.choice([1, 2]), rng.choice([2, 5, MAX_MATCH]), rng.choice([1, 4, 16])
        size, found = find_by_hand(documents, history, min_match=low, max_match=top, length=length)
        hits = store.search(history, min_match=low, max_match=top, length=length, max_hits=100_000)
        assert (hits is None) == (size == 0)
        if hits is None:
            continue
        rows = [[token for token in row if token >= 0] for row in hits.continuations.tolist()]
        assert (hits.match_len, hits.num_hits) == (size, len(found)) and sorted(rows) == sorted(found)
        few = store.search(history, min_match=low, max_match=top, length=length, max_hits=7)
        assert few is not None and few.num_hits == len(found)
        assert len(few.continuations) <= 7 * store.num_shards
        check_tree(hits.continuations, rng.randrange(1, 40))


def check_tree(rows: np.ndarray, max_nodes: int) -> None:
    """The most frequent prefixes of sorted rows, counted one by one."""
    counts: Counter[tuple[int, ...]] = Counter()
    for row in rows.tolist():
        text = [token for token in row if token >= 0]
        counts.update(tuple(text[:size]) for size in range(1, len(text) + 1))
    grown = most_frequent(Trie(0), rows, max_nodes)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(grown.tokens[1:], grown.parents[1:], strict=True):
        assert parent <= len(paths)
        paths.append((*(paths[parent - 1] if parent else ()), token))
    assert len(set(paths)) == len(paths)
    assert [counts[path] for path in paths] == sorted(counts.values(), reverse=True)[:max_nodes]


def test_tokens_the_corpus_cannot_hold_end_the_match(tmp_path) -> None:
    store = build_datastore([[1, 2, 3, 4]], tmp_path / "store", vocab_size=10)
    hits = store.search([1, 70_000, 2, 3], min_match=2, max_match=16, length=3, max_hits=9)
    assert hits is not None and hits.match_len == 2 and hits.continuations.tolist() == [[4, -1, -1]]
    assert store.search([2, 70_000], min_match=1, max_match=16, length=3, max_hits=9) is None
    assert store.search([], min_match=1, max_match=16, length=3, max_hits=9) is None


def test_many_hits_are_sampled_evenly(tmp_path) -> None:
    documents = [[50, token] for token in range(10) for _ in range(100)]
    store = build_datastore(documents, tmp_path / "store", vocab_size=100)
    hits = store.search([50], min_match=1, max_match=2, length=1, max_hits=20)
    assert hits is not None and hits.num_hits == 1000
    assert Counter(hits.continuations[:, 0].tolist()) == dict.fromkeys(range(10), 2)


def test_trees_within_the_plan(tmp_path) -> None:
    documents = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5, 6], [1, 2, 7]]
    store = build_datastore(documents, tmp_path / "store", vocab_size=100)
    drafter = RestDrafter(datastore=store, vocab_size=100)
    histories = [[9, 1, 2], [9, 1, 2], [9, 1, 2], [2, 1], [9, 1, 2]]
    state = start(drafter, histories).fork([0, 1, 2, 3, 4])
    rows = propose(drafter, state, histories, [9, 1, 2, 9, 0], [9, 9, 2, 9, 0])
    assert rows[0] == ([2, 3, 7, 5, 4, 6], [-1, 0, 0, 1, 1, 3])
    assert rows[1] == ([2, 3, 7], [-1, 0, 0])
    assert rows[2] == ([2, 3, 5], [-1, 0, 1])
    assert rows[3] == ([1], [-1]), "no hit, nothing drafted"
    assert rows[4] == ([2], [-1])


def test_damaged_or_missing_stores_are_refused(tmp_path) -> None:
    folder = tmp_path / "store"
    build_datastore([[1, 2, 3]] * 50, folder, vocab_size=10).verify()
    with pytest.raises(OptionError, match="holds a datastore already"):
        build_datastore([[1]], folder, vocab_size=10)
    tokens = (folder / "00000.tokens").read_bytes()
    (folder / "00000.tokens").write_bytes(b"\0\7" + tokens[2:])
    with pytest.raises(ModelError, match="checksum"):
        Datastore(folder).verify()
    (folder / "00000.tokens").write_bytes(tokens[:-1])
    with pytest.raises(ModelError, match="bytes"):
        Datastore(folder)
    meta = json.loads((folder / "datastore.json").read_text())
    for text, word in (("{", "cannot be read"), ("[]", "version 1"), (json.dumps({**meta, "version": 2}), "version 1")):
        (folder / "datastore.json").write_text(text)
        with pytest.raises(ModelError, match=word):
            Datastore(folder)
    with pytest.raises(ModelError, match="outrider datastore build"):
        Datastore(tmp_path / "nowhere")
    for documents, word in (([], "no text"), ([[]], "no text"), ([[10]], "token 10"), ([[-1]], "token -1")):
        with pytest.raises(OptionError, match=word):
            build_datastore(documents, tmp_path / "other", vocab_size=10)
    with pytest.raises(OptionError, match="shard_tokens"):
        build_datastore([[1]], tmp_path / "other", vocab_size=10, shard_tokens=3)


def test_bad_options_are_refused(tmp_path) -> None:
    for options, word in (
        ({"max_match": 17}, "max_match"),
        ({"min_match": 5, "max_match": 4}, "min_match"),
        ({"max_continuation": 17}, "max_continuation"),
        ({"max_hits": 0}, "max_hits"),
    ):
        with pytest.raises(OptionError, match=word):
            RestOptions(**options)
    with pytest.raises(OptionError, match="needs a datastore"):
        RestOptions().open_datastore()
    store = build_datastore([[1, 2, 9]], tmp_path / "store", vocab_size=10)
    assert RestOptions(datastore=store).open_datastore() is store
    assert RestOptions(datastore=str(tmp_path / "store")).open_datastore().max_token == 9
    with pytest.raises(ModelError, match="holds token 9"):
        RestDrafter(datastore=store, vocab_size=9)


class Words:
    """A tokenizer: a token per character."""

    vocab_size = 128

    def __init__(self) -> None:
        self.tokenizer = self

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(128)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def call(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["datastore", *arguments]))


def test_the_command_builds_and_describes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "load_codec", lambda name: Words())
    monkeypatch.setattr(command, "_PIECE", 5)
    (tmp_path / "a.txt").write_text("hello there\nhello you")
    (tmp_path / "b.jsonl").write_text('"help me"\n\n{"text": "hello world"}\n')
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(b'"packed"\n'))
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.jsonl.xz")]
    out = str(tmp_path / "store")
    assert call("build", *files, "--model", "some/letters", "--out", out) == 0
    assert "4 documents" in capsys.readouterr().out
    assert call("info", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 4 and facts["model"] == "letters" and facts["vocab_size"] == 128
    assert call("info", out) == 0
    hits = Datastore(out).search([ord(letter) for letter in "hel"], min_match=2, max_match=9, length=3, max_hits=9)
    assert hits is not None and hits.num_hits == 4
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"no": 1}\n')
    (tmp_path / "worse.jsonl").write_text("plain\n")
    (tmp_path / "d.xz").write_bytes(b"not packed")
    for name, word in (
        ("bad.jsonl", r"bad.jsonl:2 holds no text"),
        ("worse.jsonl", "is not JSON"),
        ("d.xz", "unpacked"),
        ("no", "exist"),
    ):
        with pytest.raises(OptionError, match=word):
            call("build", str(tmp_path / name), "--model", "x", "--out", str(tmp_path / "other"))
