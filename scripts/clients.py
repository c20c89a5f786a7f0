"""Which client can use which feature of the server: every cell is a call that was made and whose answer was checked.

    python scripts/clients.py [--packages CLIENT=FOLDER] [--js FOLDER] [--write docs/clients.md]

Starts ``outrider serve`` with the bundled pair on the loopback and runs every client that is installed: the ``openai`` package
(Python), ``litellm``, ``langchain-openai``, ``llama-index-llms-openai-like``, and with ``--js`` the ``openai`` package of a
folder with ``node_modules``. Each client is a process of its own, because they ask for different versions of ``openai``;
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

MODEL = "outrider-bundled"
PROMPT = "Once upon a time, there was a"
SAID: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "greet", "description": "Greet somebody.", "parameters": SCHEMA}}
_JS = Path(__file__).with_name("clients.mjs")
Check = Callable[[], object]
"""One call and what its answer must be; anything false, or an exception, is a failure."""


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


def openai_checks(address: str) -> dict[str, Check]:
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    complete, chat = client.completions.create, client.chat.completions.create
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0.7, "seed": 3}

    def text(**more: Any) -> str:
        return complete(prompt=PROMPT, **{**asked, **more}).choices[0].text

    def streamed() -> str:
        return "".join(chunk.choices[0].text for chunk in complete(prompt=PROMPT, stream=True, **asked) if chunk.choices)

    def refused() -> bool:
        try:
            complete(prompt=PROMPT, **{**asked, "model": "another"})
        except openai.NotFoundError as error:
            return "not served here" in str(error)
        return False

    def usage() -> bool:
        parts = list(chat(messages=SAID, stream=True, stream_options={"include_usage": True}, **asked))
        return parts[-1].usage is not None and parts[-1].usage.completion_tokens == 12

    def tool() -> bool:
        call = chat(messages=SAID, tools=[TOOL], tool_choice="required", **{**asked, "max_tokens": 40})  # pyright: ignore
        return json.loads(call.choices[0].message.tool_calls[0].function.arguments)["name"] in ("Tom", "Lily")

    def responses_stream() -> bool:
        events = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16, stream=True)
        return [event.type for event in events][-1] in ("response.completed", "response.incomplete")

    predicted = {"type": "content", "content": " little girl named Lily."}
    more = {"speculation": {"method": "suffix", "num_draft_tokens": 3}}
    return {
        "models": lambda: [model.id for model in client.models.list()] == [MODEL],
        "text": text,
        "same seed, same text": lambda: text() == text(),
        "stream": lambda: streamed() == text(),
        "stop": lambda: "." not in text(stop=["."], max_tokens=60),
        "several choices": lambda: len(complete(prompt=PROMPT, n=3, **asked).choices) == 3,
        "log-probabilities": lambda: len(complete(prompt=PROMPT, logprobs=2, **asked).choices[0].logprobs.token_logprobs) == 12,  # pyright: ignore
        "chat": lambda: chat(messages=SAID, **asked).choices[0].message.content,
        "usage of a stream": usage,
        "JSON schema": lambda: _is_person(
            chat(messages=SAID, response_format=FORMAT, **{**asked, "max_tokens": 40}).choices[0].message.content
        ),  # pyright: ignore
        "tools": tool,
        "prediction": lambda: chat(messages=SAID, prediction=predicted, **asked).choices[0].message.content,  # pyright: ignore
        "responses": lambda: client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16).output_text,
        "responses, stream": responses_stream,
        "embeddings": lambda: (
            len(client.embeddings.create(model=MODEL, input=["a", "b"], extra_body={"pooling": "mean"}).data) == 2
        ),
        "speculation per request": lambda: text(extra_body=more) == text(extra_body={"speculation": "off"}),
        "errors": refused,
    }


def litellm_checks(address: str) -> dict[str, Check]:
    import litellm  # pyright: ignore

    known: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{address}/v1", "api_key": "none"}
    asked: dict[str, Any] = {**known, "max_tokens": 12, "seed": 3, "temperature": 0.7}

    def text(**more: Any) -> Any:
        return litellm.completion(messages=SAID, **{**asked, **more}).choices[0].message.content

    def streamed() -> str:
        chunks = litellm.completion(messages=SAID, stream=True, **asked)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def tool() -> bool:
        answer = litellm.completion(messages=SAID, tools=[TOOL], tool_choice="required", **{**asked, "max_tokens": 40})
        return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["name"] in ("Tom", "Lily")

    return {
        "chat": text,
        "same seed, same text": lambda: text() == text(),
        "stream": lambda: streamed() == text(),
        "stop": lambda: "." not in text(stop=["."], max_tokens=60),
        "JSON schema": lambda: _is_person(text(response_format=FORMAT, max_tokens=40)),
        "tools": tool,
    }


def langchain_checks(address: str) -> dict[str, Check]:
    from langchain_openai import ChatOpenAI, OpenAI  # pyright: ignore

    known: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none", "model": MODEL, "seed": 3, "temperature": 0.7}
    chat, complete = ChatOpenAI(max_tokens=40, **known), OpenAI(max_tokens=12, **known)
    structured = chat.with_structured_output({"title": "person", **SCHEMA}, method="json_schema")
    with_tools = chat.bind_tools([TOOL], tool_choice="required")
    return {
        "text": lambda: complete.invoke(PROMPT),
        "chat": lambda: chat.invoke(PROMPT).content,
        "same seed, same text": lambda: chat.invoke(PROMPT).content == chat.invoke(PROMPT).content,
        "stream": lambda: "".join(str(part.content) for part in chat.stream(PROMPT)) == chat.invoke(PROMPT).content,
        "stop": lambda: "." not in str(chat.invoke(PROMPT, stop=["."]).content),
        "JSON schema": lambda: structured.invoke(PROMPT)["name"] in ("Tom", "Lily"),  # pyright: ignore
        "tools": lambda: with_tools.invoke(PROMPT).tool_calls[0]["args"]["name"] in ("Tom", "Lily"),  # pyright: ignore
    }


def llama_index_checks(address: str) -> dict[str, Check]:
    from llama_index.core.llms import ChatMessage  # pyright: ignore
    from llama_index.core.prompts import PromptTemplate  # pyright: ignore
    from llama_index.core.tools import FunctionTool  # pyright: ignore
    from llama_index.llms.openai_like import OpenAILike  # pyright: ignore
    from pydantic import BaseModel

    known: dict[str, Any] = {"model": MODEL, "api_base": f"{address}/v1", "api_key": "none", "temperature": 0.7}
    known["additional_kwargs"] = {"seed": 3}
    llm, chat = OpenAILike(max_tokens=12, **known), OpenAILike(max_tokens=12, is_chat_model=True, **known)
    able = OpenAILike(max_tokens=40, is_chat_model=True, is_function_calling_model=True, **known)

    class Person(BaseModel):
        name: Literal["Tom", "Lily"]

    described: dict[str, Any] = {"name": "greet", "description": "Greet somebody.", "fn_schema": Person}
    greet = FunctionTool.from_defaults(lambda name: f"Hello {name}", **described)

    def tool() -> bool:
        answer = able.chat_with_tools([greet], user_msg=PROMPT, tool_required=True)
        return able.get_tool_calls_from_response(answer)[0].tool_kwargs["name"] in ("Tom", "Lily")

    return {
        "text": lambda: llm.complete(PROMPT).text,
        "same seed, same text": lambda: llm.complete(PROMPT).text == llm.complete(PROMPT).text,
        "stream": lambda: list(llm.stream_complete(PROMPT))[-1].text == llm.complete(PROMPT).text,
        "stop": lambda: "." not in llm.complete(PROMPT, stop=["."], max_tokens=60).text,
        "chat": lambda: chat.chat([ChatMessage(role="user", content=PROMPT)]).message.content,
        "JSON schema": lambda: able.structured_predict(Person, PromptTemplate(PROMPT)).name in ("Tom", "Lily"),
        "tools": tool,
    }


def run_js(address: str, folder: Path) -> dict[str, str]:
    """The same with OpenAI's package for JavaScript."""
    command = ["node", "--input-type=module", "-", address, MODEL, PROMPT, json.dumps(SCHEMA)]
    done = subprocess.run(command, input=_JS.read_text(), cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"text": done.stderr.strip().splitlines()[-1]}


def _is_person(text: str | None) -> bool:
    return json.loads(text or "")["name"] in ("Tom", "Lily")


def outcome(check: Check) -> str:
    try:
        return "yes" if check() else "wrong answer"
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return type(error).__name__


PYTHON = {
    "openai": openai_checks,
    "litellm": litellm_checks,
    "langchain-openai": langchain_checks,
    "llama-index-llms-openai-like": llama_index_checks,
}


def run_here(name: str, address: str) -> dict[str, dict[str, str]]:
    """Results of a client that is installed in this process, named with its version; empty if it is not."""
    try:
        found = PYTHON[name](address)
        return {f"{name} {version(name)}": {feature: outcome(check) for feature, check in found.items()}}
    except (ImportError, PackageNotFoundError) as error:
        print(f"{name} is not installed ({error}); left out", file=sys.stderr)
        return {}


def run_apart(name: str, address: str, folder: str | None) -> dict[str, dict[str, str]]:
    """The same in a process of its own, with the packages of a folder first. It talks to the server alone."""
    paths = os.pathsep.join(path for path in (folder, os.environ.get("PYTHONPATH")) if path)
    env = {**os.environ, "PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--client", name, "--address", address]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_all(address: str, packages: dict[str, str], js: Path | None) -> dict[str, dict[str, str]]:
    """Results by client, named with its version."""
    results: dict[str, dict[str, str]] = {}
    for name in PYTHON:
        results |= run_apart(name, address, packages.get(name))
    if js is not None:
        package = json.loads((js / "node_modules" / "openai" / "package.json").read_text())
        results[f"openai (JavaScript) {package['version']}"] = run_js(address, js)
    return results


def table(results: dict[str, dict[str, str]]) -> str:
    features = list(dict.fromkeys(feature for cells in results.values() for feature in cells))
    lines = ["| feature | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    lines += [
        f"| {feature} | " + " | ".join(cells.get(feature, "") for cells in results.values()) + " |" for feature in features
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="append", default=[], metavar="CLIENT=FOLDER", help="where a client is installed")
    parser.add_argument("--js", type=Path, help="folder whose node_modules has the openai package")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--client", choices=PYTHON, help="run this client alone, in this process")
    parser.add_argument("--address", help="of the server that --client asks")
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(run_here(arguments.client, arguments.address)))
        return 0
    packages = dict(pair.split("=", 1) for pair in arguments.packages)
    if unknown := packages.keys() - PYTHON.keys():
        parser.error(f"--packages names {', '.join(sorted(unknown))}, which is no client here; clients: {', '.join(PYTHON)}")
    with served() as address:
        results = run_all(address, packages, arguments.js)
    print(table(results))
    if arguments.write:
        page = arguments.write.read_text()
        arguments.write.write_text(
            re.sub(r"\| feature \|.*?\n(?=\n|\Z)", lambda _: table(results) + "\n", page, flags=re.DOTALL)
        )
    print(json.dumps(results))
    return 0 if all(cell == "yes" for cells in results.values() for cell in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
