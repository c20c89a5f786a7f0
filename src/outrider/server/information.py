"""Routes that tell something and generate nothing: models, health, load, metrics, tokens of a text."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StrictInt

from outrider.methods import METHODS, RULES
from outrider.server.failures import ApiError
from outrider.server.protocol import ChatMessage, Strict
from outrider.server.service import Service

_MOST_TOKENS = 1_000_000


class TokenizeRequest(Strict):
    """POST /tokenize, as vLLM has it: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, max_length=16_384)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[StrictInt] = Field(max_length=_MOST_TOKENS)


def add_information(app: FastAPI, service: Service) -> None:
    """What runs here, and how it goes."""
    card = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "outrider"}
    card |= {"max_model_len": service.llm.target.max_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "no such model"}})
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card

    @app.get("/v1/speculation")
    async def speculation() -> dict[str, Any]:
        """What the page needs to know: methods that can be asked for, and how it goes."""
        gauges = {"net_speedup": service.metrics.speed.net, "waiting": service.worker.scheduler.num_waiting}
        usable = [name for name in METHODS if service.llm.can_compose(name)]
        lossy = [name for name in usable if not RULES[METHODS[name].acceptance].rule.lossless]
        return {"model": service.name, "method": service.llm.method_name, "methods": usable, "lossy": lossy, **gauges}

    @app.get("/health")
    async def health() -> JSONResponse:
        is_well = service.worker.is_alive and not service.is_draining
        state = "ok" if is_well else "draining" if service.is_draining else "the engine is not running"
        return JSONResponse({"status": state, "requests": service.num_active}, 200 if is_well else 503)

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        return Response(status_code=200 if service.worker.is_alive else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Requests in the server, and choices that wait and run in the engine."""
        scheduler = service.worker.scheduler
        return {"server_load": service.num_active, "waiting": scheduler.num_waiting, "running": scheduler.num_running}

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": version("outrider")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_tokens(app: FastAPI, service: Service) -> None:
    """Texts to tokens and back."""
    codec, target = service.llm.codec, service.llm.target

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: HttpRequest) -> dict[str, Any]:
        del http
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is needed; give one", param="prompt")
        ids = await service.intake.tokens_of(
            body.prompt, body.messages, special=body.add_special_tokens, is_open=body.add_generation_prompt
        )
        told: dict[str, Any] = {"count": len(ids), "max_model_len": target.max_len, "tokens": ids}
        return {**told, "token_strs": [codec.token_text(token) for token in ids] if body.return_token_strs else None}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.check_model(body.model)
        bad = next((token for token in body.tokens if not 0 <= token < target.vocab_size), None)
        if bad is not None:
            message = f"tokens holds {bad}, and the vocabulary is 0 to {target.vocab_size - 1}; check the tokenizer"
            raise ApiError(400, message, param="tokens")
        return {"prompt": await service.intake.text_of(body.tokens)}
