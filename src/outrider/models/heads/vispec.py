"""ViSpec: an image enters the draft as one vector, and a second, global vector of it is added to all text after it.

A shallow layer that attends to hundreds of similar visual columns misses the few that matter. So learned queries attend to the
image's embeddings once. All results but the last become the image's columns, and the last is a global vector g. Every text
column after the image reads g beside the feature. (Kang et al. 2025, ViSpec, arXiv 2509.15235; github.com/KangJialiang/ViSpec.)

    [v_1 .. v_{n-1} ; g] = W_o attention(queries, W_k E, W_v E)           E: the image's embeddings;  v at its last columns
    text column c        = fc [e(x_{c+1}) ; W_g [s_c ; g]]                W_g begins as [1 ; 0];  g is that of the newest image

With the default of two queries an image is one column.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.models.heads.kind import Raw
from outrider.models.heads.resampler import Resampler, spread_last
from outrider.models.heads.visual import ColumnBatch, Entries, VisualHead, VisualKind


@final
class VispecHead(VisualHead):
    """States carry the global vector of the newest image."""

    def add_parts(self) -> None:
        config, size = self.config, self.config.hidden_size
        self.num_carried = size
        assert config.layer is not None
        self.adaptor = Resampler(size, config.layer.num_heads, int(config.raw.get("num_visual_queries", 2)))
        self.img_fc = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            self.img_fc.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))

    def entering(self, embedded: Tensor, states: Tensor, carried: Tensor) -> Tensor:
        return self.fc(torch.cat([embedded, self.img_fc(torch.cat([states, carried], -1))], -1))

    def entries(self, columns: ColumnBatch) -> Entries:
        runs, visual = columns.runs, columns.visual
        old = columns.carried[:, None].expand(-1, visual.shape[1], -1).to(columns.states.dtype)
        if not len(runs.sizes):
            return Entries(self.text_entries(columns, old), ~visual, old)
        there = runs.there
        seen = self.adaptor(runs.laid(columns.embedded[visual].to(columns.states.dtype)), there)
        latest = columns.latest
        carried = torch.where((latest >= 0)[..., None], seen[:, -1][latest.clamp(min=0)].to(old.dtype), old)
        vectors, kept = spread_last(seen[:, :-1], there)
        inputs = self.text_entries(columns, carried)
        inputs = inputs.masked_scatter(visual[..., None], vectors[there].to(inputs.dtype))
        return Entries(inputs, (~visual).masked_scatter(visual, kept[there]), carried)


@final
class VispecKind(VisualKind[VispecHead]):
    """Folders of ViSpec heads."""

    name = "vispec"
    module = VispecHead
    architectures = ("OutriderVispecHead",)
    training: ClassVar = {"num_depths": 3, "loss": "mixed"}

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        count = int(raw.get("num_visual_queries", 2))
        if count < 2:
            raise ModelError(f"num_visual_queries = {count} leaves no column for an image; use at least 2")
        return {**super().new_keys(raw), "num_visual_queries": count}


KIND = VispecKind()
