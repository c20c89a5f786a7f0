"""Sizes and switches of one set of heads, as its folder describes it (``reading.py``).

taps: the residual stream entering layer i, and i = L for the last layer's output, as everywhere in this project. L + 1 alone
stands for the last layer's keys and values, which the target's cache holds (LongSpec)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import ModelError
from outrider.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes and switches of one set of heads."""

    kind: str
    hidden_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Number of tokens that the heads can produce."""
    taps: tuple[int, ...]
    target_layers: int
    """Number of target layers; 0 if a public folder does not say."""
    num_depths: int | None = None
    """Number of heads, for kinds with one head per depth; None for a head that is applied repeatedly."""
    num_blocks: int = 1
    """Residual blocks per head."""
    own_readouts: bool = True
    """Whether every head has its own output matrix; otherwise they share one."""
    prefix: bool = False
    """Whether a decoder layer reads the target's states before the heads do (Hydra++)."""
    layer: ModelConfig | None = None
    """The decoder layer, for kinds that have one."""
    num_layers: int = 1
    """Number of stacked decoder layers (P-EAGLE, DFlash)."""
    inner_size: int = 0
    """Width of the heads' states if it differs from the target's (MLP speculator, ReDrafter); otherwise 0."""
    tie_stages: bool = False
    """Whether all stages of an MLP speculator share their weights."""
    scale_input: bool = False
    """Whether an MLP speculator scales the target's state to length 1 / sqrt 2."""
    stride: int = 1
    """Tokens from one head to the next (L-MTP)."""
    mask_token: int = 0
    """The token at unknown positions (P-EAGLE, DFlash)."""
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the output matrix is the embedding."""
    signature: tuple[float, ...] = ()
    """Logits of the target's output layer at a fixed state, which tell targets of one shape apart."""
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_layer(self) -> bool:
        return self.layer is not None

    def __post_init__(self) -> None:
        if not self.taps and not self.target_layers:
            return  # a public folder, read without a target
        most = self.target_layers + (len(self.taps) == 1)
        bad = next((tap for tap in self.taps if not 0 <= tap <= most), None)
        if bad is not None or not self.taps:
            raise ModelError(f"taps = {list(self.taps)} are not layers of a target with {self.target_layers}; write 0 to that")
        if self.stride < 1 or self.num_layers < 1 or not 0 <= self.mask_token < self.vocab_size:
            found = f"stride = {self.stride}, num_layers = {self.num_layers}, mask_token = {self.mask_token}"
            raise ModelError(f"{found} are not valid; use numbers of at least 1, and a token of the target")
