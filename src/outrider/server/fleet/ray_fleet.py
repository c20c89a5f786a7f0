"""Replicas on Ray Serve. Starting them, checking their health, replacing dead ones, scaling and queueing are Ray's own work."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray  # pyright: ignore[reportMissingImports]
import torch
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import BackPressureError  # pyright: ignore[reportMissingImports]
from ray.serve.schema import LoggingConfig  # pyright: ignore[reportMissingImports]
from starlette.types import Message

from outrider.core.errors import OptionError
from outrider.server.failures import busy, failed
from outrider.server.fleet.fleet import Call, Fleet, ReplicaLost, Routing
from outrider.server.fleet.ray_scaling import ENOUGH
from outrider.server.fleet.replica import Opened, Replica
from outrider.server.settings import ServerSettings

_APP = "outrider"
_HEALTH_S = 1.0
_UNWELL_S = 20.0
"""A replica that fails its health check for this many seconds is replaced."""
_ASK_ALL_S = 5.0
_SWAP_S = 300.0
_STORE_BYTES = 200_000_000
_POLICY = "outrider.server.fleet.ray_scaling:by_goodput"
_ROUTER = "outrider.server.fleet.ray_router:PrefixRouter"
_PRELOADED = "outrider.server.fleet.ray_fleet,outrider.cli.serve_fleet"
"""Modules that every process of a local Ray imports before it gets work. Imports are most of a replica's start."""
_SPARES = 2
"""Spare processes of a local Ray. A replica that replaces a dead one takes a spare, so it need not start a process and
import PyTorch."""


@dataclass(frozen=True)
class FleetOptions:
    """Number and size of the replicas."""

    fewest: int = 1
    most: int = 1
    """Most replicas. Above ``fewest``, replicas come and go with the load."""
    target_requests: float = 8.0
    """Requests that fill a replica, queued ones included, until its goodput is known."""
    routing: Routing = "prefix"
    cpus: float | None = None
    """Cores of a replica; None divides this machine's cores."""
    gpus: float = 0.0
    address: str | None = None
    """A Ray cluster to join. None starts one on this machine, which ends with this process."""

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise OptionError(
                f"--replicas {self.fewest}:{self.most} is not valid; write N, or LEAST:MOST with 1 <= LEAST <= MOST"
            )
        if self.target_requests <= 0:
            raise OptionError(f"--target-requests {self.target_requests:g} is not valid; use a positive number")

    @property
    def replica_cpus(self) -> float:
        return self.cpus or max((os.cpu_count() or 1) / self.most, 0.1)

    @property
    def num_threads(self) -> int:
        """Threads of a replica."""
        return max(1, int(self.replica_cpus))

    @property
    def num_processes(self) -> int:
        """Processes of a local Ray: the replicas, the controller and the spares."""
        return self.most + 1 + _SPARES


@final
class _Deployed:
    """A ``Replica`` as Ray Serve starts it."""

    def __init__(self, opening: Callable[[str], Opened], page: str, target_requests: float, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # PyTorch was imported before Ray said how many cores there are
        self._target_requests = target_requests
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(name, opening(name), page)

    async def answer(self, text: str, call: Call) -> AsyncGenerator[list[Message], None]:
        async for group in self._replica.answer(text, call):
            yield group

    async def metrics(self) -> tuple[str, bytes]:
        return await self._replica.metrics()

    async def load(self) -> tuple[str, Mapping[str, int]]:
        return await self._replica.load()

    def check_health(self) -> None:
        self._replica.check_health()

    async def replace_draft(self, name: str) -> tuple[str, str]:
        return await self._replica.replace_draft(name)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for ``by_goodput``; Ray asks for them every few seconds."""
        return {ENOUGH: self._replica.enough(self._target_requests)}

    def __del__(self) -> None:
        self._replica.close()


@final
class RayFleet(Fleet):
    """The replicas of one application of Ray Serve."""

    def __init__(
        self, opening: Callable[[str], Opened], options: FleetOptions, settings: ServerSettings, page: str = ""
    ) -> None:
        """``opening`` makes a replica's services, in its process, from its name. Returns when all are ready."""
        self._options, self._settings = options, settings
        _connect(options)
        serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="ERROR", enable_access_log=False))
        deployment = self._deployment().bind(opening, page, options.target_requests, options.num_threads)
        self._handle = serve.run(deployment, name=_APP, route_prefix=None)

    def _deployment(self) -> Any:
        options, settings = self._options, self._settings
        shape: dict[str, Any] = {"num_replicas": options.fewest}
        if options.most > options.fewest:
            shape = {"autoscaling_config": _scaling(options)}
        if options.routing == "prefix":
            shape["request_router_config"] = RequestRouterConfig(request_router_class=_ROUTER)
        return serve.deployment(_Deployed, name="Replica").options(
            **shape,
            max_ongoing_requests=settings.max_requests,
            max_queued_requests=settings.max_requests,
            health_check_period_s=_HEALTH_S,
            health_check_timeout_s=_UNWELL_S,
            graceful_shutdown_timeout_s=settings.drain_s,
            ray_actor_options={"num_cpus": 1 if options.address is None else options.replica_cpus, "num_gpus": options.gpus},
        )

    async def ask(self, text: str, call: Call) -> AsyncGenerator[Sequence[Message], None]:
        answer = self._handle.options(stream=True).answer.remote(text, call)
        is_over = False
        try:
            async for group in answer:
                yield group
            is_over = True
        except RayActorError as error:
            is_over = True
            raise ReplicaLost(str(error)) from None
        except BackPressureError:
            raise busy(self._settings.max_requests) from None
        except RayTaskError as error:
            raise failed(f"{type(error.cause).__name__} in a replica") from error
        finally:
            if not is_over:
                answer.cancel()

    async def metrics(self) -> Mapping[str, bytes]:
        return await self._ask_all("metrics")

    async def loads(self) -> Mapping[str, Mapping[str, int]]:
        return await self._ask_all("load")

    async def replace_draft(self, name: str) -> str | None:
        told = await self._ask_all("replace_draft", name, limit_s=_SWAP_S)
        return told.get(name)

    async def _ask_all(self, method: str, *arguments: Any, limit_s: float = _ASK_ALL_S) -> dict[str, Any]:
        """The answers of all replicas by name, without those that do not answer in time."""
        try:
            told = await self._handle.broadcast(method, *arguments).results_async(timeout_s=limit_s, return_exceptions=True)
        except (serve.exceptions.RayServeException, TimeoutError):
            return {}
        return dict(one for one in told if not isinstance(one, BaseException))

    def close(self) -> None:
        """End the replicas, and Ray if it was started here."""
        serve.delete(_APP)
        if self._options.address is None:
            serve.shutdown()
            ray.shutdown()


def _connect(options: FleetOptions) -> None:
    """Join a cluster, or start a small one on this machine."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody outside
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own default lets replicas wait for everything else
    if options.address is not None:
        ray.init(address=options.address, **quiet)
        return
    os.environ.setdefault("RAY_preload_python_modules", _PRELOADED)
    os.environ.setdefault("RAY_num_workers_soft_limit", str(options.num_processes))
    # Ray starts as many processes beforehand as it counts cores, and never more at once than the machine has
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(options.num_processes))
    ray.init(num_cpus=options.num_processes, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)


def _scaling(options: FleetOptions) -> Any:
    return AutoscalingConfig(
        min_replicas=options.fewest,
        initial_replicas=options.fewest,
        max_replicas=options.most,
        target_ongoing_requests=options.target_requests,
        policy=AutoscalingPolicy(policy_function=_POLICY),
        upscale_delay_s=5.0,
        downscale_delay_s=60.0,
    )
