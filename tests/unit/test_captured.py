"""Which methods run as captured rounds: decided by what their parts declare."""

from __future__ import annotations

from typing import Any

import pytest
from triton_interpreter import DEVICE

from outrider.captured import captured
from outrider.core.interfaces import Target
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights

CONFIG = tiny_config()


def fast() -> FastDecoder:
    return FastDecoder(CONFIG, tiny_weights(CONFIG, device=str(DEVICE)))


@pytest.mark.parametrize(
    ("name", "policy", "options", "twin"),
    [
        ("plain", "fixed", {}, None),
        ("prompt-lookup", "fixed", {}, "DeviceLookup"),
        ("prompt-lookup", "adaptive", {}, "DeviceLookup"),
        ("draft-model", "fixed", {}, "DeviceChain"),
        ("draft-model", "adaptive", {}, "DeviceChain"),
        ("draft-model", "heuristic", {}, "DeviceChain"),
        ("draft-tree", "fixed", {}, "DeviceTree"),
        ("draft-tree", "adaptive", {}, "DeviceTree"),
        ("best-first", "fixed", {}, "DeviceBestFirst"),
        ("best-first", "adaptive", {}, "DeviceBestFirst"),
    ],
)
def test_parts_with_twins_are_captured(name: str, policy: str, options: dict[str, Any], twin: str | None) -> None:
    target, draft = fast(), fast()
    needs_draft = name.startswith(("draft", "best"))
    graphs = captured(compose(name, target, draft=draft if needs_draft else None, policy=policy, options=options), target)
    assert graphs is not None
    assert (None if graphs.drafter is None else type(graphs.drafter).__name__) == twin


@pytest.mark.parametrize(
    ("name", "policy", "options", "acceptance"),
    [
        ("draft-model", "confidence", {}, None),  # asks while it drafts
        ("draft-model", "fixed", {}, "rejection"),
        ("best-first", "fixed", {"perturb": False}, None),
        ("suffix", "fixed", {}, None),
        ("jacobi", "fixed", {}, None),
    ],
)
def test_other_parts_run_on_the_host(name: str, policy: str, options: dict[str, Any], acceptance: str | None) -> None:
    target = fast()
    draft: Target | None = fast() if name.startswith(("draft", "best")) else None
    method = compose(name, target, draft=draft, policy=policy, options=options, acceptance=acceptance)
    assert captured(method, target) is None


def test_plain_decoders_are_not_captured() -> None:
    target = Decoder(CONFIG, tiny_weights(CONFIG))
    assert captured(compose("plain", target), target) is None
    mixed = compose("draft-model", fast(), draft=target)
    assert captured(mixed, fast()) is None
