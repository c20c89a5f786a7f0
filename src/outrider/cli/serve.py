"""``outrider serve``: the OpenAI API on this machine, and a page to watch it at ``/``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from outrider.api import LLM
from outrider.cli.options import add_model_options
from outrider.cli.serve_fleet import add_replicas, serve_fleet
from outrider.cli.serve_models import add_models, load_all
from outrider.core.errors import OptionError
from outrider.core.watched_target import WatchedTarget
from outrider.engine.device_lane import num_slots
from outrider.engine.grouping import GROUPINGS
from outrider.server.settings import ServerSettings
from outrider.viz.page import live_page

if TYPE_CHECKING:
    from outrider.server.service import Service

_FLAGS = (
    ("max_rows", int, "requests that share rounds"),
    ("max_requests", int, "requests in the server, waiting ones included"),
    ("max_choices", int, "most prompts times n of one request"),
    ("max_tokens", int, "most tokens a request may ask for"),
    ("default_tokens", int, "tokens of a chat answer that names no limit"),
    ("max_body_bytes", int, "largest request body"),
    ("max_body_values", int, "most values of a request body, counted by its commas"),
    ("max_image_pixels", int, "largest image of a prompt"),
    ("max_images", int, "most images of one prompt"),
    ("timeout_s", float, "longest a request may take"),
    ("drain_s", float, "time for running requests after SIGTERM"),
    ("header_timeout_s", float, "longest that the headers of a request may take"),
    ("max_connections", int, "connections of all clients"),
    ("max_client_connections", int, "connections of one address"),
    ("prefill_tokens", int, "prompt tokens read between two rounds"),
    ("memory_budget", int, "bytes for caches and logits (default: no limit)"),
    ("prefix_bytes", int, "bytes for shared beginnings of prompts; 0 shares nothing"),
    ("grammar_workers", int, "grammars that are compiled at once"),
    ("grammar_queue", int, "grammars of one client that may wait to be compiled"),
    ("grammar_timeout_s", float, "longest that compiling a grammar may take"),
    ("grammar_bytes", int, "memory that compiling a grammar may take"),
    ("grammar_cache_bytes", int, "bytes of compiled grammars that are kept"),
    ("grammar_idle_s", float, "a process that compiles grammars ends after so long without work"),
    ("schema_bytes", int, "largest schema or grammar"),
    ("schema_depth", int, "deepest schema or grammar"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve the OpenAI API, and a page to watch it", description=__doc__)
    defaults = {item.name: item.default for item in fields(ServerSettings)}
    parser.add_argument("--host", default=defaults["host"], help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=defaults["port"], help="0 takes any that is free")
    parser.add_argument("--name", help="what the model is called in the API")
    parser.add_argument("--replica", default=defaults["replica"], help="which of several servers this is, for its metrics")
    _add_access(parser)
    text = (
        "capture rounds for requests of up to so many tokens, prompt included, before any request comes (GPU; 0: as they come)"
    )
    parser.add_argument("--warm-up", type=int, default=0, metavar="TOKENS", help=text)
    text = "let the draft model or the heads learn from requests; a copy of them, used once it is better"
    parser.add_argument("--learn", action="store_true", help=text)
    text = "share of the time that learning may take while requests are served (default: %(default)s)"
    parser.add_argument("--learn-share", type=float, default=0.05, metavar="SHARE", help=text)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add_model_options(parser, model_action="append")
    add_models(parser)
    add_replicas(parser)
    group = parser.add_argument_group("limits")
    for name, kind, text in _FLAGS:
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        shown = "" if defaults[name] is None else f" (default: {defaults[name]:g})"
        group.add_argument(flag, dest=name, type=kind, default=defaults[name], help=text + shown)
    text = "which rows share a round; the two others are references to measure against (default: %(default)s)"
    group.add_argument("--grouping", choices=list(GROUPINGS), default=defaults["grouping"], help=text)
    text = "keep keys and values in pages of so many tokens, so that beginnings share memory (a power of two; 0: no pages)"
    group.add_argument("--page-len", type=int, default=0, help=text)
    parser.set_defaults(run=run)


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument("--api-key", action="append", default=[], help="ask for this key (repeatable; or OUTRIDER_API_KEY)")
    group.add_argument("--api-key-file", help="JSON file of keys with limits of their own, read again when it changes")
    group.add_argument("--audit-log", help="file for a line per request: who asked what when, never the text")
    text = "site whose pages may call the API from a browser (repeatable; '*' for all)"
    group.add_argument("--cors-origin", action="append", default=[], help=text)
    text = "send OpenTelemetry spans of requests to this collector, as http://localhost:4318/v1/traces"
    group.add_argument("--otlp-endpoint", metavar="URL", help=text)
    group.add_argument("--tls-cert", help="certificate file (PEM): serve HTTPS")
    group.add_argument("--tls-key", help="its private key file (PEM)")


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    keys = [*arguments.api_key, *filter(None, [os.environ.get("OUTRIDER_API_KEY")])]
    limits = {name: vars(arguments)[name] for name, *_ in _FLAGS}
    access = {
        name: vars(arguments)[name] for name in ("api_key_file", "audit_log", "tls_cert", "tls_key", "grouping", "replica")
    }
    origins = tuple(arguments.cors_origin)
    return ServerSettings(
        host=arguments.host, port=arguments.port, api_keys=tuple(keys), cors_origins=origins, **limits, **access
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        from outrider.server.logs import log_as_json
        from outrider.server.run import bind, serve
        from outrider.server.service import Service
        from outrider.server.spans import exported_to
    except ImportError as error:
        raise OptionError(f"serving needs the package {error.name!r}; pip install 'outrider[serve]'") from None
    settings = _settings(arguments)
    listener = bind(settings.host, settings.port)
    if not settings.is_local and not settings.api_keys and not settings.api_key_file:
        print("outrider: anybody who reaches this address can use it; --api-key asks for a key", file=sys.stderr)
    log_as_json(arguments.log_level)
    if arguments.replicas:
        return serve_fleet(arguments, settings, listener)
    with ExitStack() as kept:
        first, *others = load_all(arguments, kept)
        for one in (first, *others):
            _warm_up(one.llm, arguments)
        lessons = _lessons(first.llm, arguments) if arguments.learn else {}
        spans = exported_to(arguments.otlp_endpoint, replica=settings.replica) if arguments.otlp_endpoint else None
        service = Service(first.llm, settings, name=first.name, spans=spans, **lessons)
        inner = replace(settings, api_keys=(), api_key_file=None, audit_log=None)  # the first one's guard is at the door
        more = [Service(one.llm, inner, name=one.name, parent=one.parent and service.name, spans=spans) for one in others]
        lost = [_watched(one.llm) for one in (service, *more)]
        serve(service, listener, page=live_page(), on_ready=_teller([service, *more]), others=more)
    return 1 if any(lost) else 0


def _warm_up(llm: LLM, arguments: argparse.Namespace) -> None:
    """Capture rounds of every number of rows that the server forms: powers of two, up to ``max_rows``."""
    if arguments.warm_up < 0:
        raise OptionError(f"--warm-up {arguments.warm_up} is not valid; use a number of tokens, or 0")
    if arguments.warm_up and arguments.memory_budget is None:  # with a budget no round is captured
        sizes = [1 << power for power in range(arguments.max_rows.bit_length())]
        num_tokens = min(arguments.warm_up, llm.target.max_len)
        llm.warm_up(num_tokens=num_tokens, batch_sizes=sorted({*sizes, num_slots(arguments.max_rows)}), progress=True)


def _lessons(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the service is told about learning."""
    from outrider.cli.serve_learning import taught

    found = taught(llm, arguments)
    if found is None:
        print(f"outrider: method {llm.method_name!r} learns by being used; --learn adds nothing to that", file=sys.stderr)
        return {}
    return {"learner": found.learner, "install": found.install}


def _teller(services: Sequence[Service]) -> Callable[[int], None]:
    """Says where it listens, once it does."""
    settings = services[0].settings

    def ready(port: int) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "https" if settings.tls_cert else "http"
        where = f"{scheme}://{host}:{port}/"
        models = ", ".join(f"{service.name} with {service.llm.method_name}" for service in services)
        print(f"outrider: {models} at {where} (API: /v1)", flush=True)

    return ready


def _watched(llm: LLM) -> list[str]:
    """Ends the server when a rank of a divided model dies: requests get an error, the process its exit code. Returns the list
    in which the dead rank will be named."""
    lost: list[str] = []

    def end(rank: str) -> None:
        lost.append(rank)
        print(f"outrider: {rank}; the server ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    if isinstance(llm.target, WatchedTarget):
        llm.target.tell_loss(end)
    return lost
