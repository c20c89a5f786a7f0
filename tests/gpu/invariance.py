"""What holds in invariant numerics on a device, for any storage of keys: bits and texts that depend on nothing else."""

from __future__ import annotations

from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.core.tree import TokenTree

PROMPTS = ["Once upon a time", "Tom and Lily went to the park. Tom and Lily", "One day, a girl named Mia found", "The old man"]


def assert_nodes_score_as_their_paths(target: Any, length: int, *, num_nodes: int, every: int) -> None:
    """A node of a random tree behind a prompt of so many tokens has the scores of one-token decoding along its path."""
    draw = torch.Generator().manual_seed(length)
    prompt = [(place * 37) % 4000 + 5 for place in range(length)]
    parents = [-1, *(int(torch.randint(0, node, (), generator=draw)) for node in range(1, num_nodes))]
    tokens = [(node * 91) % 4000 + 5 for node in range(num_nodes)]
    tree = TokenTree.of_rows([(tokens, parents)], target.device)
    cache = target.new_cache(1)
    target.prefill([prompt], cache)
    whole = target.score(tree, cache).logits[0]
    for node in range(1, num_nodes, every):
        alone = target.new_cache(1)
        target.prefill([prompt], alone)
        one = whole[0]
        for step in (0, *tree.path(0, node)):
            one = target.score(TokenTree.chain(tree.tokens[:, step : step + 1]), alone).logits[0, 0]
            alone.commit([[0]])
        assert torch.equal(one, whole[node]), node


def assert_scores_do_not_depend_on_the_pass(target: Any, num_nodes: int) -> None:
    """A chain beside another row has the scores of one-token decoding."""
    prompt, tokens = [5, 6, 7, 8, 9] * 60, [(i * 91) % 4000 for i in range(num_nodes)]
    cache = target.new_cache(2)
    target.prefill([prompt, prompt[:17]], cache)
    whole = target.score(TokenTree.chain(torch.tensor([tokens, tokens], device="cuda")), cache).logits[0]
    alone = target.new_cache(1)
    target.prefill([prompt], alone)
    for node in range(min(num_nodes, 12)):
        one = target.score(TokenTree.chain(torch.tensor([[tokens[node]]], device="cuda")), alone).logits[0, 0]
        alone.commit([[0]])
        assert torch.equal(one, whole[node]), node


def assert_text_does_not_depend_on_how_prompts_are_cut(llm: LLM, name: str, options: dict[str, Any]) -> None:
    """More requests than slots, of 2 to 300 tokens: whoever comes later is read inside the rounds of the others."""
    words = llm.codec.encode(" ".join(PROMPTS) + " ") * 12
    prompts = [words[start : start + size] for start, size in enumerate((2, 300, 33, 65, 7, 150, 32, 34, 90, 3, 210, 64))]
    params = [SamplingParams(max_tokens=9 + 5 * (n % 4), temperature=0.8 * (n % 2), seed=n) for n in range(len(prompts))]
    plain = llm.compose("plain")
    expected = [llm.generate(p, q, method=plain, trace=True)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    llm.max_batch_size, old = 4, llm.max_batch_size
    try:
        got = llm.generate(prompts, params, method=llm.compose(name, **options))
    finally:
        llm.max_batch_size = old
    assert [output.token_ids for output in got] == expected
