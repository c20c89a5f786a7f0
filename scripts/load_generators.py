"""Load generators that people have, against our server: guidellm and ``vllm bench serve``.

    python scripts/load_generators.py --guidellm FOLDER --vllm FOLDER [--requests 32] [--write docs/clients.md]

Starts ``outrider serve`` with the bundled pair on the loopback and lets each generator send streamed completions. Every request
must be answered without an error. ``--guidellm`` names a folder that ``pip install --target FOLDER guidellm`` filled.
``--vllm`` names one with vLLM's source; ``vllm/benchmarks`` is enough, and it wants the package ``aiohttp``. Of vLLM only the
benchmark runs, as it is: its modules that need the engine (data sets, tokenizers, arguments) are replaced by stand-ins, and the
requests are ours. The last line is JSON. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL, TOKENIZER = "outrider-bundled", ROOT / "src/outrider/bundled/target"
PROMPTS = ("Once upon a time", "One day, a little girl", "Tom and his dog", "There was a big red", "The old man")
_BEGIN, _END = "<!-- load generators -->", "<!-- end of load generators -->"


@contextmanager
def served() -> Iterator[str]:
    """The address of a server that runs as long as somebody looks."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"at (http://\S+:\d+)/", line)))
        finally:
            process.terminate()


@dataclass(frozen=True)
class Result:
    """What a load generator counted."""

    generator: str
    """Its name and version."""
    done: int
    failed: int
    tokens: int
    """Of the answers, as the generator counts them."""


def run_guidellm(address: str, folder: Path, count: int) -> Result:
    """Its command line, in a process of its own."""
    with TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        options = {
            "--backend": f"kind=openai_http,target={address},model={MODEL}",
            "--profile": "kind=concurrent,streams=4",
            "--constraint": f"kind=max_requests,count={count}",
            "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
            "--data": "kind=synthetic_text,prompt_tokens=24,output_tokens=24",
            "--output": f"kind=json,path={report}",
        }
        command = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
        environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        given = [part for option in options.items() for part in option]
        subprocess.run([*command, *given], env=environment, stdout=sys.stderr, timeout=900, check=True)
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    version = next(d.version for d in importlib.metadata.distributions(path=[str(folder)]) if d.name == "guidellm")
    tokens = round(metrics["output_token_count"]["successful"]["total_sum"])
    return Result(f"guidellm {version}", totals["successful"], totals["total"] - totals["successful"], tokens)


def run_vllm(address: str, folder: Path, count: int, version: str) -> Result:
    """``vllm bench serve`` in a process of its own, since stand-ins would stay."""
    command = [sys.executable, __file__, "--inside", address, "--vllm", str(folder), "--requests", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=900, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Result(f"vllm bench serve, {version}", found["completed"], found["failed"], found["total_output_tokens"])


@dataclass
class Sample:
    """A request as vLLM's benchmark takes it."""

    prompt: str
    prompt_len: int
    expected_output_len: int
    multi_modal_data: Any = None
    lora_request: Any = None
    request_id: str | None = None
    timestamp: float | None = None
    chat_messages: Any = None
    request_overrides: dict[str, Any] | None = None


class StandIn(types.ModuleType):
    """A module that has any name that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _benchmark(folder: Path) -> Any:
    """vLLM's module of the benchmark, its other modules replaced."""
    for name, place in (("vllm", folder / "vllm"), ("vllm.benchmarks", folder / "vllm/benchmarks")):
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    for name in ("benchmarks.datasets", "tokenizers", "logger", "utils", "utils.argparse_utils", "utils.gc_utils"):
        sys.modules[f"vllm.{name}"] = StandIn(f"vllm.{name}")
    sys.modules["vllm.utils.network_utils"] = StandIn("vllm.utils.network_utils")
    vars(sys.modules["vllm.logger"])["init_logger"] = lambda name: __import__("logging").getLogger(name)
    vars(sys.modules["vllm.utils.gc_utils"])["freeze_gc_heap"] = lambda: None
    return importlib.import_module("vllm.benchmarks.serve")


def inside(address: str, folder: Path, count: int) -> int:
    """The benchmark itself; its result is the last line."""
    from outrider.codecs.load import load_codec

    serve, codec = _benchmark(folder), load_codec(str(TOKENIZER))
    texts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(count)]
    samples = [Sample(text, len(codec.encode(text)), 24, request_id=f"r{i}") for i, text in enumerate(texts)]
    work = serve.benchmark(
        task_type=serve.TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{address}/v1/completions",
        base_url=address,
        model_id=MODEL,
        model_name=MODEL,
        tokenizer=None,
        input_requests=samples,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=1,
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl"],
        selected_percentiles=[99.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=4,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0.7},
    )
    found = asyncio.run(work)
    print(json.dumps({name: found[name] for name in ("completed", "failed", "total_output_tokens")}))
    return 0


def table(results: list[Result]) -> str:
    rows = ["| load generator | requests answered | failed | tokens |", "|---|---|---|---|"]
    return "\n".join([*rows, *(f"| {one.generator} | {one.done} | {one.failed} | {one.tokens} |" for one in results)])


def write(page: Path, text: str) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm-version", default="unknown version", help="what the table calls that source")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this page")
    parser.add_argument("--inside", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return inside(given.inside, given.vllm, given.requests)
    with served() as address:
        results = [run_guidellm(address, given.guidellm, given.requests)] if given.guidellm else []
        results += [run_vllm(address, given.vllm, given.requests, given.vllm_version)] if given.vllm else []
    print(table(results))
    if given.write:
        write(given.write, table(results))
    print(json.dumps([vars(one) for one in results]))
    return 1 if not results or any(one.failed or one.done < given.requests for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
