"""Chimera: the trigram encoder in its own maths, what each part sees, how heads begin, and a kill while it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from killed_run import assert_goes_on_exactly
from test_heads import TARGET, TEXT, packed
from tiny_heads import random_head
from tiny_pair import _RAW
from torch import Tensor

from outrider.models.heads import new_head
from outrider.models.heads.chimera import ChimeraHead, _trigrams
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config
from outrider.train.objective import HeadObjective, HeadSettings


def random_chimera() -> ChimeraHead:
    head = random_head("chimera")
    assert isinstance(head, ChimeraHead)
    return head


def test_the_trigram_encoder_in_its_own_maths() -> None:
    head = random_chimera()
    t, gram = head.state_dict(), [7, 3, 9]
    joined = torch.cat([t["embed_tokens.weight"][token] for token in gram])
    mixed = t["trigram.blocks.layers.0.weight"] @ joined + t["trigram.blocks.layers.0.bias"]
    expected = t["trigram.out.weight"] @ (joined + mixed / (1 + torch.exp(-mixed)))
    with torch.no_grad():
        torch.testing.assert_close(head.encoded(torch.tensor(gram), torch.float32), expected)


def test_trigrams_end_at_their_place_and_stay_in_their_text() -> None:
    batch = packed([[5, 6, 7, 8], [9, 10]], (TARGET.num_layers,))
    assert _trigrams(batch)[0].tolist() == [[5, 5, 5], [5, 5, 6], [5, 6, 7], [6, 7, 8], [9, 9, 9], [9, 9, 10]]


def moved(head: ChimeraHead, place: int, **changes: Tensor) -> list[bool]:
    """Whether depths 0 to 2 below a place change with a batch."""
    batch = packed([TEXT], head.config.taps)
    with torch.no_grad():
        pairs = zip(head.depths(batch, 3), head.depths(replace(batch, **changes), 3), strict=True)
        return [float((mine - other)[0, place].abs().max()) > 1e-5 for mine, other in pairs]


def test_old_tokens_count_through_the_targets_states_alone() -> None:
    """A depth sees the target's states up to its place, its own trigram, and through its earlier outputs their trigrams."""
    head, place = random_chimera(), 12
    batch = packed([TEXT], head.config.taps)

    def other_token(index: int) -> Tensor:
        tokens = batch.tokens.clone()
        tokens[0, index] = (tokens[0, index] + 1) % 61
        return tokens

    assert moved(head, place, tokens=other_token(place - 2)) == [False, False, False]
    assert moved(head, place, tokens=other_token(place - 1)) == [True, True, True]
    assert moved(head, place, tokens=other_token(place + 2)) == [False, True, True]
    later, earlier = batch.features.clone(), batch.features.clone()
    later[:, place + 1] += 1
    earlier[:, 2] *= -1
    assert moved(head, place, features=later) == [False, False, False]
    assert moved(head, place, features=earlier) == [True, True, True]


def test_heads_begin_as_the_targets_output_matrix_twice() -> None:
    readout = torch.randn(61, 32)
    head = new_head(
        new_config("chimera", _RAW, num_heads=2), EmbeddingAndOutput(torch.randn(61, 32), torch.ones(32), readout, tied=False)
    )
    for depth in range(2):
        logits = head.readout(depth, torch.cat([torch.ones(32), torch.arange(32.0)]))
        torch.testing.assert_close(logits, readout @ (1 + torch.arange(32.0)), atol=1e-4, rtol=1e-4)


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    def objective() -> HeadObjective:
        head = random_chimera()
        head.freeze()
        return HeadObjective(head, TARGET, HeadSettings(num_depths=3, noise=0.1))

    assert_goes_on_exactly(objective, tmp_path)
