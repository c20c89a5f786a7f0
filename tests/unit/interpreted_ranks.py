"""Ranks whose fast decoder is interpreted on a CPU, in processes connected by gloo: for tests of how followers are led."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
from interpreter import interpret_kernels

pytest.importorskip("triton")
if "outrider.models.gpu.decoder" not in sys.modules:  # in the follower: here the kernels are interpreted already
    interpret_kernels()

from outrider.core.layered_target import LayeredTarget
from outrider.models.decoder_weights import Weights
from outrider.models.features import ModelConfig
from outrider.models.gpu import replay
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.parallel.link import Link
from outrider.models.parallel.rank import Opening
from outrider.models.share import Share

replay._MOST_ROWS = 0  # no pass is captured, here and in the follower, which imports this module


@dataclass(frozen=True)
class Interpreted(Opening):
    """Heads divided as ``ByHeads`` divides them. ``fast``: the sums count as part of captured graphs, as with NCCL."""

    @property
    def is_wired(self) -> bool:
        return self.fast

    def part(self, rank: int) -> Share:
        return Share(rank, self.size)

    def model(self, config: ModelConfig, weights: Weights, link: Link) -> LayeredTarget:
        mine = replace(link.share.config(config), vocab_size=config.vocab_size)
        return FastDecoder(mine, weights, numerics="invariant", page_len=self.page_len, joint=link)
