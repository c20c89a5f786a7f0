"""Does ``serve --learn`` bring acceptance back after the text has shifted, and what does it cost?

    python benchmarks/learn_run.py [--text sums] [--method eagle3] [--requests 500] [--set learning_rate=1e-3] [--out FILE]

The bundled model, whose draft knows stories, serves stories for a moment, and then a new application (``shifts.py``).
No prompt comes twice, and other prompts measure; with ``--prompts 20 --seen`` twenty are asked again and again, and measure.
A memory (``ngram-cache``, ``suffix``) learns by being used. It writes 200 times first, about half of the stories. Prompts that
measure it come once only, and servers that do not learn forget everything before each block.

Three servers get the same requests under the default policy, in blocks with a pause after each: one learns, and two do not.
Each is a process of its own. They take turns block by block, in an order that changes, so that a busy moment of the machine
meets all of them. The second of those that do not learn says how far two equal servers differ.

    lost      = tokens per pass on stories - tokens per pass on the new text, with the draft that was there at the beginning
    recovered = (tokens per pass on the new text afterwards - before) / lost              held-out seeds, chains of four; none
                where nothing was lost
    goodput   = tokens per CPU second of the whole process while requests were served, learning's share included

Goodput is that of the server that learns over that of the first one. ``so_far`` has it after each block, for all blocks up to
then. ``same`` is that of the second server without learning. ``beside`` is the share of serving time in which learning was at
work too, in all and by block: its budget (``train/pace.py``). Texts of all servers must be equal. What each block gave is told
on the error stream at once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
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

    async def ask(self, client: httpx.AsyncClient, number: int, prompts: list[Any]) -> tuple[str, int]:
        given = self.arguments
        body = {"prompt": prompts[number % len(prompts)], "max_tokens": given.max_tokens, "seed": number}
        answer = await client.post("/v1/completions", json={**body, "temperature": given.temperature, "ignore_eos": True})
        found = answer.json()
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    async def block(self, client: httpx.AsyncClient, numbers: range, prompts: list[Any]) -> dict[str, Any]:
        """Requests one after the other from each of a few clients; their time counts."""
        for memory in self.memories if self.arguments.arm != "on" else ():
            memory.clear()
        cpu, (served, beside), left = time.process_time(), self.learned_beside(), list(numbers)
        answers: dict[int, tuple[str, int]] = {}

        async def one() -> None:
            while left:
                number = left.pop(0)
                answers[number] = await self.ask(client, number, prompts)

        await asyncio.gather(*(one() for _ in range(self.arguments.clients)))
        spent, texts = time.process_time() - cpu, [answers[number][0] for number in numbers]
        told = {"cpu_s": spent, "texts": texts, "tokens": sum(num_tokens for _, num_tokens in answers.values())}
        served_s, beside_s = (now - before for now, before in zip(self.learned_beside(), (served, beside), strict=True))
        return {**told, "beside": beside_s / served_s if served_s else 0.0}

    def learned_beside(self) -> tuple[float, float]:
        """Seconds of serving so far, and of learning beside it."""
        return (0.0, 0.0) if self.learner is None else (self.learner.pace.served, self.learner.pace.beside)

    async def pause(self) -> None:
        """Nobody asks for a while, or until nothing more is learned: one update follows another as long as they help."""
        num_quiet, end = 0, time.perf_counter() + self.arguments.pause
        while self.learner is not None and num_quiet < 10 and time.perf_counter() < end:
            await asyncio.sleep(0.1)
            num_quiet = 0 if self.learner.is_learning else num_quiet + 1

    async def serve(self) -> None:
        """Each line that is read is a block; each line that is written says what it took."""
        transport = httpx.ASGITransport(create_app(self.service), raise_app_exceptions=False)
        self.service.worker.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
            await self.block(client, range(self.arguments.held), self.stories)  # the first requests are slow
            await self.pause()
            say({"ready": True})
            while line := await asyncio.to_thread(sys.stdin.readline):
                begin, end = map(int, line.split())
                told = await self.block(client, range(begin, end), self.prompts)
                await self.pause()  # the others are asked afterwards, so that no server learns beside them
                say(told)
        self.service.close()

    def run(self) -> None:
        told = {"home": self.at_home(), "before": self.on_new_text()}
        asyncio.run(self.serve())
        told["after"] = self.on_new_text(self.arguments.held)
        if self.learner is not None:
            judged = self.learner.judgements
            told |= {"updates": len(judged), "swaps": sum(one.swapped for one in judged)}
            pace = self.learner.pace
            told |= {"learning_s": pace.seconds, "beside": pace.beside / pace.served}
        say(told)


def say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


@dataclass
class Seen:
    """What a server told in the end, and of each block."""

    told: dict[str, Any]
    blocks: list[dict[str, Any]]

    @property
    def texts(self) -> list[str]:
        return [text for block in self.blocks for text in block["texts"]]

    def goodput(self, begin: int, end: int | None) -> float:
        """Tokens per CPU second of some blocks."""
        blocks = self.blocks[begin:end]
        return sum(block["tokens"] for block in blocks) / sum(block["cpu_s"] for block in blocks)


class Process(Seen):
    """A server in a process of its own."""

    def __init__(self, name: str) -> None:
        super().__init__({}, [])
        command = [sys.executable, *sys.argv, "--arm", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def block(self, begin: int, end: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{begin} {end}\n")
        self._process.stdin.flush()
        self.blocks.append(self.heard())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.told = self.heard()
        self._process.wait()


def compared(off: Seen, again: Seen, on: Seen) -> dict[str, Any]:
    """What learning brought back and cost."""
    count, told = len(on.blocks), dict(on.told)
    lost = told["home"] - told["before"]
    told["recovered"] = (told["after"] - told["before"]) / lost if lost > 0 else None
    told["equal_texts"] = off.texts == on.texts == again.texts
    for name, other in ("goodput", on), ("same", again):
        told[name] = other.goodput(0, count) / off.goodput(0, count)
        told[f"{name}_by_block"] = [other.goodput(i, i + 1) / off.goodput(i, i + 1) for i in range(count)]
    told["beside_by_block"] = [block["beside"] for block in on.blocks]
    return {**told, "so_far": [on.goodput(0, i) / off.goodput(0, i) for i in range(1, count + 1)]}


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Three servers in turns."""
    processes = {name: Process(name) for name in ("off", "again", "on")}
    for process in processes.values():
        process.heard()
    order = list(processes.values())
    for begin in range(0, arguments.requests, arguments.block):
        for process in order:
            process.block(begin, min(begin + arguments.block, arguments.requests))
        ratio = processes["on"].goodput(-1, None) / processes["off"].goodput(-1, None)
        beside = processes["on"].blocks[-1]["beside"]
        print(f"from {begin}: goodput {ratio:.3f} of not learning, learning beside {beside:.3f}", file=sys.stderr, flush=True)
        order = [*order[1:], order[0]]
    for process in processes.values():
        process.end()
    return compared(**processes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", choices=TEXTS, default="sums", help="what is asked for (default: %(default)s)")
    parser.add_argument("--method", default="draft-model")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--block", type=int, default=50, help="requests between two pauses")
    parser.add_argument("--pause", type=float, default=30, help="most seconds of a pause")
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
