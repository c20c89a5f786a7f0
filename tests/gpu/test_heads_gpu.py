"""Trained heads in captured rounds on a CUDA device: the text of plain decoding, the acceptance of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.cuda_graphs import captured
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import new_config, new_head, save_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = ["Once upon a time", "Tom and Lily went to the park. Tom and Lily", "One day, a girl named Mia found", "The old man"]
PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=7),
    SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=7),
]
TREES: list[dict[str, Any]] = [
    {"branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15},
    {"num_draft_tokens": 4, "num_tree_nodes": 31},
]
CHANGES: dict[str, dict[str, Any]] = {
    "hydra": {"num_heads": 4, "num_blocks": 2, "prefix": False},
    "dflash": {"num_heads": 4, "num_layers": 2, "mask_token_id": 3},
    "dspark": {"num_heads": 4, "num_layers": 2, "mask_token_id": 3, "markov_rank": 16, "markov_head_type": "rnn"},
    "l-mtp": {"num_heads": 4, "stride": 2},
    "mlp-speculator": {"num_heads": 4},
    "redrafter": {"num_blocks": 2},
    "fspad": {},
    "p-eagle": {"num_heads": 4, "num_layers": 2, "mask_token_id": 3},
    "mtp": {"num_heads": 4},
    "mtp-parallel": {"num_heads": 4},
    "chimera": {"num_heads": 4},
    "falcon": {"block_len": 2},
    "longspec": {"draft_window": 16},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cuda", numerics="invariant")


def untrained(kind: str, folder: Path) -> str:
    """Heads of the bundled target that begin with its embedding and output matrix."""
    raw, ends = read_target(bundled_path("target"))
    save_head(new_head(new_config(kind, raw, **CHANGES[kind]), ends), folder, dtype=torch.bfloat16)
    return str(folder)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("options", TREES, ids=["static", "best-first"])
@pytest.mark.parametrize("kind", ["medusa", "hydra++", *CHANGES])
def test_heads_in_captured_rounds_say_what_plain_decoding_says(
    llm: LLM, kind: str, options: dict[str, Any], params: SamplingParams, tmp_path: Path
) -> None:
    expected = [llm.generate(p, params, method=llm.compose("plain"))[0].token_ids for p in PROMPTS]
    own = {"heads": untrained(kind, tmp_path)} if kind in CHANGES else {}
    method = llm.compose(kind.rstrip("+"), **options, **own)  # the bundled Hydra has a prefix layer
    assert captured(method, llm.target) is not None
    assert llm.generate(PROMPTS[0], params, method=method)[0].token_ids == expected[0]
    batch = llm.generate(PROMPTS, params, method=method)
    assert [o.token_ids for o in batch] == expected
    engine = llm.generate(PROMPTS, params, method=method, trace=True)
    assert [o.token_ids for o in engine] == expected
    ours, theirs = (sum(o.stats.num_accepted for o in outputs) for outputs in (batch, engine))
    assert abs(ours - theirs) <= 0.05 * theirs + 3  # the same trees, walked the same way


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dspark", "p-eagle", "mtp", "longspec"])
def test_chains_of_heads_change_their_length_inside_captured_rounds(llm: LLM, kind: str, tmp_path: Path) -> None:
    """The policy asks for as many guesses as pay; heads answer for no more levels."""
    own = {"heads": untrained(kind, tmp_path)} if kind in CHANGES else {}
    method = llm.compose(kind, policy="heuristic", branching="chain", num_draft_tokens=3, **own)
    graphs = captured(method, llm.target)
    assert graphs is not None and graphs.drafter is not None and graphs.depths[:4] == [0, 1, 2, 3]
    for params in PARAMS:
        expected = [llm.generate(p, params, method=llm.compose("plain"))[0].token_ids for p in PROMPTS]
        assert [o.token_ids for o in llm.generate(PROMPTS, params, method=method)] == expected


@pytest.mark.parametrize("kind", ["medusa", "hydra", "fspad", "p-eagle", "mtp", "chimera", "falcon", "longspec"])
def test_heads_read_prompts_inside_rounds(llm: LLM, kind: str, tmp_path: Path) -> None:
    """More requests than slots, of 2 to 300 tokens."""
    own = {"heads": untrained(kind, tmp_path)} if kind in CHANGES and kind != "hydra" else {}
    words = llm.codec.encode(" ".join(PROMPTS) + " ") * 12
    prompts = [words[start : start + size] for start, size in enumerate((2, 300, 33, 65, 7, 150, 32, 34))]
    params, method = SamplingParams(max_tokens=20), llm.compose(kind, **TREES[1], **own)
    expected = [llm.generate(p, params, method=llm.compose("plain"))[0].token_ids for p in prompts]
    alone = sum(llm.generate(p, params, method=method)[0].stats.num_accepted for p in prompts)
    llm.max_batch_size, old = 2, llm.max_batch_size
    try:
        got = llm.generate(prompts, params, method=method)
    finally:
        llm.max_batch_size = old
    assert [o.token_ids for o in got] == expected
    assert abs(sum(o.stats.num_accepted for o in got) - alone) <= 0.05 * alone + 3
