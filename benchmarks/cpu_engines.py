"""Engines that decode greedily in one process, token by token in turns: ours, llama.cpp and transformers.

Each gives CPU milliseconds of a prompt and of every token after it. An engine that does not import is skipped, with the reason.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree


@dataclass(frozen=True)
class Run:
    """One prompt and what came after it."""

    prompt_ms: float
    token_ms: list[float]
    tokens: list[int]


class Engine(ABC):
    """A model that is ready to decode."""

    @abstractmethod
    def tokens(self, prompt: list[int]) -> Iterator[int]:
        """Greedy tokens; the first one takes the whole prompt."""

    def run(self, prompt: list[int], count: int) -> Run:
        spent, found, stream = list[float](), list[int](), self.tokens(prompt)
        while len(found) < count:
            began = time.process_time()
            found.append(next(stream))
            spent.append(1e3 * (time.process_time() - began))
        return Run(spent[0], spent[1:], found)


@final
class Ours(Engine):
    """Passes of a target, one node each."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def tokens(self, prompt: list[int]) -> Iterator[int]:
        cache, last = self._target.new_cache(1), prompt[-1]
        self._target.prefill([prompt[:-1]], cache)
        while True:
            logits = self._target.score(TokenTree.chain(torch.tensor([[last]])), cache).logits[0, 0]
            last = int(logits.numpy().argmax())  # PyTorch's takes ten times as long here
            cache.commit([[0]])
            yield last


@final
class LlamaCpp(Engine):
    """llama.cpp on a GGUF file, through the module ``llama_cpp`` (llama-cpp-python, or another one with its interface)."""

    def __init__(self, path: str) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        self.name = f"llama.cpp ({llama_cpp.__version__})"
        self._engine = llama_cpp.Llama(path, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)

    def tokens(self, prompt: list[int]) -> Iterator[int]:
        self._engine.reset()
        yield from map(int, self._engine.generate(prompt, temp=0.0, reset=True))


@final
class Transformers(Engine):
    """A folder, in float32."""

    def __init__(self, path: str) -> None:
        transformers: Any = importlib.import_module("transformers")
        self.name = f"transformers {transformers.__version__} float32"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def tokens(self, prompt: list[int]) -> Iterator[int]:
        fed, past = torch.tensor([prompt]), None
        while True:
            with torch.inference_mode():
                out = self._model(fed, past_key_values=past, use_cache=True, logits_to_keep=1)
            fed, past = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            yield int(fed)


def peers_of(path: str) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines that read ``path``, and why others were skipped."""
    kind = LlamaCpp if path.endswith(".gguf") else Transformers
    try:
        engine = kind(path)
    except (ImportError, OSError, ValueError) as error:
        return {}, {kind.__name__: f"{type(error).__name__}: {error}"}
    return {engine.name: engine}, {}
