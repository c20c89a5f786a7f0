"""The server over real HTTP, in a process of its own: the official client, errors, load, rude clients, and the end."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from serving import Served  # noqa: E402
from tiers import repeats  # noqa: E402

from outrider import LLM, SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.slow
_MODEL = "outrider-bundled"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--max-body-bytes", "200000", "--max-requests", "40") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    openai = pytest.importorskip("openai")  # it takes a second to import
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="plain")


def _alone(llm: LLM, prompt: str, **params: Any) -> str:
    return llm.generate(prompt, SamplingParams(**params))[0].text


def _place(served: Served) -> tuple[str, int]:
    host, port = served.address.removeprefix("http://").split(":")
    return host, int(port)


def _metric(served: Served, name: str) -> float:
    lines = served.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"outrider:{name} "))


def _until_running(served: Served, holds: Callable[[float], bool]) -> None:
    """Waits until the number of choices that hold a slot is as wanted: the engine counts them between rounds."""
    end = time.monotonic() + 60
    while not holds(_metric(served, "num_requests_running")):
        assert time.monotonic() < end, "the engine has not done it"
        time.sleep(0.02)


def test_completion_equals_the_library(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=_MODEL, prompt="Once upon a time", max_tokens=30, temperature=0.8, seed=4, n=2)
    expected = [_alone(llm, "Once upon a time", max_tokens=30, temperature=0.8, seed=seed) for seed in (4, 5)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None and answer.usage.prompt_tokens == 4
    assert answer.model_extra is not None and answer.model_extra["speculation"]["num_tokens"] == answer.usage.completion_tokens


def test_streams_join_to_the_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": _MODEL, "messages": [{"role": "user", "content": "The dog"}], "seed": 1, "max_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # how many were guessed may differ
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_stop_logprobs_and_bias(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=_MODEL, prompt="Once upon a time", max_tokens=40, temperature=0, stop=["girl"])
    assert answer.choices[0].finish_reason == "stop" and "girl" not in answer.choices[0].text
    logged = client.completions.create(model=_MODEL, prompt="Once upon a time", max_tokens=5, temperature=0, logprobs=3)
    entry = logged.choices[0].logprobs
    assert entry is not None and entry.tokens is not None and "".join(entry.tokens) == logged.choices[0].text
    assert entry.top_logprobs is not None and all(len(top) == 3 for top in entry.top_logprobs)
    chat = client.chat.completions.create(
        model=_MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logprobs=True, top_logprobs=2, seed=1
    )
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None and len(content.content) == 4
    comma = llm.codec.encode(",", add_special_tokens=False)[-1]
    banned = client.completions.create(
        model=_MODEL, prompt="Once upon a time", max_tokens=20, temperature=0, logit_bias={str(comma): -100}
    )
    assert "," not in banned.choices[0].text


def test_json_schema_and_named_tools(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}
    asked: dict[str, Any] = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": "A person:"}],
        "max_tokens": 60,
        "seed": 1,
    }
    person = json.loads(client.chat.completions.create(**asked, response_format=wanted).choices[0].message.content or "")
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99
    tools: Any = [{"type": "function", "function": {"name": "greet", "parameters": _PERSON}}]
    choice: Any = {"type": "function", "function": {"name": "greet"}}
    message = client.chat.completions.create(**asked, tools=tools, tool_choice=choice).choices[0].message
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert call.function.name == "greet" and set(json.loads(call.function.arguments)) == {"name", "age"}


def test_errors_are_the_apis_own(client: OpenAI, served: Served) -> None:
    from openai import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError, match="not served here"):
        client.completions.create(model="nobody", prompt="x")
    for fields, words in (
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 10**9}, "at most"),
        ({"speculation": {"method": "promt-lookup"}}, "did you mean 'prompt-lookup'"),
        ({"speculation": {"method": "rest"}}, "needs the option"),
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"prompt": [-90]}, "vocabulary"),
        ({"prompt": [-90], "echo": True}, "token ids"),
        ({"prompt": "a " * 5000}, "context holds"),
        ({"logit_bias": {"x": 1}}, "no token id"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "schema"),
    ):
        with pytest.raises(BadRequestError, match=words) as caught:
            client.completions.create(**{"model": _MODEL, "prompt": "x", "extra_body": fields})
        assert caught.value.type == "invalid_request_error"
    assert httpx.post(f"{served.address}/v1/completions", content=b"x" * 300_000, timeout=60).status_code == 413
    assert served.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert served.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_echo(client: OpenAI) -> None:
    answer = client.completions.create(model=_MODEL, prompt=["Once", "The dog"], max_tokens=3, echo=True, n=2)
    assert [choice.text.split()[0] for choice in answer.choices] == ["Once", "Once", "The", "The"]


def test_speculation_is_per_request_and_changes_nothing(client: OpenAI, llm: LLM) -> None:
    expected = _alone(llm, "The little girl", max_tokens=40, temperature=1.0, seed=9)
    for wanted in ("off", "auto", {"max_tokens": 3}, {"method": "suffix"}, {"method": "best-first", "max_tokens": 4}):
        body = {"speculation": wanted}
        answer = client.completions.create(
            model=_MODEL, prompt="The little girl", max_tokens=40, temperature=1.0, seed=9, extra_body=body
        )
        assert answer.choices[0].text == expected, wanted
        if wanted == "off":
            assert answer.model_extra is not None and answer.model_extra["speculation"]["num_drafted"] == 0


def test_a_mixed_crowd_gets_what_each_gets_alone(client: OpenAI, llm: LLM, served: Served) -> None:
    rng = random.Random(0)
    starts = ("Once upon a time", "The dog", "One day, a", "Tom and Lily", "There was a big")
    asked: list[dict[str, Any]] = [
        {"prompt": rng.choice(starts), "max_tokens": rng.randint(1, 40), "temperature": rng.choice([0, 0.7, 1.0]), "seed": i}
        for i in repeats(40, of=160)
    ]
    waits = [0.4 * rng.random() for _ in asked]
    ways: list[Any] = ["auto", "off", {"method": "suffix"}, {"max_tokens": 2}, {"method": "draft-tree"}]

    def ask(fields: dict[str, Any]) -> str:
        time.sleep(waits[fields["seed"]])
        extra = {"speculation": ways[fields["seed"] % len(ways)]}
        return client.completions.create(model=_MODEL, **fields, extra_body=extra).choices[0].text

    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, asked))
    params = [SamplingParams(**{name: value for name, value in one.items() if name != "prompt"}) for one in asked]
    assert texts == [output.text for output in llm.generate([one["prompt"] for one in asked], params)]
    for index in (0, len(asked) - 1):
        assert texts[index] == llm.generate(asked[index]["prompt"], params[index])[0].text
    _until_running(served, lambda count: count == 0)


def test_who_leaves_frees_the_slot(served: Served) -> None:
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    before = _metric(served, "requests_cancelled_total")
    with httpx.stream("POST", f"{served.address}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # held: a dropped iterator closes the connection
        next(lines)
        _until_running(served, lambda count: count >= 1)
    _until_running(served, lambda count: count == 0)
    crowd = json.dumps({**body, "stream": False, "n": 16}).encode()
    with socket.create_connection(_place(served)) as impatient:
        impatient.sendall(_HEAD % len(crowd) + crowd)
        _until_running(served, lambda count: count == 16)
    _until_running(served, lambda count: count == 0)
    assert _metric(served, "requests_cancelled_total") == before + 17


def test_rude_clients_stop_nobody(served: Served, client: OpenAI) -> None:
    """Hundreds that never finish their request, send rubbish, or do not read their answer."""
    body = json.dumps({"prompt": "Once", "max_tokens": 50, "stream": True}).encode()
    openings = (b"GET", _HEAD % 5000 + b"{", b"\x00\xff rubbish\r\n\r\n", _HEAD % 3 + b"{{{", _HEAD % len(body) + body)
    rude = []
    for i in range(500):
        sock = socket.create_connection(_place(served))
        sock.sendall(openings[i % 5] if i % 5 != 4 or i < 100 else b"POST")
        rude.append(sock)
    answer = client.completions.create(model=_MODEL, prompt="Once upon a time", max_tokens=10, temperature=0, timeout=60)
    assert answer.usage is not None and answer.usage.completion_tokens == 10
    for sock in rude:
        sock.close()
    assert served.get("/health").json()["status"] == "ok"


def test_crowds_are_turned_away_politely(served: Served) -> None:
    """Whoever was let in stays until somebody was turned away, and leaves then: nobody waits for whole texts."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    is_crowded = threading.Event()

    def come(_: int) -> tuple[int, bytes, dict[str, str]]:
        with httpx.stream("POST", f"{served.address}/v1/completions", json=body, timeout=None) as answer:
            if answer.status_code == 200:
                is_crowded.wait(120)
                return 200, b"", {}
            content = answer.read()
            is_crowded.set()
            return answer.status_code, content, dict(answer.headers)

    with ThreadPoolExecutor(44) as pool:
        answers = list(pool.map(come, range(44)))
    assert {code for code, _, _ in answers} == {200, 429}
    _, content, headers = next(answer for answer in answers if answer[0] == 429)
    assert json.loads(content)["error"]["code"] == "rate_limit_exceeded" and headers["retry-after"]


def test_metrics_have_the_known_names(served: Served) -> None:
    text = served.get("/metrics").text
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos", "wasted_tokens"):
        assert f"outrider:spec_decode_num_{name}_total" in text
    for name in ("spec_decode_net_speedup", "num_requests_waiting", "time_to_first_token_seconds_bucket"):
        assert f"outrider:{name}" in text


def test_keys_are_asked_for_and_sigterm_finishes_what_runs() -> None:
    with Served("--api-key", "secret") as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/health").status_code == 200
        keyed = {"Authorization": "Bearer secret"}
        body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
        places = [f"{server.address}/v1/completions"] * 3
        begun = threading.Barrier(4, timeout=60)

        def ask(place: str) -> str:
            with httpx.stream("POST", place, json=body, headers=keyed, timeout=120) as answer:
                pieces = answer.iter_text()
                first = next(pieces)
                begun.wait()
                return first + "".join(pieces)

        with ThreadPoolExecutor(3) as pool:
            texts = pool.map(ask, places)
            begun.wait()
            server.process.send_signal(signal.SIGTERM)
            assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert server.process.wait(120) == 0
        logged = [json.loads(line) for line in server.whole_log() if line.startswith("{")]
        assert sum(line.get("completion_tokens") == 200 for line in logged) == 3
