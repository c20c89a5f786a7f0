"""A fleet on Ray Serve that grows and shrinks with its load: when replicas came and went, and what became of the requests.

    python benchmarks/ray_scaling.py [--replicas 1:3] [--target-requests 4] [--clients 16] [--most-s 180] [--out FILE]

`outrider serve --replicas LEAST:MOST` with the bundled pair gets the mixed requests of `ray_run.py` from `--clients` clients,
until MOST replicas answer or `--most-s` seconds have passed. Then the load ends, and replicas are counted until LEAST are
left. A replica reports how many requests fill it by its own goodput, so fewer than MOST may be enough. Texts are compared
with plain decoding afterwards. The last line is JSON. The exit code is 1 if the fleet did not grow or did not shrink to
LEAST, a request was lost or hung, or a text was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from ray_run import Load, Served, requests_of, wrong_texts  # pyright: ignore

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path

_SHRINK_S = 240.0


class Watch:
    """How many replicas answer, whenever that changes."""

    def __init__(self, address: str) -> None:
        self._address, self._began = address, time.monotonic()
        self.changes: list[tuple[float, int]] = []

    @property
    def now(self) -> int:
        return self.changes[-1][1] if self.changes else 0

    async def look(self) -> None:
        async with httpx.AsyncClient(base_url=self._address, timeout=30) as http:
            found = int((await http.get("/health")).json()["replicas"])
        if found != self.now:
            self.changes.append((round(time.monotonic() - self._began, 1), found))
            print(self.changes[-1], file=sys.stderr, flush=True)

    async def until(self, count: int, most_s: float) -> None:
        end = time.monotonic() + most_s
        while self.now != count and time.monotonic() < end:
            await self.look()
            await asyncio.sleep(0.5)


async def loaded(watch: Watch, served: Served, arguments: argparse.Namespace, most: int) -> Load:
    """Requests come until the fleet is as large as it may be."""
    load = Load()
    grown = asyncio.create_task(watch.until(most, arguments.most_s))
    turn = 0
    while not grown.done():
        await load.run(served.address, requests_of(4 * arguments.clients, seed=turn), arguments.clients)
        turn += 1
    await grown
    return load


async def scaled(served: Served, arguments: argparse.Namespace, least: int, most: int) -> dict[str, Any]:
    watch = Watch(served.address)
    await watch.look()
    load = await loaded(watch, served, arguments, most)
    ended, grown = watch.changes[-1][0], watch.now
    different = await wrong_texts(served.address, load.texts[:: max(1, len(load.texts) // 40)])
    idle = time.monotonic()
    await watch.until(least, _SHRINK_S)
    told = {"requests": sum(load.counts.values()), **dict(sorted(load.counts.items())), "different": different}
    told |= {"least": least, "most": most, "clients": arguments.clients, "changes": watch.changes, "grown_to": grown}
    return {**told, "grown_s": ended, "shrunk_to": watch.now, "shrunk_s": round(time.monotonic() - idle, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1:3")
    parser.add_argument("--target-requests", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--most-s", type=float, default=180.0)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    least, most = map(int, arguments.replicas.split(":"))
    more = ["--target-requests", f"{arguments.target_requests:g}"]
    with Served(arguments, Path(bundled_path("draft")), "prefix", more) as served:
        row = asyncio.run(scaled(served, arguments, least, most))
    what = "a fleet that grows with its load and shrinks without it"
    print(json.dumps(keep_results(arguments.out, what, [row], script="benchmarks/ray_scaling.py")))
    bad = [row.get(name, 0) for name in ("lost", "hung", "different")]
    return 1 if any(bad) or row["grown_to"] == least or row["shrunk_to"] != least else 0


if __name__ == "__main__":
    sys.exit(main())
