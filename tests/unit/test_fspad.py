"""FSPAD: the layer in its own maths, what each of its two outputs learns, and a kill while it learns."""

from __future__ import annotations

from pathlib import Path

import torch
from killed_run import assert_goes_on_exactly
from test_head_formats import PLACE, same
from test_heads import TARGET, TEXT, packed
from tiny_heads import random_head
from torch import Tensor

from outrider.models.heads.fspad import FspadHead
from outrider.train.objective import HeadObjective, HeadSettings


def new_head() -> FspadHead:
    head = random_head("fspad")
    assert isinstance(head, FspadHead)
    return head


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def restated(t: dict[str, Tensor], embedded: Tensor, features: Tensor) -> Tensor:
    """[N, H] what the embeddings pick, from the tensors alone."""
    mixed = torch.cat([embedded, features], -1) @ t["fc.fc.weight"].T + t["fc.fc.bias"]
    wide = normed(mixed, t["fc.post_attention_layernorm.weight"]) @ t["fc.mlp.up_proj.weight"].T
    return mixed + (silu(embedded @ t["fc.mlp.gate_proj.weight"].T) * wide) @ t["fc.mlp.down_proj.weight"].T


def test_the_embedding_picks_from_the_feature() -> None:
    head = new_head()
    torch.manual_seed(0)
    embedded, features = torch.randn(5, 32), torch.randn(5, 32)
    with torch.no_grad():
        torch.testing.assert_close(head.fc(embedded, features), restated(head.state_dict(), embedded, features))


def test_one_output_is_read_and_the_other_continued() -> None:
    """The half that is read does not reach the next step, and the half that is continued does not reach the logits."""
    head = new_head()
    batch = packed([TEXT], head.config.taps)
    with torch.no_grad():
        first, second = head.depths(batch, 2)
        same([head.readout(0, first[0, PLACE])], [head.lm_head(first[0, PLACE, :32])])
        head.layers[0].mlp.down_proj.weight[:32] += 0.1  # type: ignore[union-attr]
        moved, after = head.depths(batch, 2)
    assert float((moved - first)[..., :32].abs().max()) > 1e-2 and torch.equal(moved[..., 32:], first[..., 32:])
    torch.testing.assert_close(after[..., 32:], second[..., 32:])


def test_features_are_asked_of_the_continued_half_alone() -> None:
    """Partial alignment: the distance to the target's feature gives no gradient to the half that is read."""
    head = new_head()
    head.freeze()
    objective = HeadObjective(head, TARGET, HeadSettings(num_depths=1))
    batch = packed([TEXT], head.config.taps)
    objective._distance(batch, 0, next(head.depths(batch, 1)), batch.valid(1)).backward()
    grad = head.layers[0].mlp.down_proj.weight.grad  # type: ignore[union-attr]
    assert isinstance(grad, Tensor) and not grad[:32].any() and grad[32:].any()


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    def objective() -> HeadObjective:
        head = new_head()
        head.freeze()
        return HeadObjective(head, TARGET, HeadSettings(num_depths=3, feature_weight=0.5, noise=0.1))

    assert_goes_on_exactly(objective, tmp_path)
