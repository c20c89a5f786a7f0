"""Does ``serve --learn`` bring acceptance back after the text has shifted, and what does it cost?

    python benchmarks/learn_run.py [--text sums] [--method eagle3] [--requests 500] [--set learning_rate=1e-3] [--out FILE]

The bundled model, whose draft knows stories, serves stories for a moment, and then a new application (``shifts.py``).
No prompt comes twice, and other prompts measure; with ``--prompts 20 --seen`` twenty are asked again and again, and measure.
A memory (``ngram-cache``, ``suffix``) learns by being used. It writes 200 times first, about half of the stories. Prompts that
measure it come once only, and servers that do not learn forget everything before each block.

Three servers get the same requests under the default policy, in blocks with a pause after each: one learns, and two do not.
Each is a process of its own. One of them runs at a time, for a fraction of a second, and the others stand still with their
clocks (``frozen_turns.py``). So a busy moment of the machine meets all three, and no server learns while another is timed. The
second of those that do not learn says how far two equal servers differ.

    lost      = tokens per pass on stories - tokens per pass on the new text, with the draft that was there at the beginning
    recovered = (tokens per pass on the new text afterwards - before) / lost              held-out seeds, chains of four; none
                where nothing was lost
    goodput   = tokens per CPU second of the whole process while requests were served, learning's share included

Goodput is that of the server that learns over that of the two that do not. ``so_far`` has it after each block, for all blocks
up to then. ``same`` is that of the second server without learning over the first. Intervals (95 %) resample parts of a
tenth of a CPU second. ``beside`` is the share of serving time in which learning was at work too, in all and
by block: its budget (``train/pace.py``). Texts of all servers must be equal. What each block gave is told on the error stream
at once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from frozen_turns import Frozen, in_turns  # pyright: ignore[reportMissingImports]
from goodput_ratios import Seen, compared, quotient  # pyright: ignore[reportMissingImports]
from shifts import HOME, TEXTS, shifted  # pyright: ignore[reportMissingImports]

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.cli.serve_learning import taught
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.server.app import create_app
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.train.online import OnlineLearner, OnlineSettings

_HELD_OUT = 1_000_000
_HOME_STORIES = 200
_NAME = 16
"""Tokens at the beginning of a story that tell it from others."""
_SCRIPT = "benchmarks/learn_run.py"
_PART_S = 0.1
"""CPU seconds of a part."""
_IDLE = 3
"""Seconds that a pause may take, for each CPU second: learning that owes time waits before it begins."""


def online_settings(pairs: list[str], **known: Any) -> OnlineSettings:
    """What learning does by default, with ``name=value`` pairs instead of some of it."""
    given = dict(pair.split("=", 1) for pair in pairs)
    defaults = vars(OnlineSettings())
    return OnlineSettings(**{**known, **{name: type(defaults[name])(value) for name, value in given.items()}})


class Arm:
    """A server, with or without learning."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.llm = LLM(method=arguments.method, max_batch_size=16)
        self.memories = self.llm.method.drafter.memories
        self.stories = shifted(HOME, self.llm, arguments.held, arguments.seed)
        self.prompts = self.measured = shifted(arguments.text, self.llm, arguments.prompts, arguments.seed)
        if not arguments.seen:
            count = arguments.held * (2 if self.memories else 1)
            self.measured = shifted(arguments.text, self.llm, count, arguments.seed + _HELD_OUT)
        settings = online_settings(arguments.set, background=True, busy_share=arguments.learn_share)
        found = taught(self.llm, settings) if arguments.arm == "on" else None
        lessons = {} if found is None else {"learner": found.learner, "install": found.install}
        self.learner = found.learner if found and isinstance(found.learner, OnlineLearner) else None
        self.service = Service(self.llm, ServerSettings(), **lessons)
        self.service.prepare(is_warm=False)

    def tokens_per_pass(self, prompts: list[Any]) -> float:
        """Tokens per pass of chains of four, in requests that are never served."""
        given = self.arguments
        every = [
            SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=_HELD_OUT + i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        if self.memories:  # the served drafter: what it learned is in it
            method = replace(self.llm.method, policy=Fixed(FixedOptions(4)))
        else:
            method = self.llm.compose(self.llm.method_name, num_draft_tokens=4)
        outputs = self.llm.generate(prompts, every, method=method)
        return sum(len(one.token_ids) for one in outputs) / sum(one.stats.num_passes for one in outputs)

    def at_home(self) -> float:
        """Stories of which a memory has seen none, after others."""
        if not self.memories:
            return self.tokens_per_pass(self.stories)
        found = shifted(HOME, self.llm, 2 * _HOME_STORIES, self.arguments.seed + _HELD_OUT)
        names = dict.fromkeys(tuple(one[:_NAME]) for one in found)
        measured = set(list(names)[::2])
        self.tokens_per_pass([one for one in found if tuple(one[:_NAME]) not in measured][:_HOME_STORIES])
        once = {name: one for one in found if (name := tuple(one[:_NAME])) in measured}
        return self.tokens_per_pass(list(once.values()))

    def on_new_text(self, begin: int = 0) -> float:
        return self.tokens_per_pass([self.measured[i % len(self.measured)] for i in range(begin, begin + self.arguments.held)])

    async def ask(self, client: httpx.AsyncClient, number: int, prompts: list[Any]) -> str:
        given = self.arguments
        body = {"prompt": prompts[number % len(prompts)], "max_tokens": given.max_tokens, "seed": number}
        answer = await client.post("/v1/completions", json={**body, "temperature": given.temperature, "ignore_eos": True})
        return answer.json()["choices"][0]["text"]

    async def block(self, client: httpx.AsyncClient, numbers: range, prompts: list[Any]) -> dict[str, Any]:
        """Requests one after the other from each of a few clients; their time counts."""
        for memory in self.memories if self.arguments.arm != "on" else ():
            memory.clear()
        (served, beside), left = self.learned_beside(), list(numbers)
        texts: dict[int, str] = {}

        async def one() -> None:
            while left:
                number = left.pop(0)
                texts[number] = await self.ask(client, number, prompts)

        moments = [self.moment()]
        watch = asyncio.ensure_future(self.watch(moments))
        await asyncio.gather(*(one() for _ in range(self.arguments.clients)))
        watch.cancel()
        moments.append(self.moment())
        served_s, beside_s = (now - before for now, before in zip(self.learned_beside(), (served, beside), strict=True))
        told = {"texts": [texts[number] for number in numbers], "beside": beside_s / served_s if served_s else 0.0}
        return {**told, "parts": [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moments)]}

    def moment(self) -> tuple[float, float]:
        """Tokens and CPU seconds so far."""
        return self.service.metrics.registry.get_sample_value("outrider:generation_tokens_total") or 0.0, time.process_time()

    async def watch(self, moments: list[tuple[float, float]]) -> None:
        while True:
            await asyncio.sleep(_PART_S / 10)
            if time.process_time() - moments[-1][1] >= _PART_S:
                moments.append(self.moment())

    def learned_beside(self) -> tuple[float, float]:
        """Seconds of serving so far, and of learning beside it."""
        return (0.0, 0.0) if self.learner is None else (self.learner.pace.served, self.learner.pace.beside)

    async def pause(self) -> None:
        """Nobody asks for a while, or until nothing more is learned: one update follows another as long as they help."""
        most, num_quiet = self.arguments.pause, 0
        cpu, end = time.process_time() + most, time.perf_counter() + _IDLE * most
        while self.learner is not None and num_quiet < 10 and time.process_time() < cpu and time.perf_counter() < end:
            await asyncio.sleep(0.1)
            num_quiet = 0 if self.learner.is_learning else num_quiet + 1

    async def serve(self) -> None:
        """Each line that is read is a block, or a pause; each line that is written says what it took."""
        transport = httpx.ASGITransport(create_app(self.service), raise_app_exceptions=False)
        self.service.worker.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
            await self.block(client, range(self.arguments.held), self.stories)  # the first requests are slow
            await self.pause()
            say({"ready": True})
            while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
                if line == "pause":
                    await self.pause()
                    say({})
                    continue
                begin, end = map(int, line.split())
                say(await self.block(client, range(begin, end), self.prompts))
        self.service.close()

    def run(self) -> None:
        is_measured = self.arguments.arm == "on" or bool(self.memories)
        told = {"home": self.at_home(), "before": self.on_new_text()} if is_measured else {}
        asyncio.run(self.serve())
        if not is_measured:
            return say(told)
        told["after"] = self.on_new_text(self.arguments.held)
        if self.learner is not None:
            judged = self.learner.judgements
            told |= {"updates": len(judged), "swaps": sum(one.swapped for one in judged)}
            pace = self.learner.pace
            told |= {"learning_s": pace.seconds, "beside": pace.beside / pace.served}
        return say(told)


def say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Three servers in turns."""
    programs = [Frozen([*sys.argv, "--arm", name]) for name in ("off", "again", "on")]
    found = [Seen({}, []) for _ in programs]
    off, again, on = found
    for begin in range(0, arguments.requests, arguments.block):
        line = f"{begin} {min(begin + arguments.block, arguments.requests)}"
        for seen, told in zip(found, in_turns(programs, line, arguments.turn), strict=True):
            seen.blocks.append(told)
        ratio, same = quotient([on], [off, again], -1, None), quotient([again], [off], -1, None)
        beside = on.blocks[-1]["beside"]
        print(f"from {begin}: goodput {ratio}, same {same}, beside {beside:.3f}", file=sys.stderr, flush=True)
        programs[-1].alone("pause")
    for program, seen in zip(programs, found, strict=True):
        seen.told = program.end()
    return compared(*found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", choices=TEXTS, default="sums", help="what is asked for (default: %(default)s)")
    parser.add_argument("--method", default="draft-model")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--block", type=int, default=50, help="requests between two pauses")
    parser.add_argument("--pause", type=float, default=30, help="most CPU seconds of a pause")
    parser.add_argument("--turn", type=float, default=0.2, help="seconds of a turn")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=500, help="different prompts that are served, in turns")
    parser.add_argument("--seen", action="store_true", help="measure on the prompts that were served")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--held", type=int, default=60, help="requests that measure, of each kind of text")
    parser.add_argument("--learn-share", type=float, default=0.03)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings (OnlineSettings)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--arm", choices=["off", "again", "on"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.arm:
        torch.set_num_threads(1)
        Arm(arguments).run()
        return 0
    found = measured(arguments)
    asked = {name: vars(arguments)[name] for name in ("text", "method", "requests", "prompts", "seen", "set")}
    told = {**asked, **found}
    print(json.dumps(keep_results(arguments.out, "a server that learns beside two that do not", [told], script=_SCRIPT)))
    return 0 if found["equal_texts"] else 1


if __name__ == "__main__":
    sys.exit(main())
