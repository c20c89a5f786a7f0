"""LangChain's own integration tests of chat models against the server: what a package for another engine has to pass.

    python scripts/langchain_check.py [--packages FOLDER] [--out FILE] [--only WORDS]

Runs ``ChatModelIntegrationTests`` of ``langchain-tests`` with ``ChatOpenAI`` against ``outrider serve`` with the bundled pair.
``--packages`` names a folder that ``pip install --target FOLDER langchain-tests langchain-openai`` filled. A row of the result
is a test: passed, failed with the first line of its error, or skipped with LangChain's reason. Some tests ask what a model of
12 million parameters cannot do (``OF_MODEL``); their row says what that is. The exit code is 1 if another one fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from client_checks import MODEL
from clients import served

from outrider.bench.provenance import keep_results

ENDLESS = (
    "the model does not end the string",
    ("LengthFinishReasonError", "assert []", "at least 1 tool call", "isinstance(None", "assert False"),
)
NUMBER = "the argument has to be 3, and the model says another number", ("assert {'input'",)
OF_MODEL: dict[str, tuple[str, tuple[str, ...]]] = {
    "test_agent_loop": ("the model has to choose a tool by itself", ("assert False",)),
    "test_json_mode": ("JSON mode names no keys, and the model makes up others", ("OutputParserException",)),
    "test_tool_calling": NUMBER,
    "test_tool_calling_async": NUMBER,
    "test_tool_choice": ENDLESS,
    "test_unicode_tool_call_integration": ENDLESS,
    "test_structured_output": ENDLESS,
    "test_structured_output_async": ENDLESS,
    "test_structured_output_pydantic_2_v1": ENDLESS,
    "test_structured_output_optional_param": ENDLESS,
}
"""Tests that ask more than the form of an answer, which is all that a grammar makes certain: what they ask, and words that
their error then has. Any other error counts."""
SUITE = """
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServer(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = {params!r}
    has_tool_choice = supports_json_mode = True
    structured_output_kwargs = {{"method": "json_schema"}}
"""


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """The outcome of a test, and the reason in a line."""
    for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return word, str(found.get("message") or "").strip().partition("\n")[0][:100]
    return "passed", ""


def rows_of(report: Path) -> list[dict[str, Any]]:
    """A row per test; a test with parameters has several."""
    found = list[dict[str, Any]]()
    for case in ElementTree.parse(report).iter("testcase"):
        (result, why), name = outcome(case), str(case.get("name"))
        asked, words = OF_MODEL.get(name.partition("[")[0], ("", ()))
        if result == "failed" and any(word in why for word in words):
            result, why = "failed by the model", asked
        found.append({"test": name, "result": result, "why": why})
    return found


def is_well(rows: list[dict[str, Any]]) -> bool:
    """Tests ran, and none failed but by the model."""
    results = {row["result"] for row in rows}
    return "passed" in results and "failed" not in results


def run(address: str, packages: str | None, only: str | None) -> list[dict[str, Any]]:
    params = {
        "base_url": f"{address}/v1",
        "api_key": "none",
        "model": MODEL,
        "seed": 3,
        "max_tokens": 120,
        "stream_usage": True,
    }
    words = ["-k", only] if only else []
    with tempfile.TemporaryDirectory() as folder:
        suite, report = Path(folder) / "test_server.py", Path(folder) / "report.xml"
        suite.write_text(SUITE.format(params=params))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),
            *("-o", "asyncio_default_fixture_loop_scope=session"),
            "--allow-hosts=127.0.0.1",
            f"--junitxml={report}",
        ]
        known = {**os.environ, **({"PYTHONPATH": packages} if packages else {}), "LANGSMITH_TRACING": "false"}
        subprocess.run([*command, *words, str(suite)], cwd=folder, env=known, check=False)
        return rows_of(report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=lambda path: str(Path(path).resolve()), help="folder with langchain-tests")
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--only", help="pytest's -k")
    arguments = parser.parse_args()
    with served() as address:
        rows = run(address, arguments.packages, arguments.only)
    known = {one.name: one.version for one in distributions(path=[arguments.packages] if arguments.packages else sys.path)}
    asked = " with ".join(f"{name} {known.get(name, '?')}" for name in ("langchain-tests", "langchain-openai"))
    what = f"tests of {asked} against the server with the bundled pair"
    for row in keep_results(arguments.out, what, rows, script="scripts/langchain_check.py")["rows"]:
        print(*row.values(), sep="\t")
    return 0 if is_well(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
