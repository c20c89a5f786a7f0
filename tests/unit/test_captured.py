"""Which methods run as captured rounds: decided by what their parts declare."""

from __future__ import annotations

from typing import Any

import pytest
from triton_interpreter import DEVICE

from outrider.core.interfaces import Target
from outrider.cuda_graphs import captured
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
        ("suffix", "fixed", {}, "BetweenRounds"),
        ("suffix", "adaptive", {"tree": True, "num_tree_nodes": 30}, "BetweenRounds"),
        ("ngram-cache", "adaptive", {}, "BetweenRounds"),
        ("reference", "adaptive", {}, "BetweenRounds"),
        ("token-recycling", "adaptive", {}, "BetweenRounds"),
        ("jacobi", "fixed", {}, "BetweenRounds"),
        ("lookahead", "adaptive", {}, "BetweenRounds"),
        ("hybrid", "adaptive", {}, "BetweenRounds"),
        ("draft-model", "fixed", {}, "DeviceChain"),
        ("draft-model", "adaptive", {}, "DeviceChain"),
        ("draft-model", "heuristic", {}, "DeviceChain"),
        ("draft-tree", "fixed", {}, "DeviceTree"),
        ("draft-tree", "adaptive", {}, "DeviceTree"),
        ("best-first", "fixed", {}, "DeviceBestFirst"),
        ("best-first", "adaptive", {}, "DeviceBestFirst"),
        ("best-first", "fixed", {"perturb": False}, "BetweenRounds"),
        ("early-exit", "fixed", {"exit_layer": 1}, "DeviceExit"),
        ("kangaroo", "adaptive", {"exit_layer": 1}, "DeviceExit"),
    ],
)
def test_parts_with_twins_are_captured(name: str, policy: str, options: dict[str, Any], twin: str | None) -> None:
    target, draft = fast(), fast()
    needs_draft = name.startswith(("draft", "best", "hybrid"))
    graphs = captured(compose(name, target, draft=draft if needs_draft else None, policy=policy, options=options), target)
    assert graphs is not None
    assert (None if graphs.drafter is None else type(graphs.drafter).__name__) == twin


@pytest.mark.parametrize(
    ("name", "policy", "options", "acceptance"),
    [
        ("draft-model", "confidence", {}, None),  # asks while it drafts
        ("del", "fixed", {}, None),  # leaves at another layer from round to round
        ("early-exit", "fixed", {"exit_layer": 1}, "rejection"),  # runs layers of the target, and its rule walks on the host
    ],
)
def test_other_parts_run_on_the_host(name: str, policy: str, options: dict[str, Any], acceptance: str | None) -> None:
    target = fast()
    draft: Target | None = fast() if name.startswith(("draft", "best")) else None
    method = compose(name, target, draft=draft, policy=policy, options=options, acceptance=acceptance)
    assert captured(method, target) is None


@pytest.mark.parametrize(
    ("name", "options", "acceptance"),
    [
        ("draft-model", {}, "rejection"),
        ("prompt-lookup", {}, "delta"),
        ("rsd-s", {}, "recursive"),
        ("draft-model", {}, "typical"),
    ],
)
def test_rules_without_a_twin_walk_on_the_host(name: str, options: dict[str, Any], acceptance: str) -> None:
    target, draft = fast(), fast() if name != "prompt-lookup" else None
    method = compose(name, target, draft=draft, policy="fixed", options=options, acceptance=acceptance)
    graphs = captured(method, target)
    assert graphs is not None and graphs.beside is not None and graphs.beside.rule is method.rule


def test_plain_decoders_are_not_captured() -> None:
    target = Decoder(CONFIG, tiny_weights(CONFIG))
    assert captured(compose("plain", target), target) is None


def test_a_draft_model_that_is_not_captured_runs_between_rounds() -> None:
    mixed = compose("draft-model", fast(), draft=Decoder(CONFIG, tiny_weights(CONFIG)))
    graphs = captured(mixed, fast())
    assert graphs is not None and graphs.beside is not None and graphs.beside is graphs.drafter
