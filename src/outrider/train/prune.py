"""Makes a smaller model out of a larger one. It leaves out the layers and MLP units that matter least on real text.

A draft that is made from its target has the target's vocabulary and much of its law. ``train distill`` then improves it. The
measures are those of Men et al. 2024, arXiv 2403.03853, for layers, and of Muralidharan et al. 2024, arXiv 2407.14679, for
widths.

    layer l:  1 - mean cos(h_l, h_{l+1})          how much a layer turns the residual stream
    unit i:   mean |silu(g_i x) u_i x| |d_i|      how much an MLP unit adds to it, d_i being its column of the last matrix
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.config import config_of
from outrider.models.heads import PackedTexts
from outrider.models.heads.layer import HeadLayer
from outrider.train.data import Document
from outrider.train.draft_lm import DraftLM


@final
@dataclass(frozen=True, eq=False)
class Importance:
    """Importance of the parts of a model."""

    layers: Tensor
    """[L] importance of the layers."""
    units: Tensor
    """[L, M] importance of the MLP units."""


def importance_of(model: DraftLM, documents: Sequence[Document]) -> Importance:
    """Measure importance on texts."""
    layers = [cast("HeadLayer", layer) for layer in model.model.layers]
    turned, used, count = torch.zeros(len(layers)), torch.zeros(len(layers), model.config.mlp_size), 0
    with torch.inference_mode(), ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hook = layer.mlp.down_proj.register_forward_pre_hook(_adder(used[index]))
            hooks.callback(hook.remove)
        for document in documents:
            batch = _alone(document, model.model.norm.weight.device)
            states = [model.model.embed_tokens(batch.tokens), *model.climb(batch)]
            for index in range(len(layers)):
                turned[index] += (1 - F.cosine_similarity(states[index], states[index + 1], dim=-1)).sum().cpu()
            count += len(document.tokens)
    lengths = torch.stack([layer.mlp.down_proj.weight.detach().float().norm(dim=0).cpu() for layer in layers])
    return Importance(turned / max(1, count), used / max(1, count) * lengths)


def pruned(model: DraftLM, importance: Importance, *, num_layers: int, mlp_size: int) -> DraftLM:
    """A copy with the ``num_layers`` most important layers and their ``mlp_size`` most important units, in order."""
    config = model.config
    for name, value, most in (("layers", num_layers, config.num_layers), ("mlp", mlp_size, config.mlp_size)):
        if not 1 <= value <= most:
            raise OptionError(f"{name} = {value} is not valid; the model has {most}, use a whole number from 1 to that")
    raw = {**model.raw, "num_hidden_layers": num_layers, "intermediate_size": mlp_size}
    smaller = config_of(raw)
    assert smaller is not None
    copy = DraftLM(smaller, raw, model.origin)
    copy.load_state_dict(dict(_kept(model, importance, num_layers, mlp_size)))
    return copy.to(model.model.norm.weight.device)


def best(values: Tensor, count: int) -> list[int]:
    """Indices of the largest values, ascending."""
    return sorted(values.topk(count).indices.tolist())


def _kept(model: DraftLM, importance: Importance, num_layers: int, mlp_size: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the smaller model by name."""
    places = {layer: place for place, layer in enumerate(best(importance.layers, num_layers))}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if parts[1] != "layers":
            yield name, tensor.clone()
        elif int(parts[2]) in places:
            layer = int(parts[2])
            units = best(importance.units[layer], mlp_size)
            yield ".".join([*parts[:2], str(places[layer]), *parts[3:]]), _narrowed(name, tensor, units)


def _narrowed(name: str, tensor: Tensor, units: list[int]) -> Tensor:
    """The rows or columns of ``units`` in the matrices of an MLP."""
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return tensor[units].clone()
    return tensor[:, units].clone() if name.endswith("down_proj.weight") else tensor.clone()


def _adder(total: Tensor):
    """A hook that adds up the magnitudes of a module's inputs."""

    def add(module: object, inputs: tuple[Tensor, ...]) -> None:
        del module
        total.add_(inputs[0].float().abs().flatten(0, -2).sum(0).cpu())

    return add


def _alone(document: Document, device: torch.device) -> PackedTexts:
    """One text in a row, without the target's states."""
    tokens = torch.tensor([document.tokens], device=device)
    places, nothing = torch.arange(tokens.shape[1], device=device)[None], torch.zeros(*tokens.shape, 0, device=device)
    return PackedTexts(tokens, nothing, nothing, torch.zeros_like(tokens), places, torch.ones_like(tokens, dtype=torch.bool))
