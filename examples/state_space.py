"""A Mamba-2 target with a Mamba-2 draft: the texts of plain decoding, and what the cache keeps instead of a state per node."""

import tempfile
from pathlib import Path

from outrider import LLM, CompositionError, SamplingParams
from outrider.cache.recurrent import RecurrentCache
from outrider.models.recurrent.random_model import tiny_raw, write_random

with tempfile.TemporaryDirectory() as name:  # random weights; a folder from the Hugging Face hub is opened the same way
    target, draft = Path(name, "target"), Path(name, "draft")
    write_random(target, tiny_raw("mamba2", state_size=64))
    write_random(draft, tiny_raw("mamba2", state_size=64), noise=0.1)
    llm = LLM(target, draft=draft, method="best-first", device="cpu", dtype="float32", num_tree_nodes=16)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=5, ignore_eos=True)
    prompt = [5, 17, 42, 17, 42]
    plain = llm.generate([prompt], params, method="plain")[0]
    for method in ("best-first", "draft-model", "suffix"):
        output = llm.generate([prompt], params, method=llm.compose(method, num_draft_tokens=5))[0]
        assert output.token_ids == plain.token_ids
        print(f"{method:<12}{output.stats.num_passes:>4} passes for the same {len(output.token_ids)} tokens")

    cache = llm.target.new_cache(1)
    assert isinstance(cache, RecurrentCache)
    replay, snapshots = 16 * cache.node_bytes, cache.snapshot_bytes(16)
    print(f"a tree of 16 nodes takes {replay:,} bytes; a state after every node would take {snapshots:,}")
    try:
        llm.compose("early-exit")
    except CompositionError as error:
        print(f"refused: {error}")
