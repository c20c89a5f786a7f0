"""The recipes that race smaller drafts: what they make before they measure, and that nothing changes the text."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from test_train import CORPUS, TARGET

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.train.draft_lm import DraftLM
from outrider.train.features import DocumentRows, compute

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import in_turns
import s2d_targets
import smaller_drafts


def test_a_grown_draft_says_the_same_at_every_exit(tmp_path: Path) -> None:
    s2d_targets.grown(bundled_path("draft"), 3, tmp_path)
    old, new = (DraftLM.load(folder, torch.device("cpu")) for folder in (bundled_path("draft"), str(tmp_path)))
    documents = CORPUS.held_out[:2]
    batch = DocumentRows(compute(TARGET, documents, ()), documents, row_len=48, last=2).packed(())
    with torch.no_grad():
        (wanted,), found = old.climb(batch), list(new.climb(batch))
    assert len(found) == 3 and all(torch.equal(states, wanted) for states in found)
    assert any(parameter.any() for parameter in new.model.layers[2].self_attn.parameters()), "the new layers can learn"


def test_methods_in_turns_write_one_text_and_are_timed() -> None:
    llm = LLM(method="draft-model", dtype="float32")
    plain = in_turns.Timed(llm, llm.compose("plain"))
    drafting = in_turns.Timed(llm, llm.compose("draft-model", policy="fixed", num_draft_tokens=3))
    in_turns.race(plain, {"drafting": drafting}, [llm.codec.encode("Once upon a time")], 12)
    assert plain.num_tokens == drafting.num_tokens == 12 and plain.tokens_per_pass == 1 < drafting.tokens_per_pass
    assert plain.speed > 0 < drafting.speed and drafting.draft_ms > 0


def test_matrices_that_a_head_borrows_count() -> None:
    folder = bundled_path("heads/eagle1")
    whole, rounded = (smaller_drafts.head_megabytes(folder, bits) for bits in (16, 8))
    borrowed = 2 * 4096 * 256 / 1e6
    assert whole > borrowed and borrowed < rounded < borrowed + 0.6 * (whole - borrowed)
