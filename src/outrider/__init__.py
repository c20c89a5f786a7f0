"""Outrider: language models generate faster without changing what they say.

from outrider import LLM, SamplingParams
print(LLM().generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)
"""

from outrider.api import LLM, RequestOutput, StreamChunk
from outrider.core.errors import CompositionError, ModelError, OptionError, OutriderError, RequestError
from outrider.core.method import Method
from outrider.core.params import Grammar, SamplingParams
from outrider.core.request import Origin, Stats
from outrider.methods import METHODS, POLICIES, RULES, compose

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "METHODS",
    "POLICIES",
    "RULES",
    "CompositionError",
    "Grammar",
    "Method",
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
]
