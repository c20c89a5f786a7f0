"""Routes that report something and generate nothing: models, health, load, metrics, tokens of a text."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import StrictInt

from outrider.core.version import VERSION
from outrider.methods import METHODS, RULES
from outrider.server.chat_prompts import TRUNCATED
from outrider.server.failures import ApiError
from outrider.server.models import Models
from outrider.server.protocol import FirstError, Messages, Strict
from outrider.server.service import Service


class TokenizeRequest(Strict):
    """POST /tokenize, as in vLLM: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[StrictInt], FirstError()]


def add_information(app: FastAPI, models: Models) -> None:
    """Add routes about the models and their state."""
    began = int(time.time())

    def card(service: Service) -> dict[str, Any]:
        told = {"id": service.name, "object": "model", "created": began, "owned_by": "outrider", "parent": service.parent}
        return {**told, "max_model_len": service.llm.target.max_len, "kv_cache": service.llm.target.traits.kv_cache}

    @app.get("/v1/models")
    async def model_list() -> dict[str, Any]:
        return {"object": "list", "data": [card(service) for service in models]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "no such model"}})
    async def one_model(name: str) -> dict[str, Any]:
        return card(models.find(name))

    @app.get("/v1/speculation")
    async def speculation(model: str | None = None) -> dict[str, Any]:
        """Content of the status page: the available models and methods, and statistics."""
        service = models.find(model)
        gauges = {"net_speedup": service.metrics.speed.net, "waiting": service.worker.scheduler.num_waiting}
        usable = [name for name in METHODS if service.llm.can_compose(name)]
        lossy = [name for name in usable if not RULES[METHODS[name].acceptance].rule.lossless]
        names = {"model": service.name, "models": [other.name for other in models], "method": service.llm.method_name}
        return {**names, "methods": usable, "lossy": lossy, **gauges}

    _add_watching(app, models)


def _add_watching(app: FastAPI, models: Models) -> None:
    """Add the routes that monitors poll."""

    @app.get("/health")
    async def health() -> JSONResponse:
        is_draining = models.first.is_draining
        is_well = all(service.worker.is_alive for service in models) and not is_draining
        state = "ok" if is_well else "draining" if is_draining else "the engine is not running"
        num_active = sum(service.num_active for service in models)
        return JSONResponse({"status": state, "requests": num_active}, 200 if is_well else 503)

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        return Response(status_code=200 if all(service.worker.is_alive for service in models) else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Requests in the server, and the engine's waiting and running choices."""
        schedulers = [service.worker.scheduler for service in models]
        waiting, running = sum(one.num_waiting for one in schedulers), sum(one.num_running for one in schedulers)
        return {"server_load": sum(one.num_active for one in models), "waiting": waiting, "running": running}

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(models.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_tokens(app: FastAPI, models: Models) -> None:
    """Add the routes that tokenize and detokenize."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: HttpRequest) -> dict[str, Any]:
        del http
        service = models.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is needed; give one", param="prompt")
        ids = await service.intake.tokens_of(
            body.prompt, body.messages, special=body.add_special_tokens, is_open=body.add_generation_prompt
        )
        codec = service.llm.codec
        told: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.target.max_len, "tokens": ids}
        return {**told, "token_strs": [codec.token_text(token) for token in ids] if body.return_token_strs else None}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service = models.find(body.model)
        target = service.llm.target
        if len(body.tokens) > TRUNCATED * target.max_len:
            message = f"tokens has {len(body.tokens)} items, far more than the model's context holds; send fewer at a time"
            raise ApiError(400, message, param="tokens")
        bad = next((token for token in body.tokens if not 0 <= token < target.vocab_size), None)
        if bad is not None:
            message = f"tokens holds {bad}, and the vocabulary is 0 to {target.vocab_size - 1}; check the tokenizer"
            raise ApiError(400, message, param="tokens")
        return {"prompt": await service.intake.text_of(body.tokens)}
