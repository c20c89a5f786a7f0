"""The application in this process: failures of the engine, limits, what a fuzzer finds, what a stream may show."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import run, until, until_counted

from outrider import SamplingParams
from outrider.bundled import bundled_path
from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Observation, Target
from outrider.core.report import RoundReport
from outrider.core.request import Origin, Request, RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.replace_drafter import Learner
from outrider.models.load import load_model
from outrider.server.metrics import LiveSpeed, Metrics
from outrider.server.service import Service
from outrider.server.settings import ServerSettings


def test_a_broken_engine_says_so_and_recovers() -> None:
    async def work(service: Service, client: Any) -> None:
        def explode() -> Any:
            raise RuntimeError("planted")

        service.worker.scheduler.round = explode  # type: ignore[method-assign]
        broken = await client.post("/v1/completions", json={"prompt": "Once"})
        assert broken.status_code == 500 and broken.json()["error"]["type"] == "server_error"
        well = await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
        assert well.status_code == 200 and service.worker.num_failures == 1

    run(work)


class _Pupil(Learner):
    """Has a better draft every few requests: another copy of the one there is, or none that can be had."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.ended: list[tuple[int, int]] = []
        self.num_given, self._is_broken = 0, is_broken

    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], origins: Sequence[Origin]) -> None:
        assert len(token_ids) == len(origins)
        self.ended.append((len(prompt_ids), len(token_ids)))

    def maybe_update(self, *, is_idle: bool = True) -> Target | None:
        del is_idle
        if len(self.ended) < 2 * (self.num_given + 1):
            return None
        if self._is_broken:
            raise RuntimeError("planted")
        self.num_given += 1
        return load_model(bundled_path("draft"))

    def close(self) -> None:
        """Nothing runs beside it."""


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_draft_is_exchanged_under_load_and_no_text_changes(is_broken: bool) -> None:
    """Requests of three lanes, of which one has no draft, while drafts come and go."""
    pupil = _Pupil(is_broken=is_broken)

    async def work(service: Service, client: Any) -> None:
        lanes = ["auto", {"method": "best-first"}, {"method": "prompt-lookup"}, {"method": "draft-model", "max_tokens": 2}]
        bodies = [
            {"prompt": "Once upon a time", "max_tokens": 6 + 2 * i, "seed": i, "temperature": 1, "ignore_eos": True}
            for i in range(12)
        ]
        asked = [client.post("/v1/completions", json={**body, "speculation": lanes[i % 4]}) for i, body in enumerate(bodies)]
        answers = await asyncio.gather(*asked)
        first = service.llm.draft
        alone = [await client.post("/v1/completions", json={**body, "speculation": "off"}) for body in bodies]
        assert [a.json()["choices"][0]["text"] for a in answers] == [a.json()["choices"][0]["text"] for a in alone]
        await until(lambda: not service.worker.learner.is_on if is_broken else pupil.num_given == 12)
        await until_counted(client, f"outrider:draft_swaps_total {float(pupil.num_given)}")
        assert service.worker.num_failures == 0 and len(pupil.ended) >= (2 if is_broken else 24)
        assert service.worker.learner.is_on is not is_broken
        assert (service.llm.draft is not first) is not is_broken
        assert pupil.num_given == (0 if is_broken else 12)

    run(work, learner=pupil)


def test_methods_with_bundled_heads_can_be_asked_for() -> None:
    async def work(service: Service, client: Any) -> None:
        offered = (await client.get("/v1/speculation")).json()["methods"]
        assert {"eagle3", "medusa", "hydra", "draft-model"} <= set(offered) and not {"rest", "mtp", "tli"} & set(offered)
        body = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "temperature": 1}
        plain = (await client.post("/v1/completions", json={**body, "speculation": "off"})).json()
        for method in ("eagle3", "medusa", "hydra"):
            answer = (await client.post("/v1/completions", json={**body, "speculation": {"method": method}})).json()
            assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
        refused = await client.post("/v1/completions", json={**body, "speculation": {"method": "rest"}})
        assert refused.status_code == 400 and "datastore" in refused.json()["error"]["message"]

    run(work)


def test_an_order_that_cannot_be_taken_does_not_end_the_worker() -> None:
    async def work(service: Service, client: Any) -> None:
        def explode(*_: Any, **__: Any) -> None:
            raise RuntimeError("planted")

        service.worker.scheduler.submit = explode  # type: ignore[method-assign]
        broken = await client.post("/v1/completions", json={"prompt": "Once", "n": 2})
        assert broken.status_code == 500 and broken.json()["error"]["type"] == "server_error"
        well = await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
        assert well.status_code == 200 and service.worker.is_alive

    run(work)


def test_time_limits_hold_and_free_the_slot() -> None:
    """Rounds last so long that no machine is fast enough."""

    async def work(service: Service, client: Any) -> None:
        scheduler = service.worker.scheduler
        run_round = scheduler.round

        def slow_round() -> list[RoundReport]:
            time.sleep(0.02)
            return run_round()

        scheduler.round = slow_round  # type: ignore[method-assign]
        body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
        late = await client.post("/v1/completions", json=body)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        stream = await client.post("/v1/completions", json={**body, "stream": True})
        last = stream.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
        await until(lambda: scheduler.is_idle and service.num_active == 0)

    run(work, timeout_s=0.3)


def test_memory_budget_is_kept_and_told() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        refused = await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1900})
        assert refused.status_code == 400 and "memory budget" in refused.json()["error"]["message"]
        bodies = [{"prompt": "Once upon a", "max_tokens": 20, "seed": i} for i in range(6)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * 6

    run(work, memory_budget=12_000_000)


def test_stop_strings_are_never_shown_in_part() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": ["little girl named"], "stream": True}
        answer = await client.post("/v1/completions", json=body)
        chunks = [json.loads(e.removeprefix("data: ")) for e in answer.text.strip().split("\n\n")[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ", there was a "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    run(work)


@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_fuzzer_finds_no_500(path: str, count: int) -> None:
    from fuzzed_bodies import bodies  # the fuzzer takes a second to import
    from hypothesis import HealthCheck, given, settings

    async def work(service: Service, client: Any) -> None:
        described = (await client.get("/openapi.json")).json()
        reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = described["components"]["schemas"][reference.split("/")[-1]]
        always: dict[str, Any] = {"max_tokens": 3}
        always |= {"prompt": "Once"} if path.endswith("/v1/completions") else {"messages": [{"role": "user", "content": "Hi"}]}
        loop, seen, typed = asyncio.get_running_loop(), set[int](), {"content-type": "application/json"}

        @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
        @given(bodies(schema, always) | bodies(schema, {"max_tokens": 3}))
        def fuzz(body: dict[str, Any]) -> None:
            asked = asyncio.run_coroutine_threadsafe(client.post(path, content=json.dumps(body), headers=typed), loop)
            answer = asked.result(60)
            seen.add(answer.status_code)
            assert answer.status_code in (200, 400), (answer.text, body)
            assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}

        await asyncio.to_thread(fuzz)
        assert seen == {200, 400} and service.worker.num_failures == 0

    run(work)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[1]", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": NaN}', b"\xff"]
)
def test_rubbish_gets_an_error_object(content: bytes) -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]

    run(work)


def _report(emitted: list[int], drafted: list[int], accepted: list[int], seconds: float) -> RoundReport:
    """A round that emitted, drafted and accepted so many tokens in each row."""
    rows = range(len(emitted))
    tree = TokenTree.chain(torch.zeros(len(rows), max(drafted) + 1, dtype=torch.int64), [count + 1 for count in drafted])
    paths = [list(range(count + 1)) for count in accepted]
    draft, scores = Draft(tree, Draws.DETERMINISTIC), Scores(torch.zeros(0))
    seen = Observation(draft, scores, paths, accepted, 0.0, seconds)
    states = [RequestState.of(Request([1], SamplingParams())) for _ in rows]
    tokens = [[0] * count for count in emitted]
    return RoundReport(rows, states, [0] * len(rows), seen, drafted, [False] * len(rows), tokens, seconds)


def test_live_speed_up() -> None:
    speed = LiveSpeed()
    assert speed.net == 1.0
    for _ in range(50):
        speed.add(_report([1], [0], [0], 0.01))
    assert speed.net == pytest.approx(1.0)
    for _ in range(256):
        speed.add(_report([3], [4], [2], 0.015))
    assert speed.net == pytest.approx(2.0)


def test_guesses_are_counted_by_position() -> None:
    metrics = Metrics()
    metrics.round(_report([4, 2], [4, 4], [3, 1], 0.01))
    text = metrics.text().decode()
    assert 'accepted_tokens_per_pos_total{position="0"} 2.0' in text
    assert 'accepted_tokens_per_pos_total{position="2"} 1.0' in text
    assert "num_wasted_tokens_total 4.0" in text


def test_settings_refuse_nonsense() -> None:
    with pytest.raises(OptionError, match="max_rows"):
        ServerSettings(max_rows=0)
    assert ServerSettings().is_local


@pytest.mark.parametrize(
    ("way", "path", "status", "words"),
    [
        ("POST", "/v1/completion", 404, "did you mean '/v1/completions'?"),
        ("POST", "/chat/completions", 404, "did you mean '/v1/chat/completions'?"),
        ("GET", "/zzz", 404, "/v1/embeddings"),
        ("GET", "/v1/chat/completions", 405, "send POST"),
    ],
)
def test_an_unknown_path_is_answered_with_the_nearest_one(way: str, path: str, status: int, words: str) -> None:
    async def work(service: Service, client: Any) -> None:
        answer = await client.request(way, path)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
        assert answer.headers.get("Allow") == ("POST" if status == 405 else None)

    run(work)
