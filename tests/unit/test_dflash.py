"""DFlash: what a place of a block sees, and that it learns. (Drafting computes what training computes: test_heads.)"""

from __future__ import annotations

from dataclasses import replace

import torch
from test_heads import TARGET, TEXT, packed
from tiny_heads import random_head

from outrider.models.heads.dflash import DflashHead
from outrider.train.objective import HeadObjective, HeadSettings


def new_head(**changes: int) -> DflashHead:
    head = random_head("dflash", **changes)
    assert isinstance(head, DflashHead)
    return head


def test_places_of_a_block_see_each_other_in_both_directions() -> None:
    """One open place more changes what the first one says."""
    batch = packed([TEXT], new_head().config.taps)
    few, many = new_head(num_heads=2), new_head(num_heads=3)
    many.load_state_dict(few.state_dict())
    with torch.no_grad():
        first, other = next(few.depths(batch, 2)), next(many.depths(batch, 2))
    assert float((first - other).abs().max()) > 1e-3


def test_a_block_sees_no_features_behind_its_place_and_no_token_behind_the_next() -> None:
    head, place = new_head(), 9
    batch = packed([TEXT], head.config.taps)
    features, tokens = batch.features.clone(), batch.tokens.clone()
    features[:, place + 1 :] += 1
    tokens[:, place + 2 :] = 1
    with torch.no_grad():
        for mine, other in zip(
            head.depths(batch, 4), head.depths(replace(batch, features=features, tokens=tokens), 4), strict=True
        ):
            torch.testing.assert_close(mine[:, : place + 1], other[:, : place + 1])
            assert float((mine - other)[:, place + 1].abs().max()) > 1e-3


def test_it_learns_and_leaves_the_targets_parts_alone() -> None:
    head = new_head()
    head.freeze()
    objective = HeadObjective(head, TARGET, HeadSettings(num_depths=4, decay=0.78))
    batch, before = packed([TEXT, TEXT[::-1]], head.config.taps), head.embed_tokens.weight.clone()
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    losses = list[float]()
    for _ in range(25):
        loss = objective(batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(head.embed_tokens.weight, before)
