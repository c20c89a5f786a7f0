"""What EAGLE in a captured round stands on: passes that taps do not change, trees that have a twin, matrices held once."""

from __future__ import annotations

from dataclasses import replace

import torch
from test_device_heads import SHAPE, small_head
from triton_interpreter import DEVICE

from outrider.core.tree import TokenTree
from outrider.device.drafters.heads.eagle_layer import together
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.heads.eagle import EagleHead
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.models.weights import LayerWeights, Weights


def test_taps_do_not_change_a_pass() -> None:
    """In half precision to the last bit, else speculation would not say what plain decoding says."""
    config = tiny_config(num_hidden_layers=3, **SHAPE)
    whole = tiny_weights(config, device=str(DEVICE))
    halves = [{name: t if t is None else t.half() for name, t in vars(layer).items()} for layer in whole.layers]
    layers = [LayerWeights(**half) for half in halves]
    weights = Weights(whole.embedding.half(), layers, whole.norm.half(), whole.head.half())
    target = FastDecoder(config, weights, numerics="invariant")
    tree, cache = TokenTree.chain(torch.tensor([[5, 9, 1, 33, 7]], device=DEVICE)), target.new_cache(1)
    cache.reserve(5)
    step = target.step_of(tree, cache)
    plain, _ = target.forward(tree.tokens, step)
    tapped, states = target.forward(tree.tokens, step, taps=(1, 2, 3))
    assert torch.equal(plain, tapped) and set(states) == {1, 2, 3}


def test_trees_ranked_without_the_noise_have_no_twin() -> None:
    head = small_head("eagle3")
    assert isinstance(head, EagleHead)
    assert Eagle(head, HeadOptions()).search is not None and Eagle(head, HeadOptions()).static_tree is None
    assert Eagle(head, HeadOptions(branching="2,1")).static_tree is not None
    for branching in (None, "2,1"):
        blind = Eagle(head, replace(HeadOptions(branching=branching), perturb=False))
        assert blind.static_tree is None and blind.search is None


def test_matrices_that_are_read_together_are_held_once() -> None:
    parts = [torch.nn.Linear(8, size, bias=False).requires_grad_(False) for size in (4, 2, 2)]
    before = [part.weight.clone() for part in parts]
    whole = together(parts)
    assert torch.equal(whole, torch.cat(before)) and all(torch.equal(p.weight, b) for p, b in zip(parts, before, strict=True))
    assert together(parts).data_ptr() == whole.data_ptr() == parts[0].weight.data_ptr()
