"""A fleet without Ray: where prompts go, what becomes of a dead replica's requests, one page of metrics for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from inprocess import bundled, until
from starlette.types import Message

from outrider import LLM
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.models.load import load_model
from outrider.server.fleet.affinity import SLACK, Affinity, routed_text
from outrider.server.fleet.fleet import LOG, Call, Fleet, ReplicaLost
from outrider.server.fleet.front import guarded
from outrider.server.fleet.merged import FrontMetrics
from outrider.server.fleet.ray_scaling import ENOUGH, by_goodput
from outrider.server.fleet.replica import NewDraft, Replica
from outrider.server.goodput import GoodputCurve, replicas_wanted
from outrider.server.quota import Client
from outrider.server.service import Service
from outrider.server.settings import ServerSettings

ASKED = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
IDLE = {"a": 0, "b": 0, "c": 0}


def stories(number: int) -> str:
    return f"This is the beginning of story number {number}, which is long enough for several pieces. " * 3


def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    table = Affinity()
    for number in range(30):
        chosen = table.rank(stories(number), IDLE)[0]
        table.note(stories(number), chosen)
        for ending in ("And then", "But"):
            assert table.rank(stories(number) + ending, IDLE)[0] == chosen


def test_unknown_beginnings_are_spread_and_two_tables_agree() -> None:
    first, second = Affinity(), Affinity()
    chosen = [first.rank(f"{number} tells a story", IDLE)[0] for number in range(90)]
    assert chosen == [second.rank(f"{number} tells a story", IDLE)[0] for number in range(90)]
    assert all(15 < chosen.count(name) < 45 for name in IDLE)


def test_the_longest_beginning_decides() -> None:
    table = Affinity()
    table.note(stories(1), "a")
    table.note(stories(1) + stories(2), "b")
    assert table.rank(stories(1) + stories(2) + "And", IDLE)[0] == "b"
    assert table.rank(stories(1) + "Another end", {"a": 0, "b": 1, "c": 0})[0] == "a", "both know it, a is less busy"


def test_a_busy_replica_is_passed_over() -> None:
    table = Affinity()
    table.note(stories(1), "a")
    assert table.rank(stories(1), {"a": SLACK, "b": 0, "c": 1})[0] == "a"
    assert table.rank(stories(1), {"a": SLACK + 1, "b": 0, "c": 1})[0] in ("b", "c")


def test_a_replica_that_is_gone_is_forgotten_and_the_table_is_bounded() -> None:
    table = Affinity(most_known=10)
    table.note(stories(1), "gone")
    table.forget("gone")
    assert set(table.rank(stories(1), IDLE)) == set(IDLE)
    for number in range(20):
        table.note(stories(number), "a")
    assert len(table._readers) == 10
    assert Affinity().rank("text", {}) == [] and Affinity().rank("", {"a": 3, "b": 1}) == ["b", "a"]


def test_what_a_request_is_routed_by() -> None:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    first = routed_text(json.dumps({"messages": said, "max_tokens": 3}).encode())
    longer = routed_text(json.dumps({"messages": [*said, {"role": "user", "content": "More"}]}).encode())
    assert longer.startswith(first), "a conversation begins like its continuation"
    assert routed_text(b'{"prompt": "a"}') != routed_text(b'{"prompt": "a", "cache_salt": "mine"}')
    for nothing in (b"", b"[]", b"not JSON", b'{"model": "m"}', b"3"):
        assert routed_text(nothing) == ""
    assert routed_text(b'{"prompt": [[1, 2], [3]]}').endswith("1\x012\x013")
    part = {"type": "input_text", "text": "Hello"}
    stored = [{"id": "msg_1", "type": "message", "role": "user", "content": [part]}]
    first = routed_text(b'{"input": "Hello"}')
    assert routed_text(b'{"input": "More"}', stored) == first + "\x01More", (
        "a stored conversation begins like its first request"
    )


def events_of(message: Message) -> list[Message]:
    """A message event by event: how many events a busy machine puts into one does not matter then."""
    *events, rest = message.get("body", b"").split(b"\n\n")
    parts = [event + b"\n\n" for event in events] + ([rest] if rest else [])
    if len(parts) < 2:
        return [message]
    more = [True] * (len(parts) - 1) + [message.get("more_body", False)]
    return [{**message, "body": part, "more_body": follows} for part, follows in zip(parts, more, strict=True)]


class Local(Fleet):
    """Replicas of this process; a script says how many messages each call gets before its replica is lost."""

    def __init__(self, *replicas: Replica, fates: Sequence[int | None] = ()) -> None:
        self.replicas, self.fates, self.asked = replicas, list(fates), list[str]()

    async def ask(self, text: str, call: Call) -> AsyncGenerator[Sequence[Message], None]:
        replica = self.replicas[len(self.asked) % len(self.replicas)]
        self.asked.append(replica.name)
        fate = self.fates.pop(0) if self.fates else None
        if fate is not None and fate < 0:
            await asyncio.Event().wait()  # nobody takes it
        seen = 0
        answer = replica.answer(text, call)
        try:
            async for group in answer:
                for message in (part for whole in group for part in events_of(whole)):
                    if seen == fate:
                        raise ReplicaLost(replica.name)
                    seen += 1
                    yield [message]
        finally:
            await answer.aclose()

    async def metrics(self) -> Mapping[str, bytes]:
        return dict([await replica.metrics() for replica in self.replicas])

    async def loads(self) -> Mapping[str, Mapping[str, int]]:
        return dict([await replica.load() for replica in self.replicas])

    async def replace_draft(self, name: str) -> str | None:
        found = [await replica.replace_draft(name) for replica in self.replicas]
        return dict(found).get(name)


class Scripted(Fleet):
    """Replicas whose answers to a new draft are written down."""

    def __init__(self, answers: Mapping[str, str | None]) -> None:
        self.answers, self.asked = answers, list[str]()

    def ask(self, text: str, call: Call) -> AsyncGenerator[Sequence[Message], None]:
        raise NotImplementedError

    async def metrics(self) -> Mapping[str, bytes]:
        return {}

    async def loads(self) -> Mapping[str, Mapping[str, int]]:
        return {name: {} for name in self.answers}

    async def replace_draft(self, name: str) -> str | None:
        self.asked.append(name)
        return self.answers[name]


def test_drafts_are_replaced_one_after_the_other_and_a_bad_one_stops_there() -> None:
    good = Scripted({"b": "", "a": "", "c": None})
    assert asyncio.run(good.swap_drafts()) == {"a": "", "b": ""}, "a replica that ended is left out"
    assert good.asked == ["a", "b", "c"]
    bad = Scripted({"a": "", "b": "the folder is empty", "c": ""})
    told = asyncio.run(bad.swap_drafts())
    assert bad.asked == ["a", "b"] and told["b"] == "the folder is empty"
    assert told["c"] == "not offered, since b could not take it"


def test_an_engine_that_takes_no_draft_is_told_of() -> None:
    new_draft = NewDraft()
    with pytest.raises(TimeoutError, match=r"did not take the new draft within 0\.05 s"):
        new_draft.offer(load_model(bundled_path("draft"), dtype="float32", device="cpu"), limit_s=0.05)
    assert new_draft.maybe_update() is None


def test_a_replica_is_full_where_goodput_stops_rising() -> None:
    curve = GoodputCurve()
    assert curve.enough(8.0) == 8.0, "nothing is known yet"
    for rows, tokens in ((1, 10), (2, 20), (4, 38)):
        curve.add(rows, tokens, 1.0)
    assert curve.enough(8.0) == 8.0 and curve.enough(2.0) == 4.0, "it still rises"
    curve.add(8, 40, 1.0)
    assert curve.enough(8.0) == 4.0, "8 rows emit hardly more than 4"
    for _ in range(500):
        curve.add(8, 80, 1.0)
    assert curve.enough(2.0) == 8.0, "texts change, and old rounds fade"


def test_replicas_follow_requests_and_what_fills_a_replica() -> None:
    assert replicas_wanted(0, [], 8.0) == 1 and replicas_wanted(17, [], 8.0) == 3
    assert replicas_wanted(16, [4.0, 4.0], 8.0) == 4, "they are full with 4, whatever the default says"
    context = SimpleNamespace(
        aggregated_metrics={ENOUGH: {"r0": 2.0, "r1": 4.0}},
        total_num_requests=12.0,
        config=SimpleNamespace(target_ongoing_requests=8.0),
    )
    assert by_goodput(context) == (4, {})
    context.aggregated_metrics = None
    assert by_goodput(context) == (2, {})


def replica_of(name: str) -> Replica:
    return Replica(name, ([Service(bundled(), ServerSettings(replica=name))], lambda: None))


def run(
    work: Callable[[Any, Local, FrontMetrics], Awaitable[None]],
    *,
    num_replicas: int = 2,
    fates: Sequence[int | None] = (),
    **limits: Any,
) -> None:
    async def main() -> None:
        fleet = Local(*(replica_of(f"r{number}") for number in range(num_replicas)), fates=fates)
        metrics = FrontMetrics()
        front, app = guarded(fleet, ServerSettings(**limits), metrics)
        front._limit_s = limits.get("timeout_s", 60.0)
        try:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                await work(client, fleet, metrics)
        finally:
            for replica in fleet.replicas:
                replica.close()

    asyncio.run(main())


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_answers_come_through_whole_and_streamed_with_keys_and_errors() -> None:

    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        del metrics
        key = {"Authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 401
        assert fleet.asked == [], "who has no key reaches no replica"
        first = await client.post("/v1/completions", json=ASKED, headers=key)
        again = await client.post("/v1/completions", json=ASKED, headers=key)
        assert fleet.asked == ["r0", "r1"] and text_of(first) == text_of(again)
        assert len(first.headers.get_list("x-request-id")) == 1
        streamed = await client.post("/v1/completions", json={**ASKED, "stream": True}, headers=key)
        lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        pieces = [json.loads(line)["choices"] for line in lines[:-1]]
        assert "".join(choice["text"] for choices in pieces for choice in choices) == text_of(first)
        bad = await client.post("/v1/completions", json={**ASKED, "max_tokens": -1}, headers=key)
        assert bad.status_code == 400 and "max_tokens" in bad.json()["error"]["message"]
        assert (await client.get("/v1/models", headers=key)).json()["data"][0]["id"] == "outrider-bundled"

    run(work, api_keys=("secret",))


def test_a_lost_replicas_request_is_answered_by_another() -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        expected = text_of(await client.post("/v1/completions", json=ASKED))
        for fate in (0, 1):  # before the first message, and between the status and the body
            fleet.fates = [fate]
            assert text_of(await client.post("/v1/completions", json=ASKED)) == expected
        fleet.fates = [0]
        streamed = await client.post("/v1/completions", json={**ASKED, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n") and "error" not in streamed.text
        assert metrics.lost._value.get() == metrics.repeated._value.get() == 3

    run(work)


def test_a_request_that_ends_two_replicas_is_told_so() -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert error["code"] == "replica_lost" and "send it again" in error["message"]
        assert len(fleet.asked) == 2 and metrics.repeated._value.get() == 1

    run(work, num_replicas=3, fates=[0, 0, 0])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_stream_that_has_begun_ends_with_an_error_and_not_in_silence(path: str) -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        asked = {"input": "Once", "max_output_tokens": 96} if path == "/v1/responses" else {**ASKED, "max_tokens": 96}
        answer = await client.post(path, json={**asked, "stream": True})
        last = json.loads(answer.text.strip().split("\n\n")[-1].split("data: ")[1])
        error = last.get("error", last)
        assert error["code"] == "replica_lost" and "[DONE]" not in answer.text
        assert len(fleet.asked) == 1, "what the client has seen is not generated again"
        assert metrics.repeated._value.get() == 0

    run(work, fates=[3])


def test_a_stored_conversation_goes_on_at_another_replica() -> None:
    path, said = "/v1/responses", {"input": "Tell me of a fox.", "max_output_tokens": 8, "seed": 1}

    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        key, other = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        first = (await client.post(path, json=said, headers=key)).json()
        events = (await client.post(path, json={**said, "previous_response_id": first["id"], "stream": True}, headers=key)).text
        second = json.loads(events.strip().split("\n\n")[-1].split("data: ")[1])["response"]
        assert fleet.asked == ["r0", "r1"] and second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        fleet.fates = [0]
        item = first["output"][0]["id"]
        referred = {**said, "input": [{"type": "item_reference", "id": item}], "previous_response_id": second["id"]}
        third = (await client.post(path, json=referred, headers=key)).json()
        listed = await client.get(f"{path}/{third['id']}/input_items?order=asc", headers=key)
        assert [one["id"] for one in listed.json()["data"]][1] == item and len(listed.json()["data"]) == 5
        assert "outrider:stored_responses 3.0" in (await client.get("/metrics", headers=key)).text
        for more in ({"previous_response_id": first["id"]}, {"input": [{"type": "item_reference", "id": item}]}):
            assert (await client.post(path, json={**said, **more}, headers=other)).status_code == 400
        assert (await client.get(f"{path}/{first['id']}", headers=other)).status_code == 404
        assert (await client.delete(f"{path}/{first['id']}", headers=key)).json()["deleted"]
        hidden = b'{"input": "x", "previous\\u005fresponse_id": "' + second["id"].encode() + b'"}'
        answer = await client.post(path, content=hidden, headers={**key, "content-type": "application/json"})
        assert answer.json()["error"]["code"] == "previous_response_not_found", "what the front door did not see is refused"

    run(work, api_keys=("one", "two"))


def test_a_fleet_may_store_nothing() -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        del fleet, metrics
        answer = await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})
        assert answer.json()["store"] is False
        answer = await client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_1"})
        assert answer.status_code == 400 and "--stored-responses" in answer.json()["error"]["message"]

    run(work, stored_responses=0)


def test_nobody_waits_for_ever() -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        del fleet, metrics
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"

    run(work, fates=[-1], timeout_s=0.3)


def test_a_client_that_leaves_frees_its_replica() -> None:
    async def main() -> None:
        replica = replica_of("r0")
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        headers = [(b"content-type", b"application/json")]
        body = json.dumps({**ASKED, "max_tokens": 400, "stream": True}).encode()
        answer = replica.answer("", Call.of({**scope, "headers": headers, "outrider.client": Client("me")}, body))
        await anext(answer)
        await answer.aclose()
        for _ in range(1200):
            _, load = await replica.load()
            if load == {"server_load": 0, "waiting": 0, "running": 0}:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"the replica still works for nobody: {load}")
        replica.close()

    asyncio.run(main())


def test_metrics_of_all_replicas_are_one_page() -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        del fleet, metrics
        for _ in range(3):
            text_of(await client.post("/v1/completions", json=ASKED))
        page = (await client.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("outrider:generation_tokens_total")]
        assert lines == [
            'outrider:generation_tokens_total{replica="r0"} 24.0',
            'outrider:generation_tokens_total{replica="r1"} 12.0',
        ]
        assert 'outrider:requests_total{status="200"} 3.0' in page and "outrider:fleet_replicas 2.0" in page
        assert page.count("# TYPE outrider:generation_tokens_total counter") == 1
        health = await client.get("/health")
        assert health.status_code == 200 and health.json()["replicas"] == 2
        assert set((await client.get("/load")).json()["replicas"]) == {"r0", "r1"}

    run(work)


def test_no_replica_is_not_well() -> None:
    async def work(client: Any, fleet: Local, metrics: FrontMetrics) -> None:
        del metrics
        answer = await client.get("/health")
        assert answer.status_code == 503 and answer.json()["status"] == "no replica answers"
        assert not fleet.replicas

    run(work, num_replicas=0)


def test_the_limits_of_a_key_travel_with_its_requests() -> None:
    async def main() -> None:
        replica = replica_of("r0")
        groups: list[Any] = []
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        headers = [(b"content-type", b"application/json")]
        call = Call.of({**scope, "headers": headers, "outrider.client": Client("me", max_tokens=5)}, json.dumps(ASKED).encode())
        async for group in replica.answer("", call):
            groups += group
        replica.close()
        assert groups[-1]["type"] == LOG
        assert groups[0]["status"] == 400 and b"use at most 5" in groups[1]["body"], "the key's own limit holds in the replica"

    asyncio.run(main())


def test_a_draft_is_replaced_between_rounds_and_a_bad_one_is_not() -> None:
    llm, new_draft = LLM(), NewDraft()

    def read() -> None:
        if broken:
            raise OptionError("the folder is empty")
        new_draft.offer(load_model(llm.draft_names[0], dtype="float32", device="cpu"))

    async def main() -> None:
        replica = Replica("r0", ([Service(llm, ServerSettings(), learner=new_draft)], read))
        before = llm.drafts[0]
        assert await replica.replace_draft("another") == ("r0", "")
        assert llm.drafts[0] is before, "it was not its turn"
        assert await replica.replace_draft("r0") == ("r0", "")
        await until(lambda: llm.drafts[0] is not before)
        after = llm.drafts[0]
        nonlocal broken
        broken = True
        assert await replica.replace_draft("r0") == ("r0", "the folder is empty")
        await asyncio.sleep(0.5)
        assert llm.drafts[0] is after
        replica.check_health()
        replica.close()
        with pytest.raises(RuntimeError, match="the engine of outrider-bundled is not running"):
            replica.check_health()

    broken = False
    asyncio.run(main())
