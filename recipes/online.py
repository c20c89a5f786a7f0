"""What online updates are worth after a domain shift, on the bundled target.

A draft that has only read stories serves conversations. Its acceptance there is below that of a draft that knows
conversations; while it serves, it learns from what it served (`train/online.py`). Prompts that measure are never
served. What was lost is the gap to a draft of the same shape and training that read both; the share that came back is what
counts. The stream is served for real, by the engine, with whichever draft is the newest. `--old` requests of the old domain
were served before, and `--replay` mixes a share of everything ever served into what is learned from.

    python recipes/distill.py --stage corpus --stage write --stage shift            # the drafts, and conversations to serve
    python recipes/online.py --serve 2048
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accepted import Counts, chain_of, counts_of, held_prompts, new_llm, prompt_of, walk

from outrider.api import LLM
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.request import Origin
from outrider.train.distill import CHUNK
from outrider.train.draft_lm import DraftLM
from outrider.train.online import OnlineSettings, online_draft


def conversations(file: Path, count: int) -> list[list[int]]:
    """Prompts of the first conversations in a token file with its documents' beginnings."""
    tokens, starts = np.load(file), np.load(file.with_name(file.stem + "_starts.npy"))
    found = list[list[int]]()
    for begin, end in pairwise([*starts.tolist(), len(tokens)]):
        text = tokens[begin : min(end, begin + 400)].tolist()
        if 2 in text[:300]:
            found.append(prompt_of(text, chat=True))
        if len(found) == count:
            break
    return found


def settings_of(arguments: argparse.Namespace) -> OnlineSettings:
    return OnlineSettings(
        update_every=arguments.update_every,
        num_steps=arguments.num_steps,
        batch_size=arguments.batch_size,
        memory=arguments.memory,
        num_held=arguments.num_held,
        learning_rate=arguments.learning_rate,
        loss=arguments.loss,
        rejected_only=arguments.rejected_only,
        prompts=arguments.learn_prompts,
        replay=arguments.replay,
        average=arguments.average,
        chunk=1 << 29 if torch.cuda.is_available() else CHUNK,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", default="build/distill/stories", help="knows the old domain")
    parser.add_argument("--other", default="build/distill/both", help="knows both, for the size of the loss")
    parser.add_argument("--other-rate", type=float, help="tokens per pass of that draft on the new domain, if it was measured")
    parser.add_argument("--other-count", type=int, default=128, help="prompts that rate was measured with, the first ones")
    parser.add_argument("--record", type=Path, help="file that served requests are written to, or read from if it exists")
    parser.add_argument("--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy, held_chat.npy")
    parser.add_argument("--stream", type=Path, default=Path("build/distill/corpus/train.npy"), help="texts to serve")
    parser.add_argument("--serve", type=int, default=2048, help="conversations served")
    parser.add_argument("--at-once", type=int, default=64, help="requests served together")
    parser.add_argument("--measure", type=int, default=128, help="prompts that measure")
    parser.add_argument("--measure-every", type=int, default=512, help="requests between two measurements")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--num-steps", type=int, default=16, help="of an update")
    parser.add_argument("--batch-size", type=int, default=16, help="requests per step")
    parser.add_argument("--memory", type=int, default=2048, help="latest requests that are learned from")
    parser.add_argument("--num-held", type=int, default=64, help="latest requests that judge")
    parser.add_argument("--update-every", type=int, default=512, help="rejections between two updates")
    parser.add_argument("--loss", default="mixed")
    parser.add_argument("--old", type=int, default=0, help="requests of the old domain that were served before")
    parser.add_argument("--replay", type=float, default=0.0, help="share of learning that is from all that was ever served")
    parser.add_argument("--average", type=float, default=0.95, help="share of the mean of weights that stays in a step")
    parser.add_argument("--save", type=Path, help="folder for the draft that served in the end")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--rejected-only", action="store_true", help="learn where guesses were rejected, as the paper does")
    parser.add_argument("--learn-prompts", action="store_true", help="learn at the prompts' places too")
    return parser.parse_args()


@dataclass(frozen=True)
class Served:
    """A request that ended."""

    prompt: list[int]
    tokens: list[int]
    origins: list[Origin]


class Service:
    """Requests served in turn, and the draft that learns from them."""

    def __init__(self, llm: LLM, draft: DraftLM, arguments: argparse.Namespace) -> None:
        self.llm, self.online = llm, online_draft(draft, llm.target, settings_of(arguments))
        self.model: Target = draft.served(llm.target.dtype)
        self.params, self.learning = SamplingParams(max_tokens=arguments.max_tokens), 0.0

    @property
    def draft(self) -> DraftLM:
        """The newest draft, as modules."""
        return cast("DraftLM", self.online.module)

    def serve(self, prompts: list[list[int]]) -> list[Served]:
        """With the newest draft."""
        outputs = self.llm.generate(prompts, self.params, method=chain_of(self.llm, self.model, 4))
        return [Served(output.prompt_token_ids, output.token_ids, output.origins) for output in outputs]

    def observe(self, ended: list[Served]) -> None:
        for request in ended:
            self.online.observe(request.prompt, request.tokens, request.origins)

    def learn(self, ended: list[Served]) -> None:
        paused = time.monotonic()
        self.observe(ended)
        self.model = self.online.maybe_update() or self.model
        self.learning += time.monotonic() - paused


def recorded(file: Path) -> Iterator[Served]:
    for line in file.read_text().splitlines():
        row = json.loads(line)
        yield Served(row["prompt"], row["tokens"], [Origin(name) for name in row["origins"]])


def stream(service: Service, arguments: argparse.Namespace) -> Iterator[list[Served]]:
    """Requests that ended together, from the engine or, where they were served before, from the record: greedy text is the
    same whichever draft served it."""
    record: Path | None = arguments.record
    if record is not None and record.is_file():
        known = list(recorded(record))[: arguments.serve]
        yield from (known[begin : begin + arguments.at_once] for begin in range(0, len(known), arguments.at_once))
        return
    prompts = conversations(arguments.stream, arguments.serve)
    for begin in range(0, len(prompts), arguments.at_once):
        ended = service.serve(prompts[begin : begin + arguments.at_once])
        if record is not None:
            with record.with_suffix(".part").open("a") as file:
                rows = ({"prompt": r.prompt, "tokens": r.tokens, "origins": [o.value for o in r.origins]} for r in ended)
                file.writelines(json.dumps(row) + "\n" for row in rows)
        yield ended
    if record is not None:
        record.with_suffix(".part").rename(record)


@dataclass(frozen=True, eq=False)
class Measure:
    """Prompts that are never served, and what the target says to them."""

    prompts: list[list[int]]
    texts: list[list[int]]

    def __call__(self, draft: DraftLM) -> Counts:
        return walk(draft, self.prompts, self.texts, 4)


@dataclass(frozen=True, eq=False)
class Shift:
    """What the draft had before, in the old domain and in the new one, and what one that knows both has there."""

    stories: Measure
    chats: Measure
    home: Counts
    before: Counts
    both: float
    both_rows: slice

    def row(self, draft: DraftLM) -> dict[str, Any]:
        """Shares of what was lost that came back: of the gap to the draft that knows both, and of the drop from home."""
        now, rows = self.chats(draft), self.both_rows
        gap = self.both - self.before.of(rows).per_pass
        drop = self.home.per_pass - self.before.per_pass
        return {
            "conversations": now.per_pass,
            "stories": self.stories(draft).per_pass,
            "of_gap": (now.of(rows).per_pass - self.before.of(rows).per_pass) / max(gap, 1e-9),
            "of_drop": (now.per_pass - self.before.per_pass) / max(drop, 1e-9),
            "gain": now.gain(self.before, guesses=False),
            "gain_of_gap": now.of(rows).gain(self.before.of(rows), guesses=False),
        }


def shift_of(llm: LLM, draft: DraftLM, arguments: argparse.Namespace) -> Shift:
    """Measured once, before anything is served."""
    texts = {kind: held_prompts(arguments.prompts, kind, arguments.measure) for kind in ("story", "chat")}
    stories, chats = (
        Measure(asked, counts_of(llm, asked, llm.compose("plain"), max_tokens=arguments.max_tokens).texts)
        for asked in texts.values()
    )
    both, rows = arguments.other_rate, slice(arguments.other_count)
    if both is None:
        both, rows = chats(DraftLM.load(arguments.other, llm.target.device)).per_pass, slice(None)
    shift = Shift(stories, chats, stories(draft), chats(draft), both, rows)
    known = f"{both:.3f} (where it has {shift.before.of(rows).per_pass:.3f})"
    rates = f"stories {shift.home.per_pass:.3f}, conversations {shift.before.per_pass:.3f}"
    print(f"{rates}, a draft that knows both {known}", flush=True)
    return shift


def main() -> None:
    """Serve, learn, measure."""
    arguments, began = parse_arguments(), time.monotonic()
    llm = new_llm(dtype=arguments.dtype, batch=arguments.at_once)
    draft = DraftLM.load(arguments.draft, llm.target.device)
    shift, service = shift_of(llm, draft, arguments), Service(llm, draft, arguments)
    old = held_prompts(arguments.prompts, "story", arguments.measure + arguments.old)[arguments.measure :]
    for begin in range(0, len(old), arguments.at_once):
        service.observe(service.serve(old[begin : begin + arguments.at_once]))
    done = tokens = 0
    for ended in stream(service, arguments):
        service.learn(ended)
        done, tokens = done + len(ended), tokens + sum(len(request.prompt) + len(request.tokens) for request in ended)
        if done % arguments.measure_every < arguments.at_once:
            judged = service.online.judgements
            row = {"requests": done, "tokens": tokens, **shift.row(service.draft)}
            row |= {"updates": len(judged), "swaps": sum(judgement.swapped for judgement in judged)}
            row |= {"last": [judged[-1].served, judged[-1].learned] if judged else []}
            row |= {"learning": service.learning, "seconds": time.monotonic() - began}
            print(json.dumps(row), flush=True)
    if arguments.save is not None:
        service.draft.save(arguments.save, {"recipe": "recipes/online.py", "requests": done, "tokens": tokens})


if __name__ == "__main__":
    main()
