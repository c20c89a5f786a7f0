"""Lanes that a request names: a method at a fixed draft length, and what a traced round says of the pass it shared."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import run

from outrider.server.queued_request import FixedLane, PredictedLane, is_passing, method_of
from outrider.server.service import Service

_ASKED = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}


async def _ask(client: Any, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={**_ASKED, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_fixed_length_is_kept_whatever_it_costs() -> None:
    async def work(service: Service, client: Any) -> None:
        plain = await _ask(client, speculation="off")
        for method in (None, "draft-tree", "suffix"):
            fixed = await _ask(client, speculation={"method": method, "num_draft_tokens": 2, "trace": True})
            choice = fixed["choices"][0]
            assert choice["text"] == plain["choices"][0]["text"]
            assert {seen["reason"]["code"] for seen in choice["rounds"]} == {"given"}
            depths = [_depth(seen["parents"]) for seen in choice["rounds"][:-2]]
            assert max(depths) <= 2 and (method == "suffix" or min(depths) == 2)
            assert fixed["speculation"]["method"] == method
        assert not [lane for lane in service.worker.scheduler.lanes if is_passing(lane)], "nobody asks for them any more"

    run(work)


def _depth(parents: list[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


@pytest.mark.parametrize("length", [0, 65, "four"])
def test_lengths_out_of_range_are_refused(length: Any) -> None:
    async def work(service: Service, client: Any) -> None:
        answer = await client.post("/v1/completions", json={**_ASKED, "speculation": {"num_draft_tokens": length}})
        assert answer.status_code == 400, answer.text

    run(work)


def test_rounds_of_one_pass_carry_its_number() -> None:
    async def work(service: Service, client: Any) -> None:
        together = _ask(client, n=3, speculation={"method": "draft-model", "trace": True})
        other = _ask(client, max_tokens=8, speculation={"method": "draft-model"})
        choices = (await asyncio.gather(together, other))[0]["choices"]
        seen: dict[int, list[dict[str, Any]]] = {}
        for choice in choices:
            for one in choice["rounds"]:
                seen.setdefault(one["shared"]["number"], []).append(one)
        assert max(len(rounds) for rounds in seen.values()) == 3
        for rounds in seen.values():
            assert len({str(one["shared"]) for one in rounds}) == 1
            shared = rounds[0]["shared"]
            assert len(rounds) <= shared["num_rows"] <= 4
            assert sum(len(one["tokens"]) for one in rounds) <= shared["num_nodes"]

    run(work)


def test_the_page_is_told_which_methods_run_and_which_are_lossy() -> None:
    async def work(service: Service, client: Any) -> None:
        told = (await client.get("/v1/speculation")).json()
        assert {"plain", "draft-model", "suffix"} <= set(told["methods"])
        assert told["lossy"] == []

    run(work)


def test_a_lane_names_its_method() -> None:
    assert method_of("") == "" and method_of("suffix") == "suffix"
    assert method_of(FixedLane("suffix", 3)) == "suffix" and method_of(PredictedLane((1,))) is None
    assert is_passing(FixedLane("", 1)) and not is_passing("suffix")
