"""The weights of heads without attention, level by level. With them, one native call grows a whole tree.

x(node) = [state ; moving part]      state: the target's; moving part: nothing, embeddings of tokens, or a cell
cell = act(norm(C [e(token) ; cell above]))   or   act(norm(C cell above + c e(token)))
logits = W blocks(A x + silu(B x))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn


class Affine(NamedTuple):
    """A matrix and a bias."""

    weight: Tensor
    bias: Tensor | None = None

    @staticmethod
    def of(module: nn.Module) -> Affine:
        """The matrix and bias of a linear module, frozen or not."""
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        return Affine(weight.data, bias.data if isinstance(bias, Tensor) else None)


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelWeights:
    """The weights for nodes of one depth."""

    readout: Tensor
    blocks: tuple[Affine, ...] = ()
    """x + silu(A x + a), one after the other."""
    enter: Affine | None = None
    """A; x itself is read where there is neither A nor B."""
    bent: Affine | None = None
    """B"""
    cell: Affine | None = None
    """C"""
    cell_norm: tuple[Tensor, Tensor] | None = None
    """The scale of a cell's norm, and what is added after it."""
    embedding: Tensor | None = None
    """[V, E]"""
    place: int = 0
    """Index of the target's state among the newest ones; 0 is the oldest."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadWeights:
    """All levels of heads. The last one serves every depth below it."""

    levels: tuple[LevelWeights, ...]
    state_norm: Tensor | None
    """The target's last norm; None if states are already normalised."""
    moving: Literal["nothing", "tokens", "cell"] = "nothing"
    keeps_state: bool = True
    """x begins with the state."""
    from_state: bool = False
    """The first cell is the state, not zeros."""
    joins: bool = False
    """A cell is made of an embedding beside the cell above, not of a sum."""
    activation: Literal["silu", "gelu"] = "silu"
    """Activation of the recurrent cells."""
    is_scaled: bool = False
    """States are scaled to length 1 / sqrt 2."""
    cell_eps: float = 0.0
    share: float = 1.0
    """c"""
