"""One request's sampler, grammar, drafter or stream raises: that request ends with an error, the others do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import torch
from inprocess import bundled, bystander, engine_seen, run
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.errors import GrammarError
from outrider.core.request import Request
from outrider.server.failures import ApiError
from outrider.server.intake import Order
from outrider.server.service import Service

_AFTER = 6
"""Tokens a victim writes before its part fails."""
_POISON = "The dog"


class _Planted(RuntimeError):
    """The fault."""


class _Grammar:
    """Allows everything, and fails after a few tokens in one of its ways."""

    def __init__(self, way: str) -> None:
        self.way = way

    def initial(self) -> int:
        if self.way == "initial":
            raise _Planted
        return 0

    def advance(self, state: int, token: int) -> int | None:
        if state >= _AFTER and self.way == "advance":
            raise _Planted
        return None if state >= _AFTER and self.way == "dead" else state + 1

    def allowed(self, state: int, vocab_size: int) -> Tensor:
        if state >= _AFTER and self.way == "allowed":
            raise _Planted
        return torch.full((vocab_size,), not (state >= _AFTER and self.way == "dead"))

    def forced(self, state: int) -> tuple[int, ...]:
        return ()


class _Stream:
    """A detokenizer that fails after a few tokens."""

    def __init__(self) -> None:
        self.num_seen = 0

    def push(self, token: int) -> str:
        self.num_seen += 1
        if self.num_seen > _AFTER:
            raise _Planted
        return "x"


def _processor(tokens: Sequence[int], logits: Tensor) -> Tensor:
    if len(tokens) > _AFTER + 3:
        raise _Planted
    return logits


def _order(llm: LLM, *, new_stream: Callable[[], Any] | None = None, **params: Any) -> Order:
    made = llm.requests([_POISON], SamplingParams(max_tokens=30, ignore_eos=True, **params), streaming=True)[0]
    request = Request(made.prompt_ids, made.params, made.eos_ids, new_stream or made.new_stream)
    return Order([request], [], "", None, False)


_VICTIMS: dict[str, Callable[[LLM], Order]] = {
    "sampler": lambda llm: _order(llm, logits_processors=[_processor]),
    "grammar initial": lambda llm: _order(llm, grammar=_Grammar("initial")),
    "grammar advance": lambda llm: _order(llm, grammar=_Grammar("advance")),
    "grammar mask": lambda llm: _order(llm, grammar=_Grammar("allowed")),
    "grammar dead end": lambda llm: _order(llm, grammar=_Grammar("dead")),
    "stream": lambda llm: _order(llm, new_stream=_Stream),
}


async def _end_of(service: Service, order: Order) -> ApiError:
    with pytest.raises(ApiError) as caught:
        async for _ in service.worker.submit(order).deltas():
            pass
    return caught.value


def _llm() -> LLM:
    return bundled(num_draft_tokens=3)


@pytest.mark.parametrize("part", _VICTIMS)
def test_a_failing_part_ends_its_own_request(part: str) -> None:
    async def work(service: Service, client: Any) -> None:
        quiet = await bystander(client)
        order = _VICTIMS[part](service.llm)
        *texts, error = await asyncio.gather(bystander(client), bystander(client), _end_of(service, order))
        assert texts == [quiet, quiet] and service.worker.num_failures == 0
        assert error.status == (400 if part == "grammar dead end" else 500)
        assert ("allows no token" if error.status == 400 else "_Planted") in error.message
        assert await bystander(client) == quiet
        await engine_seen(service)
        service.worker.scheduler.check_integrity()

    run(work, llm=_llm())


@pytest.mark.parametrize("verb", ["start", "propose", "observe", "finish"])
def test_a_drafter_that_fails_on_one_request_fails_that_request(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim's rows share every round with the bystander's."""
    llm = _llm()
    poison, drafter = llm.codec.encode(_POISON), llm.method.drafter
    original = {"start": drafter.start, "propose": drafter.propose, "observe": drafter.observe, "finish": drafter.finish}[verb]
    armed = [False]

    def is_poisoned(arguments: Sequence[Any]) -> bool:
        """Whether the victim is among the rows of a call; ``observe`` sees no tokens, so it fails for all rows of a pair."""
        rows = {"start": lambda: arguments[0], "propose": lambda: arguments[1].tokens, "finish": lambda: [arguments[2]]}
        return any(list(row[: len(poison)]) == poison for row in rows.get(verb, list)())

    def faulty(*arguments: Any) -> Any:
        if armed[0] and (is_poisoned(arguments) or (verb == "observe" and len(arguments[1].paths) > 1)):
            raise _Planted
        return original(*arguments)

    monkeypatch.setattr(drafter, verb, faulty)

    async def work(service: Service, client: Any) -> None:
        quiet = await bystander(client)
        armed[0] = True
        victim = {"prompt": _POISON, "max_tokens": 12, "ignore_eos": True}
        first, text, second = await asyncio.gather(
            client.post("/v1/completions", json=victim), bystander(client), client.post("/v1/completions", json=victim)
        )
        expected = 200 if verb in ("observe", "finish") else 500  # alone it is well, or it was finished already
        assert [first.status_code, second.status_code] == [expected] * 2
        assert text == quiet and service.worker.num_failures == 0
        armed[0] = False
        assert await bystander(client) == quiet
        await engine_seen(service)
        service.worker.scheduler.check_integrity()

    run(work, llm=llm)


def test_an_answer_that_cannot_be_written_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: Service, client: Any) -> None:
        quiet = await bystander(client)
        decode = service.llm.codec.decode
        poison = service.llm.codec.encode(_POISON)

        def faulty(ids: Sequence[int], **more: Any) -> str:
            if list(more.get("prompt_ids", ())) == poison:
                raise _Planted
            return decode(ids, **more)

        monkeypatch.setattr(service.llm.codec, "decode", faulty)
        body = {"prompt": _POISON, "max_tokens": 6, "n": 2, "seed": 1, "ignore_eos": True}
        broken, text = await asyncio.gather(client.post("/v1/completions", json=body), bystander(client))
        assert broken.status_code == 500 and "this request failed" in broken.json()["error"]["message"]
        assert text == quiet and service.worker.num_failures == 0
        assert "outrider:request_failures_total 1.0" in (await client.get("/metrics")).text

    run(work, llm=_llm())


def test_in_the_library_the_failure_is_raised() -> None:
    with pytest.raises(_Planted):
        _llm().generate(_POISON, SamplingParams(logits_processors=[_processor]))
    with pytest.raises(GrammarError, match="allows no token after 6 tokens"):
        _llm().generate(_POISON, SamplingParams(grammar=_Grammar("dead"), ignore_eos=True))
