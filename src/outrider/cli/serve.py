"""Runs ``outrider serve``: opens the models and the socket, and says where it listens."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.api import LLM
from outrider.cli.parsers.serve import LIMITS
from outrider.cli.progress import waiting
from outrider.cli.serve_fleet import serve_fleet
from outrider.cli.serve_models import load_all
from outrider.core.errors import OptionError
from outrider.core.watched_target import WatchedTarget
from outrider.engine.grouping import GROUPINGS
from outrider.engine.round_kind import num_slots
from outrider.server.settings import ServerSettings
from outrider.viz.page import live_page

if TYPE_CHECKING:
    from outrider.server.service import Service


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    keys = [*arguments.api_key, *filter(None, [os.environ.get("OUTRIDER_API_KEY")])]
    limits = {name: vars(arguments)[name] for name, *_ in LIMITS}
    access = {
        name: vars(arguments)[name] for name in ("api_key_file", "audit_log", "tls_cert", "tls_key", "grouping", "replica")
    }
    origins = tuple(arguments.cors_origin)
    return ServerSettings(
        host=arguments.host, port=arguments.port, api_keys=tuple(keys), cors_origins=origins, **limits, **access
    )


def run(arguments: argparse.Namespace) -> int:
    GROUPINGS[arguments.grouping]  # a wrong name is refused before anything is loaded
    settings = _settings(arguments)
    try:
        with waiting("loading the server"):
            from outrider.server.logs import log_as_json
            from outrider.server.run import bind, serve
            from outrider.server.service import Service
            from outrider.server.spans import exported_to
    except ImportError as error:
        raise OptionError(f"serving needs the package {error.name!r}; pip install 'outrider[serve]'") from None
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
        learning = _learning(first.llm, arguments) if arguments.learn else {}
        spans = exported_to(arguments.otlp_endpoint, replica=settings.replica) if arguments.otlp_endpoint else None
        service = Service(first.llm, settings, name=first.name, spans=spans, **learning)
        inner = replace(settings, api_keys=(), api_key_file=None, audit_log=None)  # the first one's guard is at the door
        more = [Service(one.llm, inner, name=one.name, parent=one.parent and service.name, spans=spans) for one in others]
        for one in (service, *more):
            one.prepare(is_warm=arguments.warm_up)
        lost = [_watched(one.llm) for one in (service, *more)]
        serve(service, listener, page=live_page(), on_ready=_teller([service, *more]), on_drain=_farewell, others=more)
    return 1 if any(lost) else 0


def _warm_up(llm: LLM, arguments: argparse.Namespace) -> None:
    """Capture rounds for every batch size that the server forms: powers of two up to ``max_rows``."""
    if arguments.warm_up and arguments.memory_budget is None:  # with a budget no round is captured
        sizes = [1 << power for power in range(arguments.max_rows.bit_length())]
        llm.warm_up(batch_sizes=sorted({*sizes, num_slots(arguments.max_rows)}), progress=True)


def _learning(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """The service's arguments for learning."""
    from outrider.cli.serve_learning import taught
    from outrider.train.online import OnlineSettings

    settings = OnlineSettings(background=True, busy_share=arguments.learn_share)
    found = taught(llm, settings, dtype=arguments.dtype, device=arguments.device)
    if found is None:
        print(f"outrider: method {llm.method_name!r} learns by being used; --learn adds nothing to that", file=sys.stderr)
        return {}
    return {"learner": found.learner, "install": found.install}


def _teller(services: Sequence[Service]) -> Callable[[int], None]:
    """Prints the address once the server listens."""
    settings = services[0].settings

    def ready(port: int) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "https" if settings.tls_cert else "http"
        where = f"{scheme}://{host}:{port}/"
        models = ", ".join(f"{service.name} with {service.llm.method_name}" for service in services)
        print(f"outrider: {models} at {where} (API: /v1)", flush=True)

    return ready


def _farewell() -> None:
    """Explain the wait after a signal."""
    print("outrider: ending once running requests have finished; a second signal ends it at once ...", file=sys.stderr)


def _watched(llm: LLM) -> list[str]:
    """End the server if a rank of a divided model dies: requests get an error, the process an exit code. Returns the list
    that will name the dead rank."""
    lost: list[str] = []

    def end(rank: str) -> None:
        lost.append(rank)
        print(f"outrider: {rank}; the server ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    if isinstance(llm.target, WatchedTarget):
        llm.target.tell_loss(end)
    return lost
