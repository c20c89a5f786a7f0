"""``outrider serve``: the OpenAI API on this machine, and a page to watch it at ``/``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from outrider.cli.parser import shown_number
from outrider.cli.parsers.shared import add_model_options, add_models, add_replicas
from outrider.server.settings import ServerSettings

LIMITS = (
    ("max_rows", int, "requests that share rounds"),
    ("max_requests", int, "requests in the server, waiting ones included"),
    ("max_choices", int, "most prompts times n of one request"),
    ("max_tokens", int, "most tokens a request may ask for"),
    ("default_tokens", int, "tokens of a chat answer that names no limit"),
    ("max_body_bytes", int, "largest request body"),
    ("max_body_values", int, "most values of a request body, counted by its commas; a key counts as eight"),
    ("max_image_pixels", int, "largest image of a prompt"),
    ("max_images", int, "most images of one prompt"),
    ("timeout_s", float, "longest a request may take"),
    ("drain_s", float, "time for running requests after SIGTERM"),
    ("header_timeout_s", float, "longest that the headers of a request may take"),
    ("max_connections", int, "connections of all clients"),
    ("max_client_connections", int, "connections of one address"),
    ("prefill_tokens", int, "prompt tokens read between two rounds"),
    ("memory_budget", int, "bytes for caches and logits (default: no limit)"),
    ("prefix_bytes", int, "bytes of the prefix cache; 0 turns it off"),
    ("stored_responses", int, "responses of /v1/responses that are stored, for previous_response_id; 0 stores none"),
    ("stored_bytes", int, "bytes of stored responses"),
    ("stored_age_s", float, "seconds after which a stored response is forgotten"),
    ("grammar_workers", int, "grammars that are compiled at once"),
    ("grammar_queue", int, "grammars of one client that may wait to be compiled"),
    ("grammar_timeout_s", float, "processor time that compiling a grammar may take"),
    ("grammar_bytes", int, "memory that compiling a grammar may take"),
    ("grammar_cache_bytes", int, "bytes of compiled grammars that are kept"),
    ("grammar_idle_s", float, "a process that compiles grammars ends after so long without work"),
    ("schema_bytes", int, "largest schema or grammar"),
    ("schema_depth", int, "deepest schema or grammar"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", description=__doc__)
    defaults: dict[str, Any] = {item.name: item.default for item in fields(ServerSettings)}
    parser.add_argument("--host", default=defaults["host"], help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=defaults["port"], help="port to listen on; 0 picks a free one")
    parser.add_argument("--name", help="what the model is called in the API")
    parser.add_argument(
        "--replica", default=defaults["replica"], help="name of this server in its metrics, for several servers"
    )
    _add_access(parser)
    text = "on a GPU: capture rounds before the first request, instead of when they are first needed"
    parser.add_argument("--warm-up", action="store_true", help=text)
    text = "train a copy of the draft model or heads on finished requests, and use it once it is better"
    parser.add_argument("--learn", action="store_true", help=text)
    text = "share of the time that learning may take while requests are served (default: %(default)s)"
    parser.add_argument("--learn-share", type=float, default=0.03, metavar="SHARE", help=text)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add_model_options(parser, model_action="append")
    add_models(parser)
    add_replicas(parser)
    group = parser.add_argument_group("limits")
    for name, kind, text in LIMITS:
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        shown = "" if defaults[name] is None else f" (default: {shown_number(defaults[name])})"
        group.add_argument(flag, dest=name, type=kind, default=defaults[name], help=text + shown)
    text = "which requests share a round: ragged (all of them); eqspec and exspec are for comparison"
    group.add_argument("--grouping", metavar="NAME", default=defaults["grouping"], help=text)
    text = "tokens per page of keys and values, a power of two; equal prefixes share pages (default: 0, the device decides)"
    group.add_argument("--page-len", type=int, default=0, help=text)


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument("--api-key", action="append", default=[], help="ask for this key (repeatable; or OUTRIDER_API_KEY)")
    group.add_argument("--api-key-file", help="JSON file of keys with limits of their own, read again when it changes")
    group.add_argument("--audit-log", help="file with a line per request: who asked what and when, never the text")
    text = "site whose pages may call the API from a browser (repeatable; '*' for all)"
    group.add_argument("--cors-origin", action="append", default=[], help=text)
    text = "send OpenTelemetry spans of requests to this collector, for example http://localhost:4318/v1/traces"
    group.add_argument("--otlp-endpoint", metavar="URL", help=text)
    group.add_argument("--tls-cert", help="certificate file (PEM): serve HTTPS")
    group.add_argument("--tls-key", help="private key file of the certificate (PEM)")
