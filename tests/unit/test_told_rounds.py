"""Rules without coupled noise in captured rounds: the texts are those of the host for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
from triton_interpreter import DEVICE

from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.methods import compose
from outrider.models.gpu import replay
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights

if DEVICE.type == "cuda":
    pytest.skip("the device is played on a CPU", allow_module_level=True)

from played_device import play, played

from outrider.cuda_graphs import captured

CONFIG = tiny_config(num_hidden_layers=1)


def fast(seed: int) -> FastDecoder:
    model = FastDecoder(CONFIG, tiny_weights(CONFIG, seed=seed), numerics="invariant")
    model.pool.hold(128)
    return model


@pytest.mark.parametrize(
    ("name", "acceptance", "options"),
    [
        ("draft-model", "rejection", {"num_draft_tokens": 3}),
        ("draft-tree", "traversal", {"branching": (2, 2)}),
        ("prompt-lookup", "delta", {"num_draft_tokens": 2}),
        ("draft-model", "typical", {"num_draft_tokens": 2}),
    ],
)
def test_texts_are_the_hosts(name: str, acceptance: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_ROWS", 0)  # the host's passes are not captured
    target, draft = fast(0), fast(1) if name != "prompt-lookup" else None
    play(monkeypatch)
    method = compose(name, target, draft=draft, policy="fixed", options=options, acceptance=acceptance)
    graphs, prompt = captured(method, target), [5, 9, 2, 5, 9]
    assert graphs is not None
    requests = [
        Request([1, *prompt], SamplingParams(max_tokens=7, temperature=0.8, seed=3)),
        Request([2, *prompt], SamplingParams(max_tokens=5, temperature=0.0)),
        Request([3, *prompt], SamplingParams(max_tokens=6, temperature=1.2, top_k=9, seed=5, logprobs=1)),
    ]
    device, host = played(target, method, requests, graphs), played(target, method, requests, None)
    assert device == host
