"""/v1/embeddings: the states of a text's tokens after the last norm, averaged or of the last token.

A checkpoint that was made for it says how in the files of sentence-transformers (``1_Pooling/config.json``, ``modules.json``).
Others are refused unless the request says how: states of a model that only learned to continue text make poor embeddings.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.config import ModelConfig, config_of
from outrider.models.load import read_config
from outrider.models.norms import rms_norm
from outrider.models.source import local_path
from outrider.models.weights import SafetensorsFolder, read_final_norm
from outrider.server.failures import ApiError
from outrider.server.models import Models
from outrider.server.protocol import Prompts, Strict, Truncated
from outrider.server.service import Service

_MOST_INPUTS = 2048
_PIECE = 128
"""Tokens that are read in one pass."""


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    """How states become one vector. Default: as the checkpoint declares."""
    truncate_prompt_tokens: Truncated | None = None


@dataclass(frozen=True)
class Pooling:
    """How a checkpoint pools a text into one vector."""

    kind: Literal["mean", "last"]
    is_normalised: bool = True
    """Whether vectors are scaled to length 1."""


def declared_pooling(folder: Path) -> Pooling | None:
    """The pooling that the checkpoint declares; None if it declares none, or one that is not supported here."""
    try:
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
        modules = json.loads((folder / "modules.json").read_text())
    except (OSError, ValueError):
        return None
    is_normalised = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    if pooling.get("pooling_mode_mean_tokens") or pooling.get("pooling_mode") == "mean":
        return Pooling("mean", is_normalised)
    if pooling.get("pooling_mode_lasttoken") or pooling.get("pooling_mode") == "lasttoken":
        return Pooling("last", is_normalised)
    return None


@dataclass(frozen=True, eq=False)
class Embedder:
    """Turns tokens into vectors with one target."""

    target: Target
    norm: Tensor
    config: ModelConfig
    pooling: Pooling

    def run(self, rows: Sequence[Sequence[int]], size: int) -> Generator[bool, None, list[list[float]]]:
        """Vectors of ``size`` numbers for each row. Yields between passes whether a row is done, so that no keys are held."""
        vectors: list[list[float]] = []
        for row in rows:
            vectors.append((yield from self._vector(row, size)))
            yield True
        return vectors

    def _vector(self, row: Sequence[int], size: int) -> Generator[bool, None, list[float]]:
        cache = self.target.new_cache(1)
        total = torch.zeros(self.config.hidden_size)
        for start in range(0, len(row), _PIECE):
            states = self._states(row[start : start + _PIECE], cache)
            total = total + states.sum(0) if self.pooling.kind == "mean" else states[-1]
            yield False
        pooled = (total / len(row) if self.pooling.kind == "mean" else total)[:size]
        is_unit = self.pooling.is_normalised or size < self.config.hidden_size
        return (pooled / pooled.norm().clamp_min(1e-12) if is_unit else pooled).tolist()

    @torch.inference_mode()
    def _states(self, piece: Sequence[int], cache: Any) -> Tensor:
        """[N, H] after the last norm, float32."""
        last = self.target.num_layers
        states = self.target.prefill([list(piece)], cache, taps=[last])[last][0]
        return rms_norm(self.norm, self.config.norm_eps)(states.float().cpu())


def embedder_of(service: Service, asked: Literal["mean", "last"] | None) -> Embedder:
    """The embedder of a model; refused with the reason if it has none."""
    path = local_path(service.llm.model_name)
    declared = declared_pooling(path) if path.is_dir() else None
    pooling = declared if asked is None else Pooling(asked, declared is None or declared.is_normalised)
    if pooling is None:
        message = f"model {service.name!r} was not made for embeddings; name one that was, or ask with pooling: mean or last"
        raise ApiError(400, message, param="model")
    try:
        config, norm = _last_norm(path)
    except (ModelError, OSError) as error:
        raise ApiError(400, f"model {service.name!r} cannot make embeddings: {error}", param="model") from None
    return Embedder(service.llm.target, norm, config, pooling)


@lru_cache(maxsize=16)
def _last_norm(folder: Path) -> tuple[ModelConfig, Tensor]:
    config = config_of(read_config(folder))
    if config is None:
        raise ModelError("its architecture is run by transformers; use a model of the lean decoder")
    return config, read_final_norm(SafetensorsFolder(folder), config)


async def tokens_of(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    """The inputs as tokens, each within the model's context."""
    given = body.input
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not inputs or any(not one for one in inputs):
        raise ApiError(400, "input is empty; give at least one text or list of tokens, none of them empty", param="input")
    if len(inputs) > _MOST_INPUTS:
        raise ApiError(400, f"input holds {len(inputs)} texts; send at most {_MOST_INPUTS}", param="input")
    return [await _row(service, one, body.truncate_prompt_tokens) for one in inputs]


async def _row(service: Service, given: str | list[int], truncate: int | None) -> list[int]:
    target = service.llm.target
    ids = given if isinstance(given, list) else await service.intake.tokens_of(given, None, special=True, is_open=False)
    bad = next((token for token in ids if not 0 <= token < target.vocab_size), None)
    if bad is not None:
        raise ApiError(400, f"input holds token {bad}; use 0 to {target.vocab_size - 1}", param="input")
    ids = ids if truncate is None else ids[-(target.max_len if truncate < 0 else truncate) :]
    if len(ids) > target.max_len:
        message = f"a text of input has {len(ids)} tokens, and the model's context holds {target.max_len}; shorten it"
        raise ApiError(400, message, param="input")
    return ids


def vector_size(embedder: Embedder, asked: int | None, service: Service) -> int:
    """Size of a vector. It may be less than the model's if the checkpoint was trained for that."""
    full = embedder.config.hidden_size
    if asked is None or asked == full:
        return full
    raw = read_config(local_path(service.llm.model_name))
    if asked > full or not (raw.get("is_matryoshka") or raw.get("matryoshka_dimensions")):
        message = f"dimensions = {asked} is not available: vectors of this model have {full} numbers; leave it out"
        raise ApiError(400, message, param="dimensions")
    return asked


def add_embeddings(app: FastAPI, models: Models) -> None:
    """The route."""

    @app.post("/v1/embeddings", responses={400: {"description": "the model was not made for embeddings"}})
    async def embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
        service = models.find(body.model)
        embedder = embedder_of(service, body.pooling)
        size = vector_size(embedder, body.dimensions, service)
        rows = await tokens_of(service, body)
        vectors = await service.errand(http, embedder.run(rows, size))
        if vectors is None:
            return Response(status_code=499)
        return JSONResponse(_answer(service, vectors, rows, body.encoding_format, http))


def _answer(service: Service, vectors: Any, rows: Sequence[Sequence[int]], form: str, http: HttpRequest) -> dict[str, Any]:
    count = sum(map(len, rows))
    service.metrics.prompt_tokens.inc(count)
    http.scope.setdefault("outrider.log", {}).update({"prompt_tokens": count})
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if form == "base64" else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": service.name, "usage": usage}


def _packed(vector: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients ask for."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
