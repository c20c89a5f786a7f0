"""The grouped product of a mixture of experts against ``models/experts.py``, through Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.models.decoder import _mlp_of
from outrider.models.experts import chosen_experts
from outrider.models.features import Experts
from outrider.models.gpu import experts as grouped
from outrider.models.linear import linear_of
from outrider.models.random_decoder import tiny_config, tiny_weights

GROUPS = {
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
    "topk_method": "group_limited_greedy",
}
SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 3}


@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_experts_add_what_the_oracle_adds(family: str, num_rows: int) -> None:
    """Weights that add up to 1 and weights that do not; biases and the clamped gate; groups of experts, a correction, and
    an MLP beside them; one node, some, more than a block's."""
    config = tiny_config(family, **{**SIZES, **(GROUPS if family.startswith("deepseek") else {})})
    weights = tiny_weights(config, device=str(DEVICE)).layers[0]
    x = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert config.experts is not None
    found = grouped.experts_mlp(x, weights, config.experts, activation=config.activation, exact=False)
    assert found.shape[1:] == (num_rows, 32)
    expected = _mlp_of(config, weights, linear_of, None)(x)
    torch.testing.assert_close(found.sum(0), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [2, 30])
def test_pairs_stand_in_blocks_by_expert(num_rows: int) -> None:
    """One program and PyTorch's sort make the same blocks: every pair once, and none beside another expert's."""
    experts = Experts(count=6, num_chosen=4, size=8, normalised=True, layers=(True,))
    scores = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    blocks = grouped.choose(scores[None], None, experts)
    index, shares = chosen_experts(experts, scores)
    torch.testing.assert_close(blocks.shares.view(num_rows, 4), shares, atol=1e-5, rtol=1e-5)
    num_pairs, (num_blocks, size) = 4 * num_rows, blocks.pairs.shape
    twins = grouped.sorted_blocks(index.flatten().int(), blocks.shares, num_experts=6, size=size, num_blocks=num_blocks)
    assert torch.equal(blocks.experts, twins.experts) and torch.equal(blocks.pairs, twins.pairs)
    assert sorted(pair for pair in blocks.pairs.flatten().tolist() if pair < num_pairs) == list(range(num_pairs))
    for expert, pairs in zip(blocks.experts.tolist(), blocks.pairs.tolist(), strict=True):
        assert {int(index.flatten()[pair]) for pair in pairs if pair < num_pairs} <= {expert}
