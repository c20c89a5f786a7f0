"""What is trained besides draft models and heads: the target for early exit, the adapter at an exit, the acceptance head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from killed_run import assert_goes_on_exactly
from test_train import CORPUS, TARGET
from tiny_pair import _RAW, VOCAB, tiny_model

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.core.sampling import Law
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.acceptance_head import load_acceptance_head
from outrider.models.adapter import load_adapter, new_adapter
from outrider.models.config import config_of
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput, read_target
from outrider.train.acceptance import AcceptanceObjective, AcceptanceSettings
from outrider.train.distill import DistillObjective, DistillSettings
from outrider.train.draft_lm import DraftLM
from outrider.train.features import DocumentRows, compute
from outrider.train.layerskip import LayerSkipObjective, LayerSkipSettings, dropout_rates, exit_weights
from outrider.train.loop import Settings, train
from outrider.train.specee import SpecEEObjective, SpecEESettings

SETTINGS = Settings(max_steps=40, batch_size=8, row_len=48, judge_every=10, learning_rate=5e-3, warmup_steps=1)


def fresh(num_layers: int = 1) -> DraftLM:
    raw = {**_RAW, "num_hidden_layers": num_layers}
    config = config_of(raw)
    assert config is not None
    torch.manual_seed(0)
    return DraftLM(config, raw, Path())


def ends() -> EmbeddingAndOutput:
    """The tiny target's own, read off its answers."""
    return EmbeddingAndOutput(TARGET._embedding, torch.ones(32), _readout(), tied=False)


def _readout() -> torch.Tensor:
    states = torch.eye(32) * 32**-0.5 * 32**0.5
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)
    return torch.linalg.lstsq(normed, TARGET.logits(states)).solution.T


def texts(method_name: str, temperature: float, **options: object) -> list[list[int]]:
    method = compose(method_name, TARGET, options=options)
    asked = [
        Request([3 + i, 7, 11 * i % VOCAB], SamplingParams(max_tokens=14, temperature=temperature, seed=i)) for i in range(5)
    ]
    asked.append(Request([5], SamplingParams(max_tokens=9, temperature=temperature, seed=8)))
    found: dict[int, list[int]] = {}
    for step in run(Engine(TARGET, method), asked, max_batch_size=4):
        found[step.request] = list(step.state.tokens)
    return [found[i] for i in range(6)]


def test_an_adapter_begins_as_the_exit_learns_and_drafts(tmp_path: Path) -> None:
    torch.manual_seed(0)  # a lucky start agrees with the target everywhere at once, and has nothing to learn
    adapter = new_adapter(_RAW, ends(), TARGET, exit_layer=1)
    objective = DistillObjective("kangaroo", adapter, TARGET, DistillSettings("mixed"))
    documents = CORPUS.held_out[:3]
    batch = DocumentRows(compute(TARGET, documents, (1,)), documents, row_len=48, last=2).packed((1,))
    with torch.no_grad():
        torch.testing.assert_close(adapter(batch), batch.features)
        bare = TARGET.logits(batch.features)
        torch.testing.assert_close(adapter.logits(adapter(batch)), bare, atol=1e-3, rtol=1e-3)
    finished = train([objective], TARGET, CORPUS, tmp_path, settings=SETTINGS)[0]
    assert finished.best > finished.history[0]["accepted_length"] > 1
    folder = str(tmp_path / "kangaroo")
    loaded = load_adapter(folder, TARGET)
    assert loaded.exit_layer == 1 and loaded.taps == (1,)
    for temperature in (0.0, 1.0):
        assert texts("kangaroo", temperature, adapter=folder) == texts("plain", temperature)


def test_adapted_drafts_are_what_training_predicts(tmp_path: Path) -> None:
    """The chain that the drafter grows on its cache is the argmax of the module on the whole text."""
    adapter = new_adapter(_RAW, ends(), TARGET, exit_layer=1)
    torch.nn.init.normal_(adapter.layer.self_attn.o_proj.weight, std=0.3)
    adapter.save(tmp_path, {})
    method = compose("kangaroo", TARGET, options={"adapter": str(tmp_path), "threshold": 0.0, "num_draft_tokens": 4})
    engine = Engine(TARGET, method)
    batch = engine.start([Request([3, 7, 11, 2], SamplingParams(max_tokens=24))])
    loaded = load_adapter(str(tmp_path), TARGET)
    while not batch.rows[0].is_finished:
        before = list(batch.rows[0].tokens)
        (step,) = engine.step(batch).progress()
        guesses = step.trace.tokens[1:]
        from outrider.train.data import Document

        text = [*before, *guesses]
        states = compute(TARGET, [Document(tuple(text))], (1,))
        packed = DocumentRows(states, [Document(tuple(text))], row_len=1, last=2).packed((1,))
        with torch.no_grad():
            expected = TARGET.logits(loaded(packed))[0].argmax(-1)[len(before) - 1 : -1].tolist()
        assert guesses == expected
    assert batch.rows[0].stats.num_passes > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_drafts_for_the_bundled_target(tmp_path: Path, dtype: str) -> None:
    """Exits of the fast decoder have a precision of their own."""
    llm = LLM(method="plain", dtype=dtype)
    raw, own = read_target(bundled_path("target"))
    new_adapter(raw, own, llm.target, exit_layer=6).save(tmp_path, {})
    method = llm.compose("kangaroo", adapter=str(tmp_path), policy="fixed", num_draft_tokens=3)
    params = SamplingParams(max_tokens=12)
    assert llm.generate("Once upon", params, method=method)[0].token_ids == llm.generate("Once upon", params)[0].token_ids


def test_adapters_of_other_targets_are_refused(tmp_path: Path) -> None:
    new_adapter(_RAW, ends(), TARGET, exit_layer=1).save(tmp_path, {})
    with pytest.raises(ModelError, match="another target"):
        load_adapter(str(tmp_path), tiny_model(5.0))
    with pytest.raises(OptionError, match="leave exit_layer out"):
        compose("kangaroo", TARGET, options={"adapter": str(tmp_path), "exit_layer": 2})
    with pytest.raises(CompositionError, match="cannot be part of another method"):
        compose("hybrid", TARGET, options={"parts": "kangaroo,prompt-lookup", "adapter": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="no Kangaroo adapter"):
        load_adapter(str(tmp_path), TARGET)
    with pytest.raises(ModelError, match="exit_layer = 2"):
        new_adapter(_RAW, ends(), TARGET, exit_layer=2)


def test_layers_are_skipped_late_rather_than_early() -> None:
    rates, weights = dropout_rates(16, 0.2), exit_weights(16, 0.2)
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.2) and rates == sorted(rates)
    assert weights[1] == pytest.approx(0.2) and weights[3] == pytest.approx(0.2 * 6) and weights[-1] == 15 + 120


def test_layerskip_makes_the_exit_agree_with_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fresh(3)
    objective = LayerSkipObjective(model, TARGET, LayerSkipSettings(rotation=1, scale=1.0, judged_exit=1))
    finished = train([objective], TARGET, CORPUS, tmp_path, settings=SETTINGS)[0]
    assert finished.best > finished.history[0]["accepted_length"]
    loaded = DraftLM.load(str(tmp_path / "layerskip"), torch.device("cpu"))
    assert loaded.config.num_layers == 3
    with pytest.raises(OptionError, match="judged_exit = 3"):
        LayerSkipObjective(model, TARGET, LayerSkipSettings(judged_exit=3))


def test_rows_that_skip_a_layer_are_not_changed_by_it() -> None:
    model, documents = fresh(2), CORPUS.held_out[:2]
    batch = DocumentRows(compute(TARGET, documents, ()), documents, row_len=1, last=2).packed(())
    kept = [torch.tensor([True, True]), torch.tensor([False, True])]
    with torch.no_grad():
        first, second = model.climb(batch, kept)
        _, whole = model.climb(batch)
    assert torch.equal(second[0], first[0]) and torch.allclose(second[1], whole[1], atol=1e-5)


def test_layers_run_again_in_the_backward_pass_give_the_same_gradients() -> None:
    documents = CORPUS.train[:3]
    batch = DocumentRows(compute(TARGET, documents, ()), documents, row_len=48, last=2).packed(())
    found = []
    for recompute in (False, True):
        model = fresh(2)
        model.recompute = recompute
        DistillObjective("distill", model, TARGET, DistillSettings(recompute=recompute))(batch).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_killed_run_of_exit_predictors_goes_on_exactly(tmp_path: Path) -> None:
    """With the counts of exits that were first to be right."""
    assert_goes_on_exactly(lambda: SpecEEObjective(TARGET, SpecEESettings(width=8)), tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_acceptance_head_predicts_fates_and_stops_drafts(tmp_path: Path, temperature: float) -> None:
    draft = fresh()
    distil = DistillObjective("distill", draft, TARGET, DistillSettings())
    train([distil], TARGET, CORPUS, tmp_path / "draft", settings=SETTINGS)
    objective = AcceptanceObjective(draft, TARGET, AcceptanceSettings(temperature=temperature, width=16))
    finished = train([objective], TARGET, CORPUS, tmp_path, settings=SETTINGS)[0]
    assert 1.6 < finished.best <= 2
    head = load_acceptance_head(str(tmp_path / "acceptance-head"))
    states = torch.randn(3, 32)
    guesses, logits = torch.tensor([1, 5, 9]), draft.logits(states).detach()
    law = Law(logits[:, None], None, None, None)  # type: ignore[arg-type]
    log_q = logits.log_softmax(-1).gather(-1, guesses[:, None])[:, 0]
    with torch.no_grad():
        expected = objective.head(states, guesses, log_q).sigmoid()
    if finished.since_best == 0:  # the last checkpoint is the saved one
        torch.testing.assert_close(torch.tensor(head.predict(law, guesses)), expected, atol=0.02, rtol=0.02)
    banned = logits.clone()
    banned[:, 3] = -torch.inf
    assert all(0 <= chance <= 1 for chance in head.predict(Law(banned[:, None], None, None, None), guesses))  # type: ignore[arg-type]


def test_the_threshold_policy_loads_a_head(tmp_path: Path) -> None:
    from outrider.models.acceptance_head import AcceptanceHead

    head = AcceptanceHead.of_draft(32, VOCAB, width=8, num_blocks=1)
    torch.nn.init.zeros_(head.out.weight)
    head.folded(fresh().readout).save(tmp_path, {})
    for odds, count in ((9.0, 5), (-9.0, 1)):
        torch.nn.init.constant_(head.out.bias, odds)
        head.folded(fresh().readout).save(tmp_path, {})
        options = {"head": str(tmp_path), "num_draft_tokens": 5}
        method = compose("draft-model", TARGET, draft=tiny_model(0.2), policy="threshold", options=options)
        engine = Engine(TARGET, method)
        batch = engine.start([Request([1, 2, 3], SamplingParams(max_tokens=40))])
        engine.step(batch)
        assert batch.rows[0].stats.num_drafted == count
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no acceptance head"):
        load_acceptance_head(str(tmp_path))


def test_a_new_draft_shares_the_targets_vocabulary(tmp_path: Path) -> None:
    from outrider.codecs.load import load_codec

    wide = DraftLM.fresh(bundled_path("target"), {"intermediate_size": 128}, torch.device("cpu"))
    narrow = DraftLM.fresh(
        bundled_path("target"), {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}, torch.device("cpu")
    )
    bundled = DraftLM.load(bundled_path("target"), torch.device("cpu"))
    assert torch.equal(wide.readout, bundled.readout) and narrow.readout.shape == (4096, 64)
    narrow.save(tmp_path, {"from": "nothing"})
    again = DraftLM.load(str(tmp_path), torch.device("cpu"))
    assert again.config.hidden_size == 64 and again.config.head_dim == 32
    assert load_codec(str(tmp_path)).same_vocabulary(load_codec(bundled_path("target")))


@pytest.mark.parametrize("kind", ["pretrain", "sorted", "kangaroo", "layerskip", "acceptance-head", "specee"])
def test_the_command_line_trains_every_kind(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled target, far too briefly to be any good."""
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"tokens": [5 + (i * j) % 4000 for j in range(20)]}) + "\n" for i in range(1, 7)))
    arguments = ["--data", str(data), "--out", str(tmp_path), "--held-out", "2", "--max-len", "20", "-O", "max_steps=1"]
    more = {
        "pretrain": ["-O", "intermediate_size=64", "-O", "recompute_layers=true"],
        "sorted": ["-O", "intermediate_size=64", "-O", "num_hidden_layers=2", "-O", "exits=1,2"],
        "kangaroo": ["-O", "exit_layer=4"],
        "layerskip": ["-O", "judged_exit=4", "-O", "recompute_layers=true"],
        "acceptance-head": ["--draft", bundled_path("draft")],
        "specee": ["-O", "exits=4,8,12"],
    }
    assert main(["train", kind, *arguments, "-O", "batch_size=2", *more[kind]]) == 0
    said = capsys.readouterr().out
    own = {"acceptance-head": "fates predicted", "specee": "of 3 exits judged rightly"}
    assert f"{tmp_path / kind}: " in said and own.get(kind, "tokens per pass") in said
    assert (tmp_path / kind / "model.safetensors").is_file() and (tmp_path / kind / "provenance.json").is_file()
    if kind == "acceptance-head":
        assert main(["train", kind, *arguments]) == 2 and "give --draft" in capsys.readouterr().err


def test_the_fastdraft_recipe_runs_from_text_to_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes"))
    import fastdraft

    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps(f"Once there was a dog with {i} friends. They ran and ran all day.") + "\n" for i in range(40))
    )
    words = f"fastdraft --text {text} --prompts {text} --out {tmp_path} --steps 1 --align-steps 1 --max-tokens 12 --distill "
    words += "--shape hidden_size=32 num_attention_heads=2 num_key_value_heads=1 intermediate_size=32 --setting batch_size=2"
    monkeypatch.setattr("sys.argv", words.split())
    fastdraft.main()
    llm = LLM(method="draft-model", draft=str(tmp_path / "distill" / "distill"))
    assert llm.generate("Once", SamplingParams(max_tokens=4))[0].stats.num_tokens == 4
