"""States in shards that any number of processes write and read, and batches that no change of processes disturbs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from test_train import CORPUS, SMALL, TARGET, objective
from tiny_pair import tiny_model

from outrider.core.errors import ModelError, OptionError
from outrider.train.devices import Team
from outrider.train.features import compute
from outrider.train.loop import train
from outrider.train.sharded import ShardedStore


def assert_states(found: dict[int, list[torch.Tensor]], expected: dict[int, list[torch.Tensor]]) -> None:
    for tap, states in expected.items():
        for mine, theirs in zip(found[tap], states, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_one_process_reads_what_two_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = list(CORPUS.train[:6])
    expected = compute(TARGET, documents, (1,))
    for rank in range(2):
        store = ShardedStore(f"file://{tmp_path}", TARGET, (1,), rank=rank, shard_bytes=1)
        store.states(documents[rank::2][:2])
        store.states(documents[rank::2])
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"states-{rank}-{number:05d}.safetensors" for rank in (0, 1) for number in (1, 2)]
    with safe_open(tmp_path / names[0], "pt") as shard:
        assert sorted(shard.keys()) == sorted(json.loads((tmp_path / names[0]).with_suffix(".json").read_text()))
    one = ShardedStore(str(tmp_path), TARGET, (1,))
    monkeypatch.setattr("outrider.train.sharded.compute", None)  # nothing is left to compute
    assert_states(one.states(documents), expected)


def test_a_kill_loses_what_was_in_no_shard(tmp_path: Path) -> None:
    documents = list(CORPUS.train[:5])
    store = ShardedStore(f"file://{tmp_path}", TARGET, (1,))
    store.states(documents[:3])
    store.flush()
    store.states(documents)  # and killed here
    (tmp_path / "states-0-00002.safetensors").write_bytes(b"half a shard, whose index was never written")
    again = ShardedStore(f"file://{tmp_path}", TARGET, (1,))
    assert_states(again.states(documents), compute(TARGET, documents, (1,)))
    again.flush()
    assert len(json.loads((tmp_path / "states-0-00002.json").read_text())) == 2


def test_training_through_an_object_store_is_the_same_training(tmp_path: Path) -> None:
    plain, stored = objective("eagle3"), objective("eagle3")
    train([plain], TARGET, CORPUS, tmp_path / "plain", settings=SMALL)
    settings = replace(SMALL, store="memory://states-of-a-test")
    train([stored], TARGET, CORPUS, tmp_path / "stored", settings=settings)
    for a, b in zip(plain.head.parameters(), stored.head.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert fsspec.filesystem("memory").glob("/states-of-a-test/states-0-*.safetensors")


def test_other_targets_and_unknown_places_are_refused(tmp_path: Path) -> None:
    ShardedStore(str(tmp_path), TARGET, (1,))
    with pytest.raises(OptionError, match="another target or of other layers"):
        ShardedStore(str(tmp_path), TARGET, (0,))
    with pytest.raises(OptionError, match="another target"):
        ShardedStore(str(tmp_path), tiny_model(3.0), (1,))
    with pytest.raises(ModelError, match="name another place in store"):
        ShardedStore("nowhere://bucket", TARGET, (1,))


@pytest.mark.parametrize("switch", [1, 3])
def test_a_run_that_goes_on_with_fewer_processes_reads_every_document_once(switch: int) -> None:
    """Two processes are killed after ``switch`` saved steps; one goes on. An epoch has every document exactly once."""
    batch_size, read = 4, Counter[tuple[int, ...]]()
    num_steps = len(CORPUS.train) // batch_size
    for step in range(num_steps):
        team = [Team(0, 2), Team(1, 2)] if step < switch else [Team()]
        for member in team:
            documents = CORPUS.batch(step, batch_size, seed=7)
            read.update(document.tokens for document in member.share_of(documents))
    expected = Counter(document.tokens for document in CORPUS.train)
    assert all(count <= expected[tokens] for tokens, count in read.items())
    assert sum(read.values()) == num_steps * batch_size
