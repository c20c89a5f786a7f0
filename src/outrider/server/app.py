"""The routes of the API. ``service.py`` does their work, and ``protocol.py`` defines their requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from outrider.core.version import VERSION
from outrider.server.answers import CompletionAnswer
from outrider.server.chat_answers import ChatAnswer
from outrider.server.dialogue import Dialogue
from outrider.server.embeddings import add_embeddings
from outrider.server.failures import ApiError, failed
from outrider.server.guard import Guard
from outrider.server.information import add_information, add_tokens
from outrider.server.models import Models
from outrider.server.protocol import ChatRequest, CompletionRequest
from outrider.server.quota import Client
from outrider.server.refusals import no_route, refusal_of
from outrider.server.response_store import OwnShelf, ResponseStore, Shelf
from outrider.server.responses import ResponseAnswer
from outrider.server.responses_protocol import ResponsesRequest
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.stored_responses import add_stored

_LOG = logging.getLogger("outrider.server")
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": text}
    for code, text in (
        (400, "the request is not valid"),
        (401, "no valid API key"),
        (404, "no such model"),
        (408, "the body came too slowly"),
        (413, "the request is too large"),
        (429, "too many requests"),
        (504, "the request took too long"),
    )
}


_BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}


def create_app(service: Service, page: str = "", *, others: Sequence[Service] = ()) -> FastAPI:
    """The application for one model and ``others``, with what ``/`` shows. Their workers start and stop with it."""
    store = ResponseStore(service.settings.store_limits)
    service.metrics.stored.watch(store)

    def shelf_of(http: HttpRequest) -> OwnShelf:
        return store.of(client_of(http).name)

    app = open_app(Models([service, *others]), page, shelf_of=shelf_of)
    add_stored(app, shelf_of)
    app.add_middleware(
        Guard, settings=service.settings, requests=service.metrics.requests, keys=service.keys, audit=service.audit
    )
    if service.settings.cors_origins:
        app.add_middleware(CORSMiddleware, **cross_origin(service.settings))
    return app


def cross_origin(settings: ServerSettings) -> dict[str, Any]:
    """CORS headers for the sites whose pages may call the API."""
    exposed = ["X-Request-Id", "Retry-After"]
    every = {"allow_methods": ["*"], "allow_headers": ["*"]}
    return {"allow_origins": list(settings.cors_origins), **every, "expose_headers": exposed}


def stored_app(store: ResponseStore) -> FastAPI:
    """The routes of stored responses alone, for a front door whose replicas do the rest."""
    app = FastAPI(title="Outrider", version=VERSION, docs_url=None, redoc_url=None)
    _add_errors(app)
    add_stored(app, lambda http: store.of(client_of(http).name))
    return app


def open_app(models: Models, page: str = "", *, shelf_of: Callable[[HttpRequest], Shelf]) -> FastAPI:
    """The routes without the guard. The caller has read the body and put the client into the scope. ``shelf_of`` finds the
    place where a client's responses are stored."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        models.start()
        yield
        models.drain()
        models.close()

    app = FastAPI(title="Outrider", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_generation(app, models)
    _add_responses(app, models, shelf_of)
    add_information(app, models)
    add_tokens(app, models)
    add_embeddings(app, models)
    _add_page(app, page)
    return app


def client_of(http: HttpRequest) -> Client:
    """The client of a request, as the guard identified it."""
    return http.scope["outrider.client"]


def as_chat(body: ResponsesRequest, talk: Dialogue) -> ChatRequest:
    """A Responses API request as a chat request."""
    try:
        return body.as_chat(talk.items)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(400, f"input is not valid: {first['loc'][-1]}: {first['msg']}; correct it", param="input") from None


def _add_generation(app: FastAPI, models: Models) -> None:
    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        service = models.find(body.model)
        shown: dict[str, Any] = {"echo": body.echo, "logprobs": body.logprobs, "options": body.stream_options}
        answer = partial(CompletionAnswer, model=service.name, codec=service.llm.codec, **shown)
        return await service.answer(http, service.intake.completion(body, client_of(http)), answer, stream=body.stream)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        service = models.find(body.model)
        answer = partial(ChatAnswer, model=service.name, codec=service.llm.codec, options=body.stream_options)
        return await service.answer(http, service.intake.chat(body, client_of(http)), answer, stream=body.stream)


def _add_responses(app: FastAPI, models: Models, shelf_of: Callable[[HttpRequest], Shelf]) -> None:
    @app.post("/v1/responses", responses=_ERRORS)
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        service = models.find(body.model)
        talk = Dialogue.of(body, shelf_of(http))
        answer = partial(ResponseAnswer, asked=body, talk=talk, model=service.name, codec=service.llm.codec)
        order = service.intake.chat(as_chat(body, talk), client_of(http), drops_oldest=body.truncation == "auto")
        return await service.answer(http, order, answer, stream=body.stream)


def _add_page(app: FastAPI, page: str) -> None:
    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(http: HttpRequest, error: ApiError) -> Response:
        del http
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def not_valid(http: HttpRequest, error: RequestValidationError) -> Response:
        return refusal_of(error.errors(), error.body, _BODIES.get(http.url.path)).response()

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        if error.status_code in (404, 405):
            return no_route(http.method, http.url.path, _paths(app)).response()
        return ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()

    @app.exception_handler(Exception)
    async def defect(http: HttpRequest, error: Exception) -> Response:
        _LOG.error("%s failed", http.url.path, exc_info=error)
        return failed(type(error).__name__).response()


def _paths(app: FastAPI) -> dict[str, set[str]]:
    """Every path of the API with the methods that it answers."""
    found: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, Route):
            found.setdefault(route.path, set()).update(route.methods or ())
    return found
