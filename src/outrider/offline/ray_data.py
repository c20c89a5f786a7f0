"""The shards of a job on Ray Data: a pool of workers, each with the model loaded once, on one machine or on a cluster.

Ray hands out shards, restarts a worker that dies and gives its shard to another one. Finished shards of a killed job stay in
the folder of the shards. Every worker must reach that folder, so several machines need a shared file system.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import ray  # pyright: ignore[reportMissingImports]
import ray.data  # pyright: ignore[reportMissingImports]

from outrider.core.errors import OptionError
from outrider.offline.shards import OpenWriter, Shards, write_shard

_STORE_BYTES = 200_000_000


@dataclass(frozen=True)
class Workers:
    """Number of worker processes, and the resources of each."""

    count: int = 2
    gpus: float = 0.0
    address: str | None = None
    """Address of a Ray cluster to join. None starts Ray on this machine, and stops it with this process."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"--workers {self.count} is not valid; use at least 1")


@final
class _ShardWriter:
    """One worker: a writer, and the folder it writes to."""

    def __init__(self, open_writer: OpenWriter, folder: str) -> None:
        self._writer, self._folder = open_writer(), Path(folder)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        numbers = [int(number) for number in batch["number"]]
        for number, task in zip(numbers, batch["task"], strict=True):
            write_shard(self._folder, number, self._writer([(int(place), _plain(prompt)) for place, prompt in task]))
        return {"number": numbers}


def _plain(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else [int(token) for token in prompt]


def run_on_ray(shards: Shards, open_writer: OpenWriter, workers: Workers) -> Iterator[int]:
    """Write the missing shards. Yields the number of each shard that is done."""
    left = shards.missing()
    if not left:
        return
    _connect(workers)
    try:
        items = [{"number": number, "task": shards.task(number)} for number in left]
        found = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            _ShardWriter,
            batch_size=1,
            fn_constructor_args=(open_writer, str(shards.folder.absolute())),
            compute=ray.data.ActorPoolStrategy(size=min(workers.count, len(left))),
            num_gpus=workers.gpus or None,
            num_cpus=_cpus(workers),
        )
        for row in found.iter_rows():
            yield int(row["number"])
    finally:
        ray.shutdown()


def _cpus(workers: Workers) -> float:
    """An equal share of this machine's cores, slightly reduced to leave room for Ray's own tasks."""
    return max(0.9 * (os.cpu_count() or 1) / workers.count, 0.05) if workers.address is None else 1.0


def _connect(workers: Workers) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody outside
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if workers.address is None:
        quiet |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES, "num_cpus": os.cpu_count() or 1}
    ray.init(address=workers.address, **quiet)
    ray.data.DataContext.get_current().enable_progress_bars = False
