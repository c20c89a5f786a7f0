"""Which client can use which feature of the server: every cell is a call that was made and whose answer was checked.

    python scripts/clients.py [--packages CLIENT=FOLDER] [--js FOLDER] [--out benchmarks/results/clients.json]

Starts ``outrider serve`` with the bundled pair on the loopback and runs every client that is installed. They are the ``openai``
package (Python), ``litellm``, ``langchain-openai``, ``llama-index-llms-openai-like``, and with ``--js`` the ``openai`` package
of a folder with ``node_modules``. Each client is a process of its own, because they ask for different versions of ``openai``;
``--packages litellm=FOLDER`` names a folder that ``pip install --target FOLDER litellm`` filled. A cell is yes, the error that
came instead, or empty where the client has no such call. The exit code is 1 if a call of an installed client failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from client_checks import MODEL, PROMPT, PYTHON, SCHEMA, Check

_JS = Path(__file__).with_name("clients.mjs")


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The address of a server with these options that runs as long as somebody looks."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--log-level", "error", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"at (http://\S+:\d+)/", line)))
        finally:
            process.terminate()


def outcome(feature: str, check: Check) -> str:
    try:
        return "yes" if check() else "wrong answer"
    except Exception as error:
        print(f"{feature}: {type(error).__name__}: {error}", file=sys.stderr)
        return type(error).__name__


def run_here(name: str, address: str) -> dict[str, dict[str, str]]:
    """Results of a client that is installed in this process, named with its version; empty if it is not."""
    try:
        found = PYTHON[name](address)
        return {f"{name} {version(name)}": {feature: outcome(feature, check) for feature, check in found.items()}}
    except (ImportError, PackageNotFoundError) as error:
        print(f"{name} is not installed ({error}); left out", file=sys.stderr)
        return {}


def run_apart(name: str, address: str, folder: str | None) -> dict[str, dict[str, str]]:
    """Run Python clients in a process of its own, with the packages of a folder first. It talks to the server alone."""
    paths = os.pathsep.join(path for path in (folder, os.environ.get("PYTHONPATH")) if path)
    env = {**os.environ, "PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--client", name, "--address", address]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_js(address: str, folder: Path) -> dict[str, dict[str, str]]:
    """Run OpenAI's package for JavaScript."""
    package = json.loads((folder / "node_modules" / "openai" / "package.json").read_text())
    command = ["node", "--input-type=module", "-", address, MODEL, PROMPT, json.dumps(SCHEMA)]
    done = subprocess.run(
        command, input=_JS.read_text(), cwd=folder, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    return {f"openai (JavaScript) {package['version']}": json.loads(done.stdout.splitlines()[-1])}


def by_feature(results: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """A row per feature, with a cell per client."""
    features = dict.fromkeys(feature for cells in results.values() for feature in cells)
    return [{"feature": one, **{client: cells.get(one, "") for client, cells in results.items()}} for one in features]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="append", default=[], metavar="CLIENT=FOLDER", help="where a client is installed")
    parser.add_argument("--js", type=Path, help="folder whose node_modules has the openai package")
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--client", choices=PYTHON, help="run this client alone, in this process")
    parser.add_argument("--address", help="of the server that --client asks")
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(run_here(arguments.client, arguments.address)))
        return 0
    packages = dict(pair.split("=", 1) for pair in arguments.packages)
    if unknown := packages.keys() - PYTHON.keys():
        parser.error(f"--packages names {', '.join(sorted(unknown))}, which is no client here; clients: {', '.join(PYTHON)}")
    results: dict[str, dict[str, str]] = {}
    with served() as address:
        for name in PYTHON:
            results |= run_apart(name, address, packages.get(name))
        results |= run_js(address, arguments.js) if arguments.js else {}
    from outrider.bench.provenance import keep_results

    what = "calls that clients made and whose answers were checked"
    print(json.dumps(keep_results(arguments.out, what, by_feature(results), script="scripts/clients.py")))
    return 0 if all(cell == "yes" for cells in results.values() for cell in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
