"""What a new replica of a fleet does before it answers: CPU seconds by step, in one process.

    python benchmarks/replica_start.py [--out FILE]

A replica that was killed is back when Ray Serve has started a process that has done these steps. CPU seconds do not depend on
who else uses the machine; on a free core they are the seconds it takes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORTS = ("ray", "ray.serve", "torch", "outrider.server.fleet.replica", "outrider.cli.serve_fleet")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def timed(step: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = work()
        rows.append({"step": step, "cpu_s": round(time.process_time() - began, 2)})
        print(rows[-1], file=sys.stderr, flush=True)
        return found

    for name in _IMPORTS:
        timed(f"import {name}", lambda name=name: importlib.import_module(name))
    from outrider import LLM, SamplingParams
    from outrider.bench.provenance import keep_results
    from outrider.server.fleet.replica import Replica
    from outrider.server.service import Service
    from outrider.server.settings import ServerSettings

    llm = timed("open the bundled pair", LLM)
    opened = ([Service(llm, ServerSettings())], lambda: None)
    replica = timed("start the engine", lambda: Replica("r0", opened))
    timed("four tokens", lambda: llm.generate(["Once upon a time"], SamplingParams(max_tokens=4)))
    replica.close()
    what = "CPU seconds of a new replica, by step"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/replica_start.py")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
