"""Outrider: language models generate faster without changing what they say.

from outrider import LLM, SamplingParams
print(LLM().generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)

Names are loaded when they are first used, so that ``outrider --help`` does not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.core.version import VERSION

if TYPE_CHECKING:
    from outrider.api import LLM
    from outrider.async_api import AsyncLLM
    from outrider.core.errors import CompositionError, ModelError, OptionError, OutriderError, RequestError
    from outrider.core.method import Method
    from outrider.core.method_rows import MethodRow
    from outrider.core.params import Grammar, SamplingParams
    from outrider.core.request import Origin, Stats
    from outrider.methods import METHODS, POLICIES, RULES, compose, register
    from outrider.outputs import RequestOutput, StreamChunk

__version__ = VERSION

__all__ = [
    "LLM",
    "METHODS",
    "POLICIES",
    "RULES",
    "AsyncLLM",
    "CompositionError",
    "Grammar",
    "Method",
    "MethodRow",
    "ModelError",
    "OptionError",
    "Origin",
    "OutriderError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Stats",
    "StreamChunk",
    "__version__",
    "compose",
    "register",
]

_HOMES = {
    "outrider.api": ("LLM",),
    "outrider.async_api": ("AsyncLLM",),
    "outrider.core.errors": ("CompositionError", "ModelError", "OptionError", "OutriderError", "RequestError"),
    "outrider.core.method": ("Method",),
    "outrider.core.params": ("Grammar", "SamplingParams"),
    "outrider.core.request": ("Origin", "Stats"),
    "outrider.core.method_rows": ("MethodRow",),
    "outrider.methods": ("METHODS", "POLICIES", "RULES", "compose", "register"),
    "outrider.outputs": ("RequestOutput", "StreamChunk"),
}
"""Which module each public name comes from."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use; later uses find it in the module."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = vars(import_module(home))[name]
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
