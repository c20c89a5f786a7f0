"""MSD: EAGLE with different inputs for text and images. A text column is a feature and a token, a visual one is the image's
embedding.

EAGLE mixes the target's feature with the embedding of the token after it, at every column. At an image this makes no sense,
since no next word is predicted there. So the layer reads the image's embedding itself, without the mixing matrix. Training
begins with texts alone; images are added later. (Lin et al. 2025, MSD, arXiv 2505.14260; github.com/Lyn-Lucy/MSD.)

    text column c     fc [e(x_{c+1}) ; s_c]              visual column c     the embedding that the image has at place c + 1
    q = softmax(W_target layer(column))
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.models.heads.visual import ColumnBatch, Entries, VisualHead, VisualKind


@final
class MsdHead(VisualHead):
    """Images enter as they are."""

    def entering(self, embedded: Tensor, states: Tensor, carried: Tensor) -> Tensor:
        del carried
        return self.fc(torch.cat([embedded, states], -1))

    def entries(self, columns: ColumnBatch) -> Entries:
        carried = columns.states[..., :0]
        seen = columns.embedded.to(columns.states.dtype)
        inputs = torch.where(columns.visual[..., None], seen, self.text_entries(columns, carried))
        return Entries(inputs, torch.ones_like(columns.visual), carried)


@final
class MsdKind(VisualKind[MsdHead]):
    """Folders of MSD heads."""

    name = "msd"
    module = MsdHead
    architectures = ("OutriderMsdHead",)
    training: ClassVar = {"num_depths": 3, "feature_weight": 0.5, "curriculum_steps": 1000}


KIND = MsdKind()
