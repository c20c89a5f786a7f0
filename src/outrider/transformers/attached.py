"""``attach`` makes every ``model.generate`` of a model speculative, pipelines included; ``detach`` takes it back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, cast, final

from transformers import GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from outrider.core.errors import OptionError
from outrider.transformers.drop_in import DropIn, generate

_NAMES = tuple(inspect.signature(cast("Any", GenerationMixin).generate).parameters)[1:-1]
"""Arguments of ``generate`` in order, without the model and ``**kwargs``."""


@final
class Attached:
    """Replaces a model's ``generate``."""

    def __init__(self, model: Any, drop_in: DropIn) -> None:
        self.drop_in = drop_in
        self.replaced = vars(model).get("generate")
        """The attribute that was replaced. A checkpoint may bring a ``generate`` of its own."""
        self._model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return call(self._model, self.drop_in, *arguments, **options)


def attach(model: Any, method: str = "suffix", *, draft: Any = None, **options: Any) -> DropIn:
    """Make ``model.generate`` decode with ``method`` until ``detach(model)``. Takes the arguments of ``generate`` in this
    package. Returns the decoding loop, whose ``stats`` hold the cost of the last call."""
    drop_in = generate(method, draft=draft, **options)
    if _attached(model) is not None:
        detach(model)
    model.generate = Attached(model, drop_in)
    return drop_in


def detach(model: Any) -> None:
    """Give ``model.generate`` back to transformers."""
    attached = _attached(model)
    if attached is None:
        raise OptionError(f"nothing is attached to this {type(model).__name__}; call attach(model) before detach(model)")
    del model.generate
    if attached.replaced is not None:
        model.generate = attached.replaced


def call(model: Any, drop_in: DropIn, *arguments: Any, **options: Any) -> Any:
    """``model.generate`` with a decoding loop. transformers passes no tokenizer to a loop, so stop strings become a stopping
    criterion here."""
    given = {**dict(zip(_NAMES, arguments)), **options}
    if given.get("custom_generate") is None:
        given = {**_with_stop_strings(given), "custom_generate": drop_in}
    return type(model).generate(model, **given)


def _attached(model: Any) -> Attached | None:
    found = vars(model).get("generate")
    return found if isinstance(found, Attached) else None


def _with_stop_strings(given: dict[str, Any]) -> dict[str, Any]:
    config, tokenizer = given.get("generation_config"), given.get("tokenizer")
    strings = given.get("stop_strings") or (config.stop_strings if config is not None else None)
    if not strings or tokenizer is None:  # transformers says itself that a tokenizer is missing
        return given
    before: Sequence[Any] = given.get("stopping_criteria") or ()
    criteria = StoppingCriteriaList([*before, StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)])
    rest = {name: value for name, value in given.items() if name not in ("stop_strings", "tokenizer")}
    if config is not None:
        rest["generation_config"] = copy.deepcopy(config)
        rest["generation_config"].stop_strings = None
    return {**rest, "stopping_criteria": criteria}
