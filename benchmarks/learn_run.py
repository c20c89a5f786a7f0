"""Does ``serve --learn`` bring acceptance back after the text has shifted, and what does it cost?

    python benchmarks/learn_run.py [--text sums] [--method eagle3] [--requests 500] [--set learning_rate=1e-3] [--out FILE]

The bundled model, whose draft knows stories, serves a new application (``benchmarks/shifts.py``). No prompt comes twice, and
other prompts measure; with ``--prompts 20 --seen`` twenty are asked again and again, and measure. One server learns and one
does not; each is a process of its own and gets the same requests under the default policy, in blocks with a pause after each.
Learning takes its share of the time while requests run, and the pauses.

    lost      = tokens per pass on stories - tokens per pass on the new text, with the draft that was there at the beginning
    recovered = (tokens per pass on the new text afterwards - before) / lost              held-out seeds, chains of four
    goodput   = tokens per CPU second of the whole process while requests were served, learning's share included

CPU seconds are used because other work may run on the machine. Texts of both servers must be equal. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from shifts import HOME, TEXTS, shifted  # pyright: ignore[reportMissingImports]

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.cli.serve_learning import taught
from outrider.server.app import create_app
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.train.online import OnlineLearner, OnlineSettings

_HELD_OUT = 1_000_000
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
        self.prompts = self.measured = shifted(arguments.text, self.llm, arguments.prompts, arguments.seed)
        if not arguments.seen:
            self.measured = shifted(arguments.text, self.llm, arguments.held, arguments.seed + _HELD_OUT)
        settings = online_settings(arguments.set, background=True, busy_share=arguments.learn_share)
        found = taught(self.llm, settings) if arguments.arm == "learning" else None
        lessons = {} if found is None else {"learner": found.learner, "install": found.install}
        self.learner = found.learner if found and isinstance(found.learner, OnlineLearner) else None
        self.service = Service(self.llm, ServerSettings(), **lessons)
        self.cpu, self.num_tokens, self.texts = 0.0, 0, list[str]()
        self.blocks = list[float]()

    def tokens_per_pass(self, prompts: list[Any]) -> float:
        """Of chains of four, in requests that are never served."""
        given = self.arguments
        every = [
            SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=_HELD_OUT + i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        method = self.llm.compose(self.llm.method_name, num_draft_tokens=4)
        outputs = self.llm.generate(prompts, every, method=method)
        return sum(len(one.token_ids) for one in outputs) / sum(one.stats.num_passes for one in outputs)

    def on_new_text(self) -> float:
        return self.tokens_per_pass([self.measured[i % len(self.measured)] for i in range(self.arguments.held)])

    async def ask(self, client: httpx.AsyncClient, number: int) -> tuple[str, int]:
        given = self.arguments
        body = {"prompt": self.prompts[number % len(self.prompts)], "max_tokens": given.max_tokens, "seed": number}
        answer = await client.post("/v1/completions", json={**body, "temperature": given.temperature, "ignore_eos": True})
        found = answer.json()
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    async def block(self, client: httpx.AsyncClient, numbers: range) -> None:
        """Requests one after the other from each of a few clients; their time counts."""
        cpu, left = time.process_time(), list(numbers)
        answers: dict[int, tuple[str, int]] = {}

        async def one() -> None:
            while left:
                number = left.pop(0)
                answers[number] = await self.ask(client, number)

        await asyncio.gather(*(one() for _ in range(self.arguments.clients)))
        spent = time.process_time() - cpu
        self.cpu += spent
        self.texts += [answers[number][0] for number in numbers]
        written = sum(answers[number][1] for number in numbers)
        self.num_tokens += written
        self.blocks.append(written / spent)

    async def pause(self) -> None:
        """Nobody asks until nothing more is learned: one update follows another as long as they help."""
        num_quiet = 0
        while num_quiet < 10:
            await asyncio.sleep(0.1)
            num_quiet = 0 if self.learner is not None and self.learner.is_learning else num_quiet + 1

    async def serve(self) -> None:
        transport = httpx.ASGITransport(create_app(self.service), raise_app_exceptions=False)
        self.service.worker.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
            for begin in range(0, self.arguments.requests, self.arguments.block):
                await self.block(client, range(begin, min(begin + self.arguments.block, self.arguments.requests)))
                await self.pause()
        self.service.close()

    def run(self) -> dict[str, Any]:
        home = self.tokens_per_pass([HOME[i % len(HOME)] for i in range(self.arguments.held)])
        before = self.on_new_text()
        asyncio.run(self.serve())
        told = {"home": home, "before": before, "after": self.on_new_text(), "tokens": self.num_tokens, "texts": self.texts}
        told |= {"cpu_s": self.cpu, "tokens_per_cpu_s": self.blocks}
        if self.learner is not None:
            judged = self.learner.judgements
            told |= {"updates": len(judged), "swaps": sum(one.swapped for one in judged)}
            told |= {"learning_s": self.learner.learning_seconds}
        return told


def arm(name: str) -> dict[str, Any]:
    """What a server in a process of its own tells."""
    done = subprocess.run([sys.executable, *sys.argv, "--arm", name], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compared(off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """What learning brought back and cost; ``goodput`` is that of the server that learns over that of the other."""
    lost = on["home"] - on["before"]
    ratios = [with_it / without for with_it, without in zip(on["tokens_per_cpu_s"], off["tokens_per_cpu_s"], strict=True)]
    told = {name: on[name] for name in ("home", "before", "after")}
    told |= {"recovered": (on["after"] - on["before"]) / lost, "equal_texts": off["texts"] == on["texts"]}
    told |= {"goodput": (on["tokens"] / on["cpu_s"]) / (off["tokens"] / off["cpu_s"]), "by_block": ratios}
    return {**told, **{name: on[name] for name in ("updates", "swaps", "learning_s") if name in on}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", choices=TEXTS, default="sums", help="what is asked for (default: %(default)s)")
    parser.add_argument("--method", default="draft-model")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--block", type=int, default=50, help="requests between two pauses")
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
    parser.add_argument("--arm", choices=["plain", "learning"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.arm:
        torch.set_num_threads(1)
        print(json.dumps(Arm(arguments).run()))
        return 0
    found = compared(arm("plain"), arm("learning"))
    asked = {name: vars(arguments)[name] for name in ("text", "method", "requests", "prompts", "seen", "set")}
    told = {**asked, **found}
    print(json.dumps(keep_results(arguments.out, "a server that learns beside one that does not", [told], script=_SCRIPT)))
    return 0 if found["equal_texts"] else 1


if __name__ == "__main__":
    sys.exit(main())
