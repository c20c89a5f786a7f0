"""Device "mps": passes there and the rest of a round on the host, on a stand-in that refuses float64 and mixed devices."""

from __future__ import annotations

import pytest
import torch
from passes_device import NAME, Away, PassesDevice, tensor

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models import host_side
from outrider.models.host_side import LayersAway
from outrider.models.load import load_model

METHODS = ("plain", "best-first", "prompt-lookup")


def test_a_machine_without_it_says_so() -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(OptionError, match=r"device 'mps' is not available .*use cpu"):
        load_model(bundled_path("draft"), device="mps")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> PassesDevice:
    monkeypatch.setattr(host_side, "_PASSES_ONLY", {NAME})
    monkeypatch.setattr(torch, "tensor", tensor)
    return PassesDevice()


def test_scores_come_back_to_the_host(stand_in: PassesDevice) -> None:
    tree = TokenTree.of_rows([([5, 7, 3, 9], [-1, 0, 0, 1]), ([8, 2], [-1, 0])])
    with stand_in:
        model = load_model(bundled_path("draft"), device=NAME)
        assert isinstance(model, LayersAway) and model.device.type == "cpu" and model.inner.device.type == NAME
        cache = model.new_cache(2)
        taps = model.prefill([[1, 2, 3], [4]], cache, taps=(1,))
        scores = model.score(tree, cache, taps=(1,))
    assert not any(isinstance(one, Away) for one in (scores.logits, scores.taps[1], *taps[1]))
    twin = load_model(bundled_path("draft"), device="cpu", dtype="float32", fast=False)
    cache = twin.new_cache(2)
    twin.prefill([[1, 2, 3], [4]], cache)
    valid = tree.valid
    torch.testing.assert_close(scores.logits[valid], twin.score(tree, cache).logits[valid], rtol=1e-4, atol=1e-4)
    assert any("mm" in name for name in stand_in.operators), "nothing was multiplied there"


def test_speculative_text_is_plain_text(stand_in: PassesDevice) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.9, top_p=0.9, seed=4)
    with stand_in:
        llm = LLM(bundled_path("draft"), draft=bundled_path("draft"), device=NAME, policy="fixed")
        texts = [llm.generate("Once upon a time", params, method=llm.compose(name))[0].token_ids for name in METHODS]
    assert all(text == texts[0] for text in texts)
