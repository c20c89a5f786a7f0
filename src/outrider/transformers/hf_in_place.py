"""The native CPU pass on the weights of a transformers model, without copying a matrix.

A pass over several nodes costs PyTorch's eager modules two or three passes over one on many CPUs. The native pass costs little
more than one, so guesses pay. It is used under three conditions. The architecture is one of the lean decoder's families. The
model behaves as its class defines: no hook, no replaced ``forward``, no parameter of another name. And on a few tokens its
logits equal the model's. Otherwise the adapter runs the model's own modules.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.config import config_of
from outrider.models.hf_check import agrees
from outrider.models.native.decoder import NativeDecoder
from outrider.models.native.held import held_decoder

_TYPES = (torch.float32, torch.bfloat16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@final
class InPlace:
    """The native pass on a transformers model, for as long as the model is unchanged."""

    def __init__(self) -> None:
        self._target: NativeDecoder | None = None
        self._made_for: tuple[object, ...] | None = None

    def target(self, model: Any) -> Target | None:
        """The native target; None if the model's own modules have to run."""
        made_for = _state_of(model)
        if made_for != self._made_for:
            self._target, self._made_for = None if made_for is None else _opened(model), made_for
        return self._target


def _state_of(model: Any) -> tuple[object, ...] | None:
    """The addresses of the weights, and the values of those that the pass copies; None for a model that the pass cannot run."""
    parameters = list(model.parameters())
    if any(one.device.type != "cpu" or one.dtype not in _TYPES for one in parameters) or not all(
        map(_is_plain, model.modules())
    ):
        return None
    small = [one.detach().flatten().view(torch.uint8) for one in parameters if one.dim() < 2]
    copied = torch.cat(small).numpy().tobytes() if small else b""
    return tuple(one.data_ptr() for one in parameters), copied


def _is_plain(module: Any) -> bool:
    """Whether a module behaves as its class defines, without hooks or replaced methods."""
    own = vars(module)
    return "forward" not in own and not any(own.get(name) for name in _HOOKS)


def _opened(model: Any) -> NativeDecoder | None:
    tensors: dict[str, Tensor] = {name: one.detach() for name, one in model.named_parameters()}
    try:
        config = config_of(model.config.to_dict())
    except ModelError:  # the adapter says what is wrong, if anything is
        return None
    decoder = None if config is None else held_decoder(config, tensors, type(model).__name__)
    return decoder if decoder is not None and agrees(decoder, model) else None
