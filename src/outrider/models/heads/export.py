"""Heads as other engines read them. What each kind writes is in the kind's own file.

    vllm          EAGLE-3, EAGLE-1, P-EAGLE, DFlash, Medusa, MLP speculator in vLLM's plain formats; SGLang reads the EAGLE-3
                  one too
    sglang        EAGLE-1 with the name and the bias SGLang wants
    speculators   EAGLE-3 in the format of the speculators package, which vLLM serves by itself
    deepspec      DSpark in the layout of DeepSpec's public checkpoints, with any Markov head; vllm is the same for vanilla ones
    apple         ReDrafter as Apple's recurrent drafting reads it; embedding and hidden states are the target's

Engines count layers differently (``layer_numbers.py``). An output matrix is always written, because without it engines assume
different ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.models.checkpoint import write_checkpoint
from outrider.models.export_formats import FORMATS
from outrider.models.heads.head import Head
from outrider.models.heads.kinds import KINDS


def export_head(head: Head, out: Path, *, form: str, target_name: str = "target") -> None:
    """Write a folder for another engine."""
    if form not in FORMATS:
        raise OptionError(f"unknown format {form!r}; {nearest(form, FORMATS)}")
    kind = KINDS[head.config.kind]
    if form not in kind.formats:
        remedy = f"use {' or '.join(kind.formats)}" if kind.formats else "keep them as they are, they run here only"
        raise OptionError(f"{kind.name} heads have no {form} format; {remedy}")
    state = {name: _plain(tensor) for name, tensor in head.state_dict().items()}
    config, tensors = kind.export(head, form, state, target_name=target_name)
    write_checkpoint(out, tensors, config=config)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
