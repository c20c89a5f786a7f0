"""The steps of a recurrence, and how a state is moved along them.

The recurrent layers here (Mamba-2, gated delta rule) share one form. A head's state is a matrix that decays and takes in a
product of two vectors per token:

    S_t = exp(a_t) S_{t-1} + w_t k_t^T          a_t: log decay,  w_t: value [P],  k_t: key [K]

A step is (a, w, k). Steps take far less memory than the states between them, so a cache stores steps and computes the state
when it is needed. This is the activation replay of Wu et al. 2024, Snakes and Ladders (PMLR 262:292), and of STree (Wu et al.
2025, arXiv 2505.14969). A step of zeros leaves the state as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScanShape:
    """Sizes of the recurrent layers of a model. All of them are alike."""

    num_layers: int
    num_heads: int
    head_dim: int
    """Length of a value, P."""
    num_groups: int
    """Number of keys in a layer. Consecutive heads share a key."""
    state_size: int
    """Length of a key, K."""
    conv_len: int
    """Tokens that the convolution before the recurrence reads, the newest included."""
    conv_size: int
    """Channels of that convolution."""

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """How many numbers one token stores in one layer: inputs of the convolution, decays, keys, values."""
        return self.conv_size, self.num_heads, self.num_groups * self.state_size, self.num_heads * self.head_dim

    @property
    def num_state(self) -> int:
        """Numbers in the state of one layer."""
        return self.num_heads * self.head_dim * self.state_size

    @property
    def num_window(self) -> int:
        """Numbers of one layer that the convolution needs from before the next token."""
        return (self.conv_len - 1) * self.conv_size


class Steps(NamedTuple):
    """Steps of one layer, for B rows of T tokens."""

    decays: Tensor
    """[B, T, heads] logarithms."""
    keys: Tensor
    """[B, T, groups, K]"""
    values: Tensor
    """[B, T, heads, P]"""


def wide(device: torch.device) -> torch.dtype:
    """The type in which decays are added up: differences of long sums lose digits. Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def replayed(state: Tensor, steps: Steps) -> Tensor:
    """[B, heads, P, K] the state after all steps, one after the other."""
    batch_size, num_heads, _, state_size = state.shape
    num_groups = steps.keys.shape[2]
    totals = steps.decays.to(wide(state.device)).cumsum(1)
    left = (totals[:, -1:] - totals).to(state.dtype).exp()
    values = (steps.values * left[..., None]).permute(0, 2, 3, 1).reshape(batch_size, num_groups, -1, left.shape[1])
    written = (values @ steps.keys.transpose(1, 2)).view(batch_size, num_heads, -1, state_size)
    return state * totals[:, -1].to(state.dtype).exp()[..., None, None] + written
