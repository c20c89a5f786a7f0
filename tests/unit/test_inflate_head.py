"""recipes/inflate_head.py: the inflated head says what the small one says, on the inflated target."""

from __future__ import annotations

import torch
from test_inflate import CPU, SMALL

from inflate import inflated_weights  # isort: skip  (its folder is put on the path by test_inflate)
from inflate_head import inflated_eagle3  # isort: skip

from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.drafters.heads.eagle import Eagle
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.heads import load_head
from outrider.models.heads.eagle import EagleHead
from outrider.models.load import load_model

PROMPT = [11, 402, 97, 1033, 250, 18, 77]


def test_the_inflated_head_is_accepted_as_the_small_one() -> None:
    """Same text, same passes, both greedy and sampled."""
    shape = SMALL.__class__(**{**vars(SMALL), "mlp": 1300})
    small = load_model(bundled_path("target"), dtype="float32", device="cpu", fast=False)
    config, weights = inflated_weights(bundled_path("target"), shape, dtype=torch.float32, device=CPU)
    big_head = inflated_eagle3(shape, weights.embedding, dtype=torch.float32, device=CPU, num_tokens=2800)
    small_head = load_head(bundled_path("heads/eagle3"), small)
    assert isinstance(small_head, EagleHead)
    found = []
    for target, head in ((small, small_head), (Decoder(config, weights), big_head)):
        plain = compose("plain", target, options={"num_draft_tokens": 4})
        method = type(plain)(Eagle(head), plain.rule, plain.policy)
        requests = [
            Request(PROMPT, SamplingParams(max_tokens=16)),
            Request(PROMPT, SamplingParams(max_tokens=16, temperature=0.8, seed=1)),
        ]
        steps = run(Engine(target, method), requests, max_batch_size=2)
        found.append([(p.state.output_ids, p.state.stats.num_passes) for p in steps if p.state.is_finished])
    assert found[0] == found[1] and found[0][0][1] < 16
