"""The trainer: it learns, goes on exactly after a kill, keeps the best checkpoint, and fails with its reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_heads import CHANGES, random_head
from tiny_pair import _RAW, VOCAB, tiny_model

from outrider.core.errors import ModelError, OptionError
from outrider.core.tree import TokenTree
from outrider.models.checkpoint import replace_file
from outrider.models.heads import load_head, new_head
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config
from outrider.models.random_decoder import tiny_config, tiny_decoder
from outrider.train.data import Corpus, Document, read_documents
from outrider.train.divergence import DIVERGENCES
from outrider.train.features import DocumentRows, compute, places_of
from outrider.train.loop import Settings, train
from outrider.train.objective import BatchOutcome, HeadObjective, HeadSettings, accepted_length

TARGET = tiny_model()
SMALL = Settings(max_steps=6, batch_size=4, row_len=48, judge_every=3, save_every=2, learning_rate=3e-3, warmup_steps=1)


def texts(count: int = 24) -> list[Document]:
    """Texts that the target wrote greedily: what there is to learn."""
    rows = [[random.Random(seed).randrange(VOCAB) for _ in range(3)] for seed in range(count)]
    cache = TARGET.new_cache(count)
    TARGET.prefill([row[:-1] for row in rows], cache)
    for _ in range(20):
        logits = TARGET.score(TokenTree.chain(torch.tensor([row[-1:] for row in rows])), cache).logits
        cache.commit([[0]] * count)
        for row, token in zip(rows, logits[:, 0].argmax(-1).tolist(), strict=True):
            row.append(token)
    return [Document(tuple(row[: 15 + seed % 9]), 3) for seed, row in enumerate(rows)]


CORPUS = Corpus.of(texts(), held_out=6)


def objective(kind: str, **settings) -> HeadObjective:
    head = random_head(kind).float()
    head.freeze()
    return HeadObjective(head, TARGET, HeadSettings(num_depths=3, **settings))


@pytest.mark.parametrize("kind", list(CHANGES))
def test_heads_learn(kind: str, tmp_path: Path) -> None:
    features = {"feature_weight": 0.5, "noise": 0.05}
    own = {"eagle1": features, "fspad": features, "falcon": {**features, "glance": 0.4, "glance_steps": 20}}
    more = {**own, "dspark": {"confidence_weight": 1.0, "loss": "l1-kl"}}.get(kind, {})
    steps, batch = (24, 8) if kind in ("eagle3", "mlp-speculator", "p-eagle") else (12, 4)
    settings = Settings(max_steps=steps, batch_size=batch, row_len=48, judge_every=steps, learning_rate=8e-3, warmup_steps=2)
    run = train([objective(kind, **more)], TARGET, CORPUS, tmp_path, settings=settings, notes={"data": "toy"})[0]
    first = Settings(max_steps=1, batch_size=1, row_len=48)
    begin = train([objective(kind, **more)], TARGET, CORPUS, tmp_path / "x", settings=first)[0]
    assert run.best > begin.history[0]["accepted_length"]
    head = load_head(tmp_path / kind, TARGET)
    assert head.config.kind == kind
    notes = json.loads((tmp_path / kind / "provenance.json").read_text())
    assert notes["data"] == "toy" and notes["accepted_length"] == run.best and notes["settings"]["max_steps"] == steps
    assert "tokens per pass" in (tmp_path / kind / "acceptance.svg").read_text()


def test_what_is_the_targets_own_stays(tmp_path: Path) -> None:
    one = objective("eagle1")
    before = {name: p.clone() for name, p in one.head.named_parameters()}
    train([one], TARGET, CORPUS, tmp_path, settings=SMALL)
    same = {name for name, p in one.head.named_parameters() if torch.equal(p, before[name])}
    assert same == {"embed_tokens.weight", "target_norm.weight", "lm_head.weight"}


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Killed between two saves, two methods at once, with noise from the random numbers."""
    whole = [objective("medusa"), objective("eagle3", noise=0.1)]
    train(whole, TARGET, CORPUS, tmp_path / "whole", settings=SMALL)

    again = [objective("medusa"), objective("eagle3", noise=0.1)]
    calls = 0
    inner = again[1]._noisy

    def dies(batch):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise Killed
        return inner(batch)

    again[1]._noisy = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        train(again, TARGET, CORPUS, tmp_path / "killed", settings=SMALL)
    resumed = [objective("medusa"), objective("eagle3", noise=0.1)]
    runs = train(resumed, TARGET, CORPUS, tmp_path / "killed", settings=SMALL)
    for mine, other in zip(whole, resumed, strict=True):
        for (name, a), b in zip(mine.head.named_parameters(), other.head.parameters(), strict=True):
            assert torch.equal(a, b), name
    assert [entry["step"] for entry in runs[0].history][-1] == 6
    with pytest.raises(OptionError, match="batch_size = 4, not 5"):
        train(resumed, TARGET, CORPUS, tmp_path / "killed", settings=Settings(**{**vars(SMALL), "batch_size": 5}))
    with pytest.raises(OptionError, match="is a run of eagle3, medusa"):
        train(resumed[:1], TARGET, CORPUS, tmp_path / "killed", settings=SMALL)


class Killed(BaseException):
    """Nothing is cleaned up after it."""


def kill_at_write(number: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Every file that is written, by name; the run dies in the middle of the one with this number."""
    written: list[str] = []

    def write_or_die(path: Path, write: Callable[[Path], object]) -> None:
        written.append(path.name)
        if len(written) == number:
            path.with_name(path.name + ".new").write_bytes(b"half")
            raise Killed
        replace_file(path, write)

    for place in ("outrider.models.checkpoint", "outrider.train.state"):
        patch.setattr(f"{place}.replace_file", write_or_die)
    return written


def test_a_kill_in_the_middle_of_any_write_loses_one_save_interval_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while each of the files of a run is written, one after the other: what was there before is whole, the state is
    at most ``save_every`` steps old, and the run that goes on ends with the weights of one that was never killed."""
    whole, often = objective("medusa"), Settings(**{**vars(SMALL), "max_steps": 4, "judge_every": 1, "learning_rate": 2e-2})
    with monkeypatch.context() as patch:
        names = kill_at_write(0, patch)
        train([whole], TARGET, CORPUS, tmp_path / "whole", settings=often)
    assert names.count("state.pt") == 3 and names.count("model.safetensors") >= 2
    for number in range(1, len(names) + 1):
        out, again, steps = tmp_path / str(number), objective("medusa"), list[int]()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            written = kill_at_write(number, patch)
            patch.setattr(
                Corpus, "batch", lambda self, step, *rest, b=Corpus.batch, s=steps: s.append(step) or b(self, step, *rest)
            )
            train([again], TARGET, CORPUS, out, settings=often)
        saved = torch.load(out / "state.pt", weights_only=True)["step"] if "state.pt" in written[:-1] else 0
        assert 0 <= len(steps) - saved <= often.save_every
        if "provenance.json" in written[:-1]:
            assert load_head(out / "medusa", TARGET)
        resumed = objective("medusa")
        train([resumed], TARGET, CORPUS, out, settings=often)
        for (name, a), b in zip(whole.head.named_parameters(), resumed.head.parameters(), strict=True):
            assert torch.equal(a, b), f"{name} after a kill at write {number} ({names[number - 1]})"


def files_of(out: Path) -> dict[str, bytes]:
    return {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=SMALL)
    before, more, spoiled = files_of(tmp_path), Settings(**{**vars(SMALL), "max_steps": 9}), objective("medusa")

    def spoil(corpus: Corpus, step: int, size: int, seed: int, *, batch=Corpus.batch) -> list[Document]:
        if step == 7:
            spoiled.head.blocks[0].layers[0].weight.data.fill_(torch.nan)  # type: ignore[union-attr]
        return batch(corpus, step, size, seed)

    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"loss of step 7 is nan.*last good checkpoint"):
        patch.setattr(Corpus, "batch", spoil)
        train([spoiled], TARGET, CORPUS, tmp_path, settings=more)
    assert files_of(tmp_path) == before
    assert train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=more)[0].history[-1]["step"] == 9


def test_a_state_that_was_cut_short_is_refused_and_the_checkpoint_stays(tmp_path: Path) -> None:
    train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=SMALL)
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    before = files_of(tmp_path)
    with pytest.raises(ModelError, match=r"state\.pt cannot be read .*remove it to start again"):
        train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=SMALL)
    assert files_of(tmp_path) == before and load_head(tmp_path / "medusa", TARGET)


def test_a_full_disk_leaves_the_last_state_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=SMALL)
    before = (tmp_path / "state.pt").read_bytes()

    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.train.state.torch.save", full)
    with pytest.raises(ModelError, match="the previous state is complete"):
        train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=Settings(**{**vars(SMALL), "max_steps": 9}))
    assert (tmp_path / "state.pt").read_bytes() == before


def test_a_method_that_no_longer_improves_stops(tmp_path: Path) -> None:
    settings = Settings(**{**vars(SMALL), "max_steps": 50, "judge_every": 1, "patience": 2, "learning_rate": 1e-12})
    run = train([objective("medusa")], TARGET, CORPUS, tmp_path, settings=settings)[0]
    assert run.is_done and len(run.history) == 3


def test_accepted_length_counts_until_the_first_miss() -> None:
    hits = [torch.tensor([[1, 1, 0, 1]]).bool(), torch.tensor([[1, 0, 1, 1]]).bool()]
    valid = [torch.tensor([[1, 1, 1, 1]]).bool(), torch.tensor([[1, 1, 1, 0]]).bool()]
    outcome = BatchOutcome(torch.zeros(()), hits, valid)
    assert accepted_length([outcome]) == pytest.approx(1 + (2 + 1 + 0) / 3)
    assert outcome.rates().tolist() == [[3, 4], [1, 2]]


def test_the_loss_of_packed_rows_is_that_of_single_ones() -> None:
    one, documents = objective("eagle3"), CORPUS.held_out[:4]
    losses = []
    for row_len in (1, 64):
        rows = DocumentRows(compute(TARGET, documents, one.taps), documents, row_len=row_len, last=TARGET.num_layers)
        losses.append(float(one(rows.packed(one.taps)).loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_places_do_not_overlap() -> None:
    lengths = [5, 9, 3, 3, 7, 1]
    taken = set()
    for length, (row, column) in zip(lengths, places_of(lengths, 10), strict=True):
        cells = {(row, column + i) for i in range(length)}
        assert not cells & taken and column + length <= 10
        taken |= cells


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_divergences_are_least_where_the_laws_agree(name: str) -> None:
    torch.manual_seed(0)
    log_p, log_q = torch.randn(5, 7).log_softmax(-1), torch.randn(5, 7).log_softmax(-1)
    same, other = DIVERGENCES[name](log_p, log_p), DIVERGENCES[name](log_p, log_q)
    if name != "ce":
        assert torch.allclose(same, torch.zeros(5), atol=1e-5) and (other > same).all()
    p, q = log_p.exp(), log_q.exp()
    known = {"forward": (p * (p / q).log()).sum(-1), "reverse": (q * (q / p).log()).sum(-1), "tvd": (p - q).abs().sum(-1) / 2}
    if name in known:
        torch.testing.assert_close(other, known[name], atol=1e-5, rtol=1e-4)


def test_documents_come_from_many_formats(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "flat.npy", np.arange(30))
    np.save(tmp_path / "flat_starts.npy", np.array([0, 12]))
    np.save(tmp_path / "rows.npy", np.ones((2, 9), dtype=np.int64))
    (tmp_path / "own.jsonl").write_text(json.dumps({"tokens": list(range(20)), "prompt_len": 15}) + "\n")
    files = [tmp_path / name for name in ("flat.npy", "rows.npy", "own.jsonl")]
    found = read_documents(files, None, max_len=10)
    assert [len(d.tokens) for d in found] == [10, 10, 8, 9, 9, 10, 10]
    assert [d.begin for d in found[-2:]] == [10, 5]
    with pytest.raises(OptionError, match="does not exist"):
        read_documents([tmp_path / "no.npy"], None, max_len=10)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(OptionError, match=r"bad.jsonl:1 has no 'text'"):
        read_documents([tmp_path / "bad.jsonl"], None, max_len=10)


def kept_bytes(count: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes kept for the backward pass of ``count`` Medusa heads on a target of 4000 tokens, and those of one set of logits."""
    target, documents, seen = tiny_decoder(tiny_config(vocab_size=4000)), CORPUS.train[:8], dict[int, int]()
    config = new_config("medusa", {**_RAW, "vocab_size": 4000}, num_heads=count, own_readouts=False)
    head = new_head(config, EmbeddingAndOutput(torch.zeros(4000, 32), torch.ones(32), torch.randn(4000, 32), tied=False))
    one = HeadObjective(head, target, HeadSettings(num_depths=count), chunk=16 * 4000, recompute=recompute)
    rows = DocumentRows(compute(target, documents, one.taps), documents, row_len=48, last=target.num_layers)
    batch = rows.packed(one.taps)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[id(tensor)] = tensor.numel() * tensor.element_size()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []  # so that no two have the same id
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert torch.isfinite(one(batch).loss)
    return sum(seen.values()), batch.tokens.numel() * 4000 * 4


def test_memory_of_many_heads_grows_with_states_not_with_logits() -> None:
    (one, logits), (four, _), (eight, _) = (kept_bytes(count, recompute=True) for count in (1, 4, 8))
    assert (eight - four) / 4 < 0.2 * logits and (four - one) / 3 < 0.2 * logits
    assert (kept_bytes(8, recompute=False)[0] - kept_bytes(4, recompute=False)[0]) / 4 > logits
    print(f"bytes kept for 1, 4, 8 heads: {one}, {four}, {eight}; one set of logits: {logits}")
