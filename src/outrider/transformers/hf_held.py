"""Objects that Outrider keeps with a transformers model: a target over its weights, and the methods composed on it.

The target is the native CPU pass where it can read the model's matrices in their place (``hf_in_place.py``), and the adapter
over the model's own modules otherwise. Opening either tries the model on a few tokens (``models/hf_check.py``), so it is done
once. The model holds the result, which is freed with it. It is not copied or saved with the model.

In 16 bits the best logit is often shared by several tokens, and the order of a sum decides between them. That order depends on
how many tokens share a pass, in PyTorch's products too. So no loop that scores several tokens at once can promise the text of
one that scores them singly. A warning says so at the first call with such a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from typing import Any, final

from outrider.core.errors import ModelError, OutriderError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.models.hf import HFModel
from outrider.transformers.hf_in_place import InPlace

_NAME = "_outrider_held"
_SURE = 4
"""Bytes per number from which on near ties are so rare that identical text is promised."""


class RoundingWarning(UserWarning):
    """Near ties may be decided differently than in plain ``generate``. They may there too, whenever passes are composed
    differently."""


@final
class Held:
    """The target and the methods of one model, kept between calls."""

    def __init__(self) -> None:
        self._in_place = InPlace()
        self._adapter: HFModel | None = None
        self._made_for: tuple[object, ...] = ()
        self._composed_on: Target | None = None
        self._warned_of: object = None
        self._methods: dict[Hashable, Method] = {}

    @staticmethod
    def of(model: Any) -> Held:
        """The objects kept with a model."""
        return vars(model).setdefault(_NAME, Held())

    def target(self, model: Any) -> Target:
        """The target for a model. It is opened again after the model was moved, converted or resized."""
        if model.training:
            raise ModelError(f"{type(model).__name__} is in training mode, where dropout changes its tokens; call model.eval()")
        target = self._in_place.target(model) or self._adapted(model)
        if target is not self._composed_on:
            self._composed_on = target
            self._methods.clear()
        return target

    def warn_of_rounding(self, model: Any) -> None:
        """Warn once for each 16-bit model that identical text is not promised."""
        if model.dtype.itemsize >= _SURE or model.dtype == self._warned_of:
            return
        self._warned_of = model.dtype
        kind = str(model.dtype).removeprefix("torch.")
        message = (
            f"{type(model).__name__} is in {kind}, where the order of a sum decides near ties: greedy text may differ from "
            "that of plain generate at such places. Use float32 where it must be the same token for token"
        )
        warnings.warn(message, RoundingWarning, stacklevel=3)

    def _adapted(self, model: Any) -> HFModel:
        made_for = _state_of(model)
        if self._adapter is None or made_for != self._made_for:
            self._adapter, self._made_for = _open(model), made_for
        return self._adapter

    def method(self, key: Hashable, compose: Callable[[], Method]) -> Method:
        """The method called ``key``, composed at its first use. Drafters and policies keep learning from call to call."""
        if key not in self._methods:
            self._methods[key] = compose()
        return self._methods[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        del memo
        return Held()

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()


def _state_of(model: Any) -> tuple[object, ...]:
    """The properties of a model on which the adapter depends."""
    head = model.get_output_embeddings()
    size = None if head is None else tuple(head.weight.shape)
    return model.device, model.dtype, size, getattr(model.config, "_attn_implementation", None)


def _open(model: Any) -> HFModel:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ModelError(f"{name} is not a causal language model; use a model of the AutoModelForCausalLM classes")
    with _untouched(model):
        try:
            return HFModel(model, name)
        except OutriderError:
            raise
        except Exception as error:  # architectures fail in many ways, and all of them mean the same here
            reason = " ".join(str(error).split())[:200]
            why = f"{type(error).__name__}: {reason}"
            raise ModelError(f"{name} cannot be used as a target ({why}); use another model") from error


@contextmanager
def _untouched(model: Any) -> Any:
    """Keeps a model as it was: the adapter freezes it, and its parameters and modules are restored afterwards."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]  # parts of it may be, though the whole is not
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
