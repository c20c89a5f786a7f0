"""One rank's share of a model whose layers stay whole: every so many-th layer, and rows of the vocabulary.

Neighbouring layers are on different ranks, so a group of neighbours can run at once (``layer_groups.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import ModelConfig
from outrider.models.fuzzy import holder_of
from outrider.models.share import Share


@final
@dataclass(frozen=True)
class LayerShare:
    """The layers of one rank."""

    place: Share

    def check(self, config: ModelConfig) -> None:
        """Refuse more ranks than layers."""
        if self.place.size > config.num_layers:
            raise OptionError(
                f"draft_parallel = {self.place.size} needs as many layers, and the draft has {config.num_layers}; use at most "
                f"{config.num_layers}"
            )

    def config(self, config: ModelConfig) -> ModelConfig:
        """The share as a model config: fewer layers, part of the vocabulary."""
        mine = self.layers(config.num_layers)
        begin, end = self.place.span(config.vocab_size)
        experts = config.experts and replace(config.experts, layers=tuple(config.experts.layers[layer] for layer in mine))
        return replace(
            config,
            num_layers=len(mine),
            rope_of_layer=tuple(config.rope_of_layer[layer] for layer in mine),
            windows=tuple(config.windows[layer] for layer in mine),
            vocab_size=end - begin,
            experts=experts,
        )

    def layers(self, num_layers: int) -> Sequence[int]:
        return [layer for layer in range(num_layers) if holder_of(layer, self.place.size) == self.place.rank]

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights:
        del config
        return whole

    def rows(self, matrix: Tensor) -> Tensor:
        return self.place.rows(matrix)
