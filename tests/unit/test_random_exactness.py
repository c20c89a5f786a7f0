"""benchmarks/random_exactness.py in a small, fixed size: random models are equal or refused, random samplers change nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import repeats

from outrider import LLM
from outrider.bench.provenance import results_head

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_exactness
from random_models import KINDS, small_model

EMPTY: dict[str, Any] = {"models": {}, "reasons": {}, "samplers": 0, "different": {}, "asked": 0}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "cohere", "olmo2", "gptj", "starcoder2", "big_bird", "whisper"])
def test_a_random_model_is_equal_to_generate(kind: str) -> None:
    assert random_exactness.outcome_of(kind, seed=0).startswith("equal: ")


def test_a_model_with_an_encoder_beside_reads_its_text_layers() -> None:
    """Its vision encoder has as many layers as its decoder, and comes first."""
    assert random_exactness.outcome_of("git", seed=0) == "equal: HFModel"


@pytest.mark.parametrize(("kind", "reason"), [("bloom", "ALiBi"), ("mamba", "cannot score trees")])
def test_a_random_model_that_cannot_be_used_is_refused(kind: str, reason: str) -> None:
    outcome = random_exactness.outcome_of(kind, seed=0)
    assert outcome.startswith("refused: ") and reason in outcome


def test_a_difference_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_exactness, "generated", lambda model: [[1] * random_exactness.NUM_TOKENS] * 3)
    assert random_exactness.outcome_of("gpt2", seed=0).startswith("DIFFERENT")


def test_neither_equal_nor_refused_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a shape")

    monkeypatch.setattr(random_exactness, "written", broken)
    assert random_exactness.outcome_of("gpt2", seed=0) == "FAILED: RuntimeError: a shape"


def test_random_samplers_write_the_text_of_plain_decoding() -> None:
    llm = LLM(dtype="float32", device="cpu")
    assert all(random_exactness.try_sampler(llm, number) == [] for number in repeats(1, of=4))


def test_a_sampler_that_differs_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(dtype="float32", device="cpu")
    generate = llm.generate

    def shorter(prompts: Any, params: Any, *, method: str) -> Any:
        return generate(
            prompts[:1] if method == "suffix" else prompts, params[:1] if method == "suffix" else params, method=method
        )

    monkeypatch.setattr(llm, "generate", shorter)
    assert random_exactness.try_sampler(llm, 0) == ["suffix"]


def test_shards_are_all_cases_once() -> None:
    every = random_exactness.cases(range(2), 5, (0, 1))
    shards = [case for index in range(3) for case in random_exactness.cases(range(2), 5, (index, 3))]
    assert sorted(shards) == sorted(every) and len(every) == 2 * len(KINDS) + 5


def test_the_results_file_counts_every_shard(tmp_path: Path) -> None:
    one = {**EMPTY, "models": {"gpt2": {"equal": 2}}, "reasons": {"gpt2 equal": "HFModel"}, "samplers": 3}
    two = {**EMPTY, "models": {"gpt2": {"DIFFERENT": 1}}, "reasons": {"gpt2 7 DIFFERENT": "plain"}, "different": {"suffix": 1}}
    result = random_exactness.merged([one, two])
    random_exactness.write(tmp_path / "out.json", result, results_head("a test", script="tests"))
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0] == {"architectures": 1, "equal": 2, "DIFFERENT": 1}
    assert document["rows"][1]["sampler sets"] == 3 and document["rows"][1]["different"] == {"suffix": 1}
    assert document["rows"][2]["why"] == {"equal": "HFModel", "7 DIFFERENT": "plain"}
    assert {"command", "machine", "date", "commit", "what"} < document.keys()
    random_exactness.join([tmp_path / "out.json"] * 2, tmp_path / "both.json")
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["rows"][0] == {"architectures": 1, "equal": 4, "DIFFERENT": 2}
    assert both["rows"][2]["why"] == document["rows"][2]["why"] and both["command"].count(document["command"]) == 2


def test_what_transformers_cannot_run_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[int] = []

    def sometimes(kind: str, seed: int, draw: int) -> Any:
        draws.append(draw)
        if draw < 2:
            raise RuntimeError("sizes that do not fit")
        return small_model(kind, seed, draw)

    monkeypatch.setattr(random_exactness, "small_model", sometimes)
    assert random_exactness.outcome_of("gpt2", seed=0).startswith("equal") and draws == [0, 1, 2]


@pytest.mark.parametrize("kind", ["deepseek_v2", "codegen", "falcon_h1"])
def test_architectures_with_sizes_of_their_own_are_built(kind: str, tmp_path: Path) -> None:
    assert random_exactness.saved_model(kind, 0, str(tmp_path)).config.model_type == kind


def test_the_padding_row_is_empty_as_transformers_makes_it() -> None:
    """Some architectures empty it when a folder is opened, so a filled one would not be what was saved."""
    model = small_model("youtu", 111)
    assert not model.model.embed_tokens.weight[0].any() and model.model.embed_tokens.weight[1].any()
