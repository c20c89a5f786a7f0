"""recipes/inflate_block.py: inflated DFlash and DSpark heads say what the small ones say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_inflate import CPU, SMALL
from torch import Tensor

from inflate import Inflated, _constant  # isort: skip  (its folder is put on the path by test_inflate)
from inflate_block import inflated_block  # isort: skip

from outrider.bundled import bundled_path
from outrider.models.heads import PackedTexts, load_head, new_head, save_head
from outrider.models.heads.dspark import DsparkHead
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import new_config

LENGTH = 9


def wide(features: Tensor, eps: float) -> Tensor:
    """The states of three taps as the inflated target has them: a constant behind the live numbers, then zeros."""
    taps = []
    for tap in features.chunk(3, -1):
        large = torch.zeros(*tap.shape[:-1], SMALL.hidden)
        large[..., : tap.shape[-1]] = tap
        large[..., tap.shape[-1]] = _constant(eps, tap.shape[-1])
        taps.append(large)
    return torch.cat(taps, -1)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_inflated_head_says_what_the_small_one_says(kind: str, tmp_path: Path) -> None:
    """Untrained heads, with norms and small parts at random."""
    raw, ends = read_target(bundled_path("target"))
    torch.manual_seed(0)
    new = new_head(new_config(kind, raw, num_heads=3, num_layers=2, mask_token_id=1), ends)
    for parameter in new.parameters():
        if parameter.dim() < 2 or not parameter.any():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() < 2), std=0.2)
    save_head(new, tmp_path, dtype=torch.float32)
    source = Inflated(bundled_path("target"), SMALL, dtype=torch.float32, device=CPU)
    tables = source.read("model.embed_tokens.weight"), source.read("lm_head.weight")
    small, big = load_head(tmp_path), inflated_block(str(tmp_path), SMALL, tables, dtype=torch.float32, device=CPU)
    tokens, features = torch.randint(5, 4096, (1, LENGTH)), torch.randn(1, LENGTH, 3 * 256)
    places, inside = torch.arange(LENGTH)[None], torch.ones(1, LENGTH, dtype=torch.bool)
    found = []
    for head, states in ((small, features), (big, wide(features, raw["rms_norm_eps"]))):
        batch = PackedTexts(tokens, states, states, torch.zeros_like(tokens), places, inside)
        with torch.no_grad():
            depths = list(head.depths(batch, 3))
            said = torch.stack([head.readout(depth, state)[..., :4096] for depth, state in enumerate(depths)])
            sure = torch.stack([head.confidence(state) for state in depths]) if isinstance(head, DsparkHead) else said[..., 0]
        found.append((said, sure))
    for one, other in zip(*found, strict=True):
        assert float(one.std()) > 0.1
        torch.testing.assert_close(other, one, atol=2e-3, rtol=2e-3)
