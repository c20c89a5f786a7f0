"""The program that measures the CPU path: floors, what a page shows, and engines that agree."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from outrider.bundled import bundled_path
from outrider.models.load import load_model
from outrider.models.native import NativeDecoder
from outrider.models.native.instruction_sets import X86, isa_here

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]
import cpu_costs  # noqa: E402  # pyright: ignore
from cpu import brief  # noqa: E402  # pyright: ignore
from cpu_costs import Rates, layer_weights, num_weights, products_at_once, prompt_of  # noqa: E402  # pyright: ignore
from cpu_engines import Ours  # noqa: E402  # pyright: ignore


def test_a_floor_is_the_larger_of_two_times() -> None:
    rates = Rates(bytes_read=100.0, multiply_adds=10.0)
    assert rates.floor_ms(400, 20, at_once=1) == 4
    assert rates.floor_ms(400, 80, at_once=1) == 8 and rates.floor_ms(400, 80, at_once=2) == 4


def test_sets_differ_in_how_much_they_multiply_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types: whole numbers, floats of 16 bits as stored or in tiles, bfloat16, float32."""
    asked, at_once = (("auto", 0.6), ("auto", 2.0), ("bfloat16", 2.0), ("float32", 4.0)), {}
    for isa in X86:
        monkeypatch.setattr(cpu_costs, "isa_here", lambda isa=isa: isa)
        at_once[isa.name] = [products_at_once(*each) for each in asked]
    assert at_once["amx"] == [32, 16, 16, 1] and at_once["avx512_vnni"] == [4, 1, 1, 1]
    assert at_once["avx512_bf16"] == [4, 1, 0.5, 1]
    assert at_once["avx512"] == at_once["avx2"] == [cpu_costs.SHORT_SUMS["avx2"], 1, 1, 1]
    assert at_once["generic"] == [1, 1, 1, 1]


def test_a_page_shows_the_ratios_of_a_row() -> None:
    row = {"model": "m", "engine": "ours stored", "token_ms": 2.0, "token_ms_median": 3.0, "pass_ms": {1: 2.0, 4: 3.0, 16: 8.0}}
    row |= {"16_over_1": 4.0, "floor_ms": {1: 1.0}, "floor_16_over_1": 5.0, "file_mb": 100.0, "after_prompt_mb": 130}
    shown = brief(row)
    assert shown["token, ms"] == 2.0 and shown["memory over file"] == 1.3 and shown["floor, ms"] == 1.0
    assert brief({"model": "m", "engine": "ours, suffix", "token_ms_median": 3.0, "plain_over_it": 2.0})["plain over it"] == 2.0


@pytest.fixture(scope="module")
def model() -> NativeDecoder:
    found = load_model(str(bundled_path("draft")), dtype="float32", device="cpu")
    if not isinstance(found, NativeDecoder):
        pytest.skip("no native pass")
    return found


def test_weights_are_counted_as_they_are_packed(model: NativeDecoder) -> None:
    size = 2 if isa_here().reads_halves else 4  # the checkpoint is in bfloat16
    assert model.num_bytes == pytest.approx(size * num_weights(model.config), rel=0.02)
    config = model.config
    assert (
        num_weights(config) - layer_weights(config) == config.hidden_size * config.vocab_size
    )  # of a prompt's last token alone


def test_our_engine_decodes_greedily(model: NativeDecoder) -> None:
    prompt = prompt_of(6)
    tokens = list(islice(Ours(model).tokens(prompt), 3))
    assert tokens == Ours(model).run(prompt, 3).tokens and len(Ours(model).run(prompt, 3).token_ms) == 2
    assert list(islice(Ours(model).tokens([*prompt, tokens[0]]), 2)) == tokens[1:]
