"""LongSpec on a played device: a request that outgrows its ring of pages says and guesses what it does on the host."""

from __future__ import annotations

import pytest
from triton_interpreter import DEVICE

from outrider.acceptance.coupled import Coupled
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.device.drafters.heads.longspec import DeviceLongSpec
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.longspec import LongSpec
from outrider.models.gpu import replay
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.heads.longspec import LongSpecHead
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.policies.fixed import Fixed, FixedOptions

if DEVICE.type == "cuda":
    pytest.skip("the device is played on a CPU", allow_module_level=True)

from played_device import play, played
from test_device_heads import SHAPE, small_head

from outrider.cuda_graphs import captured

CONFIG = tiny_config(**SHAPE)


def test_texts_and_guesses_past_the_ring_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_ROWS", 0)  # the host's passes are not captured
    target = FastDecoder(CONFIG, tiny_weights(CONFIG), numerics="invariant")
    target.pool.hold(128)
    play(monkeypatch)
    head = small_head("longspec")
    assert isinstance(head, LongSpecHead)
    drafter = LongSpec(head, HeadOptions(branching="chain"))
    method = Method(drafter, Coupled(), Fixed(FixedOptions(2)))
    graphs = captured(method, target)
    assert graphs is not None and isinstance(graphs.drafter, DeviceLongSpec)
    requests = [
        Request([(7 * place) % 61 for place in range(120)], SamplingParams(max_tokens=12, temperature=0.9, seed=3)),
        Request([2, 7, 7], SamplingParams(max_tokens=6, temperature=0.0)),
    ]
    device = played(target, method, requests, graphs)
    host = played(target, method, requests, None)
    assert (device.texts, device.num_passes, device.num_accepted) == (host.texts, host.num_passes, host.num_accepted)
    assert sum(host.num_drafted) > 0, "or nothing was compared"
