"""``outrider serve --replicas N``: several engines behind one address, each in a process that Ray Serve looks after."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from outrider.api import LLM
from outrider.cli.serve_models import load_all
from outrider.core.errors import ModelError, OptionError
from outrider.models.load import load_model
from outrider.server.settings import ServerSettings
from outrider.viz.page import live_page

if TYPE_CHECKING:
    from outrider.server.fleet.ray_fleet import FleetOptions, RayFleet
    from outrider.server.fleet.replica import NewDraft, Opened

_KEPT = ExitStack()
"""Folders of merged adapters of a replica's process, removed when it ends."""


def fleet_options(arguments: argparse.Namespace) -> FleetOptions:
    from outrider.server.fleet.ray_fleet import FleetOptions

    least, _, most = arguments.replicas.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()):
        raise OptionError(f"--replicas {arguments.replicas} is not valid; write a number, or two as 1:4")
    return FleetOptions(
        int(least),
        int(most or least),
        target_requests=arguments.target_requests,
        routing=arguments.routing,
        cpus=arguments.replica_cpus,
        gpus=arguments.replica_gpus,
        address=arguments.ray_address,
    )


def serve_fleet(arguments: argparse.Namespace, settings: ServerSettings, listener: socket.socket) -> int:
    """Serve until a signal. SIGHUP replaces the drafts."""
    try:
        from outrider.server.fleet.front import guarded
        from outrider.server.fleet.merged import FrontMetrics
        from outrider.server.fleet.ray_fleet import RayFleet
        from outrider.server.run import Signals, serve_app
    except ImportError as error:
        raise OptionError(f"--replicas needs the package {error.name!r}; pip install 'outrider[ray]'") from None
    if arguments.learn:
        raise OptionError("--learn trains the draft of one engine, and --replicas has several; leave one of them out")
    inner = replace(settings, api_keys=(), api_key_file=None, audit_log=None, tls_cert=None, tls_key=None)
    opening = partial(open_services, argparse.Namespace(**{**vars(arguments), "api_key": []}), inner)
    options, metrics = fleet_options(arguments), FrontMetrics()
    fleet = RayFleet(opening, options, settings, live_page())
    try:
        front, app = guarded(fleet, settings, metrics)
        signals = Signals(front.drain, _swapper(fleet, metrics.swaps.inc))
        serve_app(app, settings, listener, signals=signals, on_ready=_teller(settings, options))
    finally:
        fleet.close()
    return 0


def open_services(arguments: argparse.Namespace, settings: ServerSettings, name: str) -> Opened:
    """The services of a replica, in its own process, and the function that reads its draft again."""
    from outrider.server.fleet.replica import NewDraft
    from outrider.server.service import Service
    from outrider.server.spans import exported_to

    first, *others = load_all(arguments, _KEPT)
    inner = replace(settings, replica=name)
    spans = exported_to(arguments.otlp_endpoint, replica=name) if arguments.otlp_endpoint else None
    new_draft = NewDraft()
    service = Service(first.llm, inner, name=first.name, learner=new_draft, spans=spans)
    more = [Service(one.llm, inner, name=one.name, parent=one.parent and service.name, spans=spans) for one in others]
    for one in (service, *more):
        one.prepare(is_warm=False)
    return [service, *more], partial(_read_draft, first.llm, arguments, new_draft)


def _read_draft(llm: LLM, arguments: argparse.Namespace, place: NewDraft) -> None:
    if not llm.drafts:
        raise OptionError(f"method {llm.method_name!r} has no draft model to replace; name one with --draft")
    draft = load_model(llm.draft_names[0], dtype=arguments.dtype, device=arguments.device, fast=arguments.fast)
    if draft.vocab_size != llm.drafts[0].vocab_size:
        sizes = f"{draft.vocab_size} tokens, the one before {llm.drafts[0].vocab_size}"
        raise ModelError(f"the new draft {llm.draft_names[0]} has {sizes}; give one with the same tokenizer")
    place.offer(draft)


def _swapper(fleet: RayFleet, done: Callable[[], None]) -> Callable[[], None]:
    """Replaces all drafts. A replacement requested during another one waits for it."""
    running: set[asyncio.Task[None]] = set()
    turn = asyncio.Lock()

    async def swap() -> None:
        async with turn:
            told = await fleet.swap_drafts()
        done()
        wrong = next(filter(None, told.values()), "")
        print(
            f"outrider: {sum(not error for error in told.values())} of {len(told)} replicas draft with the new model",
            flush=True,
        )
        if wrong:
            print(f"outrider: the others keep theirs: {wrong}", file=sys.stderr, flush=True)

    def start() -> None:
        task = asyncio.ensure_future(swap())
        running.add(task)
        task.add_done_callback(running.discard)

    return start


def _teller(settings: ServerSettings, options: FleetOptions) -> Callable[[int], None]:
    def ready(port: int) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "https" if settings.tls_cert else "http"
        number = str(options.fewest) if options.most == options.fewest else f"{options.fewest} to {options.most}"
        print(f"outrider: {number} replicas, routed by {options.routing}, at {scheme}://{host}:{port}/ (API: /v1)", flush=True)

    return ready
