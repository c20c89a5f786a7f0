"""Part of the target drafts inside captured rounds: the texts are plain decoding's, the guesses those of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.acceptance.coupled import Coupled
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.device.drafters.heads.slots import DeviceHeads
from outrider.drafters.itself.kangaroo import AdaptedKangaroo, KangarooOptions
from outrider.engine.captured_rounds import RoundGraphs
from outrider.methods import compose
from outrider.models.adapter import Adapter
from outrider.models.gpu import replay
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights

if DEVICE.type == "cuda":
    pytest.skip("the device is played on a CPU", allow_module_level=True)

from played_device import play, played

from outrider.cuda_graphs import captured

CONFIG = tiny_config(num_hidden_layers=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("early-exit", {"exit_layer": 1, "num_draft_tokens": 3}),
        ("early-exit", {"exit_layer": 1, "branching": (2, 2), "num_draft_tokens": 2, "num_tree_nodes": 6}),
        ("kangaroo", {"exit_layer": 1, "num_draft_tokens": 3, "threshold": 0.2}),
        ("draft-verify", {"skip_mlp": (1,), "adapt": False, "threshold": 0.1, "num_draft_tokens": 2}),
        ("swift", {"max_trials": 0, "threshold": 0.1, "num_draft_tokens": 2}),
    ],
)
def test_texts_and_guesses_are_the_hosts(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_ROWS", 0)  # the host's passes are not captured
    target = FastDecoder(CONFIG, tiny_weights(CONFIG), numerics="invariant")
    target.pool.hold(128)
    play(monkeypatch)
    method = compose(name, target, policy="fixed", options=options)
    graphs = captured(method, target)
    assert graphs is not None and graphs.beside is None and type(graphs.drafter).__name__ == "DeviceExit"
    compare(target, method, graphs)


def compare(target: FastDecoder, method: Method, graphs: RoundGraphs) -> None:
    requests = [
        Request([1, 5, 9, 2], SamplingParams(max_tokens=8, temperature=0.9, seed=3)),
        Request([2, 7, 7], SamplingParams(max_tokens=6, temperature=0.0)),
    ]
    device, host = played(target, method, requests, graphs), played(target, method, requests, None)
    assert device.texts == host.texts and device.num_passes == host.num_passes
    assert sum(host.num_accepted) > 0, "or nothing was compared"


def test_an_adapter_keeps_its_keys_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_ROWS", 0)
    torch.manual_seed(0)
    target = FastDecoder(CONFIG, tiny_weights(CONFIG), numerics="invariant")
    target.pool.hold(128)
    raw = {
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": CONFIG.max_len,
        "vocab_size": CONFIG.vocab_size,
    }
    adapter = Adapter(raw, exit_layer=1).requires_grad_(False)
    torch.nn.init.normal_(adapter.layer.self_attn.o_proj.weight, std=0.1)
    play(monkeypatch)
    policy = compose("kangaroo", target, policy="fixed", options={"num_draft_tokens": 3}).policy
    method = Method(AdaptedKangaroo(target, adapter, KangarooOptions(threshold=0.1)), Coupled(), policy)
    graphs = captured(method, target)
    assert graphs is not None and isinstance(graphs.drafter, DeviceHeads) and graphs.drafter.taps == (1,)
    pages = graphs.drafter._memory.pages
    assert pages is not None
    pages.pool.hold(64)
    compare(target, method, graphs)
