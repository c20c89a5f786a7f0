"""One other engine in one mode, in a process of its own that is asked over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from outrider.core.errors import OptionError, nearest

VARIANTS = {
    "hugging-face": ("plain", "assisted", "prompt-lookup"),
    "vllm": ("plain", "ngram", "draft-model", "suffix"),
    "llama-cpp": ("plain", "draft-model", "prompt-lookup"),
    "llama-server": ("plain", "draft-model", "prompt-lookup"),
    "openvino": ("plain", "draft-model", "prompt-lookup"),
}
"""Modes of every engine. Each is compared with the first one."""
_USES_DRAFT = ("assisted", "draft-model")
_GIVEN = ("model", "draft", "dtype", "threads", "name")


@dataclass(frozen=True)
class PeerSpec:
    """An engine and its environment. ``model`` and ``draft`` are given in the engine's own format, if it has one. It has a
    ``dtype`` where its fastest type is not ours, and ``threads`` where it cannot run on as many as we do. A ``name`` tells
    two entries of the same engine apart."""

    engine: str
    python: str
    model: str
    draft: str | None = None
    dtype: str | None = None
    threads: int | None = None
    name: str | None = None

    def settings(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """What the worker is told, its own instead of what is common to all."""
        own = {"dtype": self.dtype, "threads": self.threads}
        return {**common, **{key: value for key, value in own.items() if value is not None}}

    @staticmethod
    def of(text: str, *, model: str, draft: str | None) -> PeerSpec:
        """Reads ``ENGINE``, ``ENGINE=PYTHON`` or ``ENGINE=PYTHON,model=PATH,draft=PATH``, also with dtype, threads and name."""
        engine, _, rest = text.partition("=")
        if engine not in VARIANTS:
            raise OptionError(f"unknown peer {engine!r}; {nearest(engine, VARIANTS)}")
        python, *pairs = rest.split(",") if rest else [_default_python(engine)]
        given: dict[str, str] = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        if unknown := next((name for name in given if name not in _GIVEN), None):
            raise OptionError(f"unknown setting {unknown!r} of peer {engine}; {nearest(unknown, _GIVEN)}")
        paths = (given.get("model", model), given.get("draft", draft))
        threads = given.get("threads")
        if threads is not None and not (threads.isdecimal() and int(threads)):
            raise OptionError(f"threads={threads} of peer {engine} is not valid; use a positive number")
        return PeerSpec(engine, python, *paths, given.get("dtype"), int(threads) if threads else None, given.get("name"))


def _default_python(engine: str) -> str:
    """The Python of an engine, from the environment. Hugging Face uses ours."""
    variable = f"OUTRIDER_PEER_{engine.upper().replace('-', '_')}"
    return os.environ.get(variable, sys.executable if engine == "hugging-face" else "")


def _preloads(spec: PeerSpec) -> dict[str, str]:
    """Libraries to load first: vLLM on a CPU needs Intel's OpenMP, if its environment has it."""
    library = Path(spec.python).parents[1] / "lib" / "libiomp5.so" if spec.engine == "vllm" else None
    return {"LD_PRELOAD": str(library)} if library is not None and library.is_file() else {}


@dataclass(frozen=True)
class PeerText:
    """One text of another engine."""

    tokens: list[int]
    num_timed: int
    """Tokens after the first step."""
    seconds: float
    """Seconds after the first step."""


@final
class Peer:
    """A running worker. ``open`` says why there is none if it cannot run."""

    def __init__(self, name: str, version: str, process: subprocess.Popen[str]) -> None:
        self.name, self.version = name, version
        self._process = process

    @staticmethod
    def open(spec: PeerSpec, variant: str, settings: Mapping[str, Any]) -> Peer | str:
        name = f"{spec.name or spec.engine} {variant}"
        if variant in _USES_DRAFT and spec.draft is None:
            return "no draft model given"
        settings = spec.settings(settings)
        own = {"OMP_NUM_THREADS": str(settings["threads"]), "OUTRIDER_PEER_CLOCK": settings["clock"], "PYTHONPATH": ""}
        environment = {**os.environ, **own, **_preloads(spec)}
        try:
            process = subprocess.Popen(
                [spec.python, str(Path(__file__).with_name("worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        except OSError as error:
            return f"{spec.python} cannot be started ({error.strerror})"
        job = {"engine": spec.engine, "variant": variant, "model": spec.model, "draft": spec.draft, **settings}
        peer = Peer(name, "", process)
        reply = peer._ask(job)
        if "error" in reply:
            peer.close()
            return reply["error"]
        peer.version = reply["ready"]
        return peer

    def generate(self, prompt: Sequence[int], max_tokens: int) -> PeerText | str:
        """A text, or the reason why there is none."""
        reply = self._ask({"prompt": list(prompt), "max_tokens": max_tokens})
        if "error" in reply:
            return reply["error"]
        tokens = reply["tokens"]
        return PeerText(tokens, len(tokens) - reply["first"], reply["seconds"] - reply["first_seconds"])

    def _ask(self, document: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(document), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError as error:
            return {"error": f"the worker is gone ({error})"}
        return json.loads(line) if line else {"error": f"the worker ended with code {self._process.wait()}"}

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
