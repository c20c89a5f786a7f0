"""Responses that are stored: continued, read, listed, deleted, bounded, and nobody else's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import run

from outrider.server.response_items import MOST_ITEMS, items_of
from outrider.server.response_store import ResponseStore, StoreLimits
from outrider.server.service import Service

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"input": "Tell me of a fox.", "max_output_tokens": 12, "seed": 3}
NEXT = {**ASKED, "input": "And then?"}


async def made(client: Any, **more: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


def with_openai(work: Callable[[Any], Awaitable[None]]) -> None:
    openai = pytest.importorskip("openai")

    async def inner(service: Service, client: Any) -> None:
        del service
        await work(openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client))

    run(inner)


def test_a_stored_response_is_continued_as_if_all_of_it_were_sent() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        first = await made(client, instructions="Be kind.")
        assert first["store"] is True and first["previous_response_id"] is None
        second = await made(client, input="And then?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        said: list[Any] = [{"role": "user", "content": ASKED["input"]}, {"role": "assistant", "content": text_of(first)}]
        whole = await made(client, input=[*said, {"role": "user", "content": "And then?"}])
        assert text_of(second) == text_of(whole), "instructions of before do not go on, the conversation does"
        assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        events = (await client.post(PATH, json={**NEXT, "previous_response_id": second["id"], "stream": True})).text
        third = events.rsplit('"id": "resp_', 1)[1].split('"')[0]
        found = (await client.get(f"{PATH}/resp_{third}")).json()
        said += [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": text_of(second)}]
        again = await made(client, input=[*said, {"role": "user", "content": "And then?"}])
        assert text_of(found) == text_of(again), "a streamed response is stored too, and a chain goes on"

    run(work)


def test_the_official_client_reads_lists_and_deletes() -> None:
    async def work(client: Any) -> None:
        asked: dict[str, Any] = {"model": "outrider-bundled", "max_output_tokens": 8}
        first = await client.responses.create(input="A fox.", **asked)
        second = await client.responses.create(input="More.", previous_response_id=first.id, **asked)
        found = await client.responses.retrieve(second.id)
        assert found == second and found.store is True
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.content[0].text for item in items] == ["A fox.", first.output_text, "More."], "page by page"
        newest = await client.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in items][::-1]
        before = await client.responses.input_items.list(second.id, order="asc", extra_query={"before": items[0].id})
        assert before.data == []
        named: Any = [{"type": "item_reference", "id": items[0].id}, {"role": "user", "content": "More."}]
        referred = await client.responses.create(input=named, **asked)
        assert (await client.responses.input_items.list(referred.id, order="asc")).data[0] == items[0]
        await client.responses.delete(first.id)
        third = await client.responses.create(input="On.", previous_response_id=second.id, **asked)
        assert third.usage.input_tokens > second.usage.input_tokens, "what was before lives as long as its last response"

    with_openai(work)


def test_what_is_not_stored_is_told() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        first = await made(client, store=False)
        assert first["store"] is False
        answer = await client.post(PATH, json={**NEXT, "previous_response_id": first["id"]})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "previous_response_not_found"
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            answer = await client.request(method, f"{PATH}/{first['id']}{path}")
            assert answer.status_code == 404 and "not stored" in answer.json()["error"]["message"]
        kept = await made(client)
        for query, words in (("?limit=0", "limit"), ("?order=up", "order"), ("?after=msg_1", "msg_1")):
            answer = await client.get(f"{PATH}/{kept['id']}/input_items{query}")
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
        for method, path in (("GET", "?stream=true"), ("POST", "/cancel")):
            answer = await client.request(method, f"{PATH}/{kept['id']}{path}")
            assert answer.status_code == 400 and "background" in answer.json()["error"]["message"]
        assert (await client.delete(f"{PATH}/{kept['id']}")).json() == {"id": kept["id"], "object": "response", "deleted": True}
        assert (await client.delete(f"{PATH}/{kept['id']}")).status_code == 404

    run(work)


def test_a_server_may_store_nothing() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        assert (await made(client))["store"] is False
        refused: list[dict[str, Any]] = [{"store": True}, {"previous_response_id": "resp_1"}]
        for more in (*refused, {"input": [{"type": "item_reference", "id": "msg_1"}]}):
            answer = await client.post(PATH, json={**ASKED, **more})
            assert answer.status_code == 400 and "--stored-responses" in answer.json()["error"]["message"]

    run(work, stored_responses=0)


def test_one_client_never_reads_anothers(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "one"}, {"name": "a", "key": "new"}, {"name": "b", "key": "two"}]}')

    async def work(service: Service, client: Any) -> None:
        del service
        one, new, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "new", "two"))
        mine = (await client.post(PATH, json=ASKED, headers=one)).json()
        item = mine["output"][0]["id"]
        assert (await client.get(f"{PATH}/{mine['id']}", headers=new)).status_code == 200, "a rotated key has the same client"
        assert (await client.get(f"{PATH}/{mine['id']}")).status_code == 401
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            assert (await client.request(method, f"{PATH}/{mine['id']}{path}", headers=two)).status_code == 404
        for more in ({"previous_response_id": mine["id"]}, {"input": [{"type": "item_reference", "id": item}]}):
            answer = await client.post(PATH, json={**ASKED, **more}, headers=two)
            assert answer.status_code == 400 and "another key" in answer.json()["error"]["message"]
        assert (await client.get(f"{PATH}/{mine['id']}", headers=one)).status_code == 200

    run(work, api_key_file=str(keys))


def test_a_conversation_that_grew_too_long_loses_its_oldest_turns_if_asked() -> None:
    async def work(service: Service, client: Any) -> None:
        longest = service.llm.target.max_len
        words = "One day a little girl went to the park with her dog. " * (longest // 30)
        turns = [{"role": "system", "content": "Be kind."}]
        turns += [{"role": role, "content": words} for role in ("user", "assistant", "user", "assistant")]
        turns += [{"role": "user", "content": "And then?"}]
        answer = await client.post(PATH, json={**ASKED, "input": turns})
        assert answer.status_code == 400 and "shorten" in answer.json()["error"]["message"]
        shorter = await made(client, input=turns, truncation="auto")
        assert shorter["truncation"] == "auto"
        assert text_of(shorter) == text_of(await made(client, input=[turns[0], *turns[3:]]))
        short = [turns[0], turns[-1]]
        assert text_of(await made(client, input=short, truncation="auto")) == text_of(await made(client, input=short))
        answer = await client.post(PATH, json={**ASKED, "input": words * 9, "truncation": "auto"})
        assert answer.status_code == 400, "the last turn alone is too long"

    run(work)


def test_the_metrics_tell_what_is_stored() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        await made(client)
        text = (await client.get("/metrics")).text
        assert "outrider:stored_responses 1.0" in text and "outrider:stored_response_bytes" in text

    run(work)


def response(number: int, size: int = 10) -> dict[str, Any]:
    part = {"type": "output_text", "text": "x" * size, "logprobs": []}
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": [part]}
    return {"id": f"resp_{number}", "output": [item]}


def ids(store: ResponseStore, client: str, count: int) -> list[int]:
    return [number for number in range(count) if store.find(client, f"resp_{number}") is not None]


def test_the_store_is_bounded_and_fair() -> None:
    store = ResponseStore(StoreLimits(4, 1_000_000, 60))
    for number in range(3):
        store.of("loud").keep(response(number), items_of("x"))
    store.of("quiet").keep(response(3), items_of("x"))
    for number in (4, 5):
        store.of("loud").keep(response(number), items_of("x"))
    assert ids(store, "loud", 6) == [2, 4, 5] and ids(store, "quiet", 6) == [3], "who holds most loses the oldest"


def test_bytes_are_bounded_and_shared_items_count_once() -> None:
    store = ResponseStore(StoreLimits(100, 20_000, 60))
    shelf = store.of("me")
    said = items_of("y" * 5000)
    shelf.keep(response(0), said)
    first = store.num_bytes
    shelf.keep(response(1), shelf.conversation("resp_0"))
    assert store.num_bytes - first < 3000, "the long item is held once"
    shelf.forget("resp_0")
    assert store.num_bytes > 5000 and shelf.item(said[0]["id"]) == said[0], "the second one still holds it"
    shelf.forget("resp_1")
    assert store.num_bytes == 0 and store.num_responses == 0
    assert not shelf.keep(response(2, 30_000), said) and store.num_bytes == 0, "too large for the store"
    for number in range(3, 9):
        shelf.keep(response(number, 3000), items_of("x"))
        assert store.num_bytes <= 20_000
    assert ids(store, "me", 9)[-1] == 8


def test_a_response_counts_its_references_to_a_shared_conversation() -> None:
    """Thousands of short responses to one long conversation would hold lists of it that nobody counts."""
    store = ResponseStore(StoreLimits(1000, 3_000_000, 60))
    shelf = store.of("me")
    shelf.keep(response(0), items_of([{"type": "reasoning"}] * MOST_ITEMS))
    before = store.num_bytes
    for number in range(1, 4):
        shelf.keep(response(number), shelf.conversation("resp_0"))
    assert store.num_bytes - before > 3 * 8 * MOST_ITEMS


def test_a_conversation_too_long_to_be_read_again_is_refused_or_not_stored() -> None:
    async def work(service: Service, client: Any) -> None:
        del service
        thoughts = [{"type": "reasoning"}] * (MOST_ITEMS - 2)
        first = await made(client, input=[*thoughts, {"role": "user", "content": "A fox."}])
        second = await client.post(PATH, json={**NEXT, "previous_response_id": first["id"]})
        assert second.status_code == 400 and "start a new one" in second.json()["error"]["message"]
        heavy = [{"type": "reasoning", "more": "y" * 1_500_000}, {"role": "user", "content": "A fox."}]
        third = await made(client, input=heavy)
        fourth = await made(client, input=heavy, previous_response_id=third["id"])
        assert third["store"] is True and fourth["store"] is True
        assert (await made(client, input=heavy, previous_response_id=fourth["id"]))["store"] is False

    run(work)


def test_what_cannot_be_written_is_not_stored() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    store = ResponseStore(StoreLimits(100, 10_000_000, 60))
    assert not store.of("me").keep(response(0), items_of([{"role": "user", "content": "x", "more": deep}]))
    assert store.num_responses == 0 and store.num_bytes == 0


def test_items_with_one_id_and_two_texts_are_two() -> None:
    shelf = ResponseStore(StoreLimits(100, 100_000, 60)).of("me")
    for number, text in enumerate(("one", "two")):
        shelf.keep(response(number), items_of([{"id": "msg_mine", "role": "user", "content": text}]))
    texts = [shelf.conversation(f"resp_{number}")[0]["content"][0]["text"] for number in range(2)]
    assert texts == ["one", "two"] and shelf.item("msg_mine")["content"][0]["text"] == "two"
    shelf.forget("resp_0")
    assert shelf.item("msg_mine")["content"][0]["text"] == "two"


def test_responses_are_forgotten_with_age() -> None:
    now = [0.0]
    store = ResponseStore(StoreLimits(100, 100_000, 60), clock=lambda: now[0])
    store.of("me").keep(response(0), items_of("x"))
    now[0] = 40
    store.of("you").keep(response(1), items_of("x"))
    now[0] = 61
    assert ids(store, "me", 1) == [] and ids(store, "you", 2) == [1] and store.num_responses == 1
    now[0] = 101
    assert ids(store, "you", 2) == [] and store.num_bytes == 0
