"""An image model in a folder: a decoder over codes and class tokens, and the codebook that turns codes into pixels.

    tokens   0 .. K - 1 codes,   K .. K + C - 1 classes,   K + C no class        prompt: one class token; answer: T codes

``recipes/images.py`` makes such folders. The decoder is an ordinary Llama checkpoint, so it runs on every fast path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError, OptionError, RequestError, nearest
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Origin, Request, RequestState, Stats
from outrider.cuda_graphs import Rounds
from outrider.images.codebook import Codebook
from outrider.images.guidance import Guided
from outrider.methods import METHODS, RULES, compose
from outrider.models.load import load_model, read_config


def named_way(name: str, acceptance: str | None) -> tuple[str, str]:
    """Method and rule of a name. A rule's name alone means speculative Jacobi decoding under that rule, as in the papers."""
    if name not in METHODS and name in RULES:
        if acceptance not in (None, name):
            raise OptionError(f"{name!r} is a rule, and so is {acceptance!r}; give one of them")
        return "sjd", name
    if name not in METHODS:
        raise OptionError(f"unknown method or rule {name!r}; {nearest(name, {*METHODS, *RULES})}")
    return name, acceptance or METHODS[name].acceptance


Token = TypeVar("Token")


@dataclass(frozen=True, eq=False)
class Picture(Generic[Token]):
    """An image, and how it was made."""

    pixels: Tensor
    """[side, side, channels] in 0 .. 1."""
    tokens: list[Token]
    """Codes or continuous tokens, in raster order."""
    rounds: list[int]
    """The pass that each token came from, counted from 0."""
    origins: list[Origin]
    """Whether each token was accepted, recovered after a rejection, or a bonus."""
    stats: Stats
    """Passes, guesses and seconds."""


@final
class ImageModel:
    """A guided image model, with or without a draft."""

    def __init__(
        self, target: Target, codebook: Codebook, *, num_classes: int, guidance: float = 1.0, draft: Target | None = None
    ) -> None:
        self.codebook, self.num_classes = codebook, num_classes
        if target.vocab_size != self.nothing + 1:
            wanted = f"{codebook.num_codes} codes and {num_classes} classes"
            raise ModelError(f"the model has {target.vocab_size} tokens, and its codebook has {wanted}; make it again")
        self.target, self.draft = self._guided(target, guidance), None if draft is None else self._guided(draft, guidance)
        self._rounds = Rounds(self.target)

    @staticmethod
    def load(
        folder: str | Path, *, draft: str | Path | None = None, guidance: float = 1.0, device: str | None = None
    ) -> ImageModel:
        """The model in a folder. Guidance 1 is the conditional model itself."""
        path = Path(folder)
        own = read_config(path).get("outrider") or {}
        if own.get("kind") != "image":
            raise ModelError(f"{folder} is no image model; make one: python recipes/images.py --help")
        codebook = Codebook.load(path)
        models = [load_model(str(name), device=device) for name in (path, draft) if name is not None]
        second = models[1] if len(models) > 1 else None
        return ImageModel(models[0], codebook, num_classes=int(own["num_classes"]), guidance=guidance, draft=second)

    @property
    def nothing(self) -> int:
        """The token that stands for no class."""
        return self.codebook.num_codes + self.num_classes

    def prompt(self, label: int) -> list[int]:
        """The class token of a label."""
        if not 0 <= label < self.num_classes:
            raise RequestError(f"class {label} does not exist in this model; use 0 to {self.num_classes - 1}")
        return [self.codebook.num_codes + label]

    def params(self, *, temperature: float = 1.0, top_k: int = 0, seed: int | None = None) -> SamplingParams:
        """Sampling parameters of one image: exactly as many codes as it has, and only codes."""
        banned = range(self.codebook.num_codes, self.nothing + 1)
        count = self.codebook.num_tokens
        return SamplingParams(max_tokens=count, temperature=temperature, top_k=top_k, seed=seed, banned_token_ids=list(banned))

    def compose(self, name: str, *, acceptance: str | None = None, options: Mapping[str, Any] | None = None) -> Method:
        """A method on this model; a rule's name means speculative Jacobi decoding under it. Rules about codes get the
        codebook.
        """
        name, acceptance = named_way(name, acceptance)
        rule = RULES[acceptance]
        given = dict(options or {})
        if "codebook" in rule.options.__dataclass_fields__:
            given.setdefault("codebook", self.codebook.embeddings(self.target.vocab_size))
        return compose(name, self.target, draft=self.draft, acceptance=acceptance, policy="fixed", options=given)

    def imagine(
        self, labels: Sequence[int], method: Method, params: SamplingParams, *, max_batch_size: int = 64
    ) -> list[Picture[int]]:
        """An image for each label. The seeds are seed, seed + 1 and so on."""
        each = params.repeated(len(labels))
        requests = [Request(self.prompt(label), one) for label, one in zip(labels, each, strict=True)]
        rounds: list[list[int]] = [[] for _ in requests]
        done: dict[int, RequestState] = {}
        for step in self._rounds.run(method, requests, max_batch_size=max_batch_size):
            rounds[step.request] += [step.state.stats.num_passes - 1] * len(step.new_tokens)
            done[step.request] = step.state
        return [self._picture(done[i], rounds[i]) for i in range(len(requests))]

    def _picture(self, state: RequestState, rounds: list[int]) -> Picture[int]:
        pixels = self.codebook.decode(torch.tensor([state.output_ids]))[0]
        return Picture(pixels, state.output_ids, rounds, list(state.origins), state.stats)

    def _guided(self, model: Target, scale: float) -> Target:
        if scale == 1.0:
            return model
        return Guided(model, scale=scale, classes=range(self.codebook.num_codes, self.nothing), nothing=self.nothing)
