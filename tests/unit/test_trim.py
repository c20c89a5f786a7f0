"""Reduced vocabularies: the rows that are kept say what they said, the text stays, and a trimmed draft is no target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_heads import TARGET, TEXT, packed
from test_methods import PROMPTS, serve, tokens
from tiny_heads import CHANGES, random_head
from tiny_pair import VOCAB

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.params import SamplingParams
from outrider.methods import compose
from outrider.models.heads import load_head, save_head
from outrider.models.heads.trim import trimmed
from outrider.models.load import load_model
from outrider.models.reduced import ReducedDraft
from outrider.train.data import Document
from outrider.train.vocabulary import commonest

IDS = torch.arange(1, VOCAB, 3)
STORY = "Once upon a time, there was a little girl named Lily. She had a red ball. One day, Lily and Tom went to the park."


@pytest.mark.parametrize("kind", list(CHANGES))
def test_trimmed_heads_say_what_they_said(kind: str, tmp_path: Path) -> None:
    head = random_head(kind)
    save_head(trimmed(head, IDS), tmp_path, dtype=torch.float32)
    small = load_head(tmp_path, TARGET)
    kept = IDS[torch.isin(IDS, head.target_ids)]
    assert small.config.draft_vocab_size == len(kept) < head.config.draft_vocab_size
    assert torch.equal(small.target_ids, kept)
    batch = packed([TEXT], head.config.taps)
    with torch.no_grad():
        for depth, (mine, other) in enumerate(zip(small.depths(batch, 3), head.depths(batch, 3), strict=True)):
            few = small.over_target(small.readout(depth, mine))
            all_tokens = head.over_target(head.readout(depth, other))
            torch.testing.assert_close(few[..., kept], all_tokens[..., kept], atol=1e-5, rtol=1e-5)
            assert int((few > -torch.inf).sum(-1).max()) == len(kept)


@pytest.mark.parametrize("kind", ["dspark", "eagle1"])
def test_trimmed_heads_leave_the_text_alone(kind: str, tmp_path: Path) -> None:
    save_head(trimmed(random_head(kind), IDS), tmp_path, dtype=torch.float32)
    for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.9, seed=2)):
        expected = tokens(serve(TARGET, compose("plain", TARGET), PROMPTS, params))
        method = compose(kind, TARGET, options={"heads": str(tmp_path)})
        assert tokens(serve(TARGET, method, PROMPTS, params, batch=3)) == expected


def test_frozen_rows_come_from_the_targets_folder(tmp_path: Path) -> None:
    """A folder that leaves embedding and output matrix to a tied target, with a reduced vocabulary."""
    target, bundled = bundled_path("target"), bundled_path("heads/eagle1")
    small = trimmed(load_head(bundled, ends=target), torch.arange(0, 4096, 5))
    save_head(small, tmp_path / "e", target_folder=target)
    assert "lm_head.weight" not in load_file(tmp_path / "e" / "model.safetensors")
    again = load_head(tmp_path / "e", ends=target)
    torch.testing.assert_close(again.state_dict()["lm_head.weight"], small.state_dict()["lm_head.weight"])


def test_the_command_trims_a_draft_model_and_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    more = ["--data", str(tmp_path / "story.txt"), "--tokens", "600"]
    assert main(["trim", bundled_path("draft"), *more, "--out", str(tmp_path / "draft")]) == 0
    assert main(["trim", bundled_path("heads/medusa"), *more, "--out", str(tmp_path / "medusa")]) == 0
    assert capsys.readouterr().out.count("600 of 4096 tokens, which write 100.00 % of the data") == 2
    draft = load_model(str(tmp_path / "draft"), dtype="float32")
    assert isinstance(draft, ReducedDraft) and draft.vocab_size == 4096
    prompts = [STORY[:40], STORY, "The"]
    llm = LLM(draft=str(tmp_path / "draft"), method="draft-model", dtype="float32")
    for params in (SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=0.9, seed=1)):
        expected = [out.token_ids for out in llm.generate(prompts, params, method=llm.compose("plain"))]
        for method in (llm.compose("draft-model", num_draft_tokens=4), llm.compose("medusa", heads=str(tmp_path / "medusa"))):
            outputs = llm.generate(prompts, params, method=method)
            assert [out.token_ids for out in outputs] == expected
        drafted = llm.generate(prompts, params, method=llm.compose("draft-model", num_draft_tokens=4))
        assert sum(out.stats.num_accepted for out in drafted) > 0


@pytest.mark.parametrize("method", ["draft-model", "best-first"])
def test_chains_and_trees_in_one_call_are_those_made_one_by_one(method: str, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(STORY)
    more = ["--data", str(tmp_path / "story.txt"), "--tokens", "400", "--out", str(tmp_path / "draft")]
    assert main(["trim", bundled_path("draft"), *more]) == 0
    llm = LLM(draft=str(tmp_path / "draft"), method=method, dtype="float32")
    (draft,) = llm.drafts
    assert isinstance(draft, ReducedDraft)
    if draft._guessing is None:
        pytest.skip("the native pass is not available here")
    params = [SamplingParams(max_tokens=14, temperature=warmth, seed=3) for warmth in (0.0, 0.8, 1.2)]
    prompts, found = [STORY[:40], STORY, "The"], []
    for guessing in (draft._guessing, None):
        draft._guessing = guessing
        outs = llm.generate(prompts, params, method=llm.compose(method, num_draft_tokens=4))
        found.append([(out.token_ids, out.stats.num_accepted, out.stats.num_passes) for out in outs])
    assert found[0] == found[1] and sum(accepted for _, accepted, _ in found[0]) > 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "story.txt"
    data.write_text(STORY)
    assert main(["trim", bundled_path("draft"), "--data", str(data), "--tokens", "64", "--out", str(tmp_path / "d")]) == 0
    with pytest.raises(CompositionError, match="use it as draft="):
        LLM(str(tmp_path / "d"), method="plain")
    assert main(["trim", str(tmp_path / "d"), "--data", str(data), "--tokens", "32"]) == 2
    assert main(["trim", bundled_path("draft"), "--data", str(data), "--tokens", "5000"]) == 2
    weights = load_file(tmp_path / "d" / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"] + 4000}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(ModelError, match="does not name 64 tokens of 4096"):
        load_model(str(tmp_path / "d"))
    save_file({name: tensor for name, tensor in weights.items() if name != "d2t"}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(ModelError, match="there is no tensor 'd2t'"):
        load_model(str(tmp_path / "d"))
    assert json.loads((tmp_path / "d" / "config.json").read_text())["draft_vocab_size"] == 64


def test_the_commonest_tokens_are_chosen_and_some_always() -> None:
    documents = [Document((5, 5, 5, 2, 2, 7), 0), Document((9, 9, 9, 9, 7), 4)]  # a prompt does not count
    found = commonest(documents, 3, 12, always=[11])
    assert found.ids.tolist() == [2, 5, 11] and found.coverage == pytest.approx(5 / 7)
    with pytest.raises(OptionError, match="cannot be chosen"):
        commonest(documents, 1, 12, always=[3, 4])
