"""Drafts across bytes beside plain decoding: acceptance, tokens per pass and processor time, greedy.

No trained byte-level network lies here, so the byte model counts: a smoothed n-gram model of bytes over texts that the bundled
target wrote. It drafts for the bundled target, whose tokens are words, and the bundled draft drafts for it. Its law costs
little, which no byte network's does: read acceptance and tokens per pass for the method, and time for the bundled target only.
Prompts are the beginnings of held-out stories.

    python benchmarks/bytes_drafts.py [--texts 64] [--order 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.codecs.byte_level import byte_settings, byte_tokenizer
from outrider.codecs.text import TextCodec
from outrider.codecs.translation import TextTranslation
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.tiny import NgramModel

STORIES = Path(__file__).parent / "held_out_stories.jsonl"


def byte_codec() -> TextCodec:
    settings = byte_settings({"tokenizer_class": "ByteTokenizer", "special_tokens": ["<end>"], "eos_token": "<end>"})
    assert settings is not None
    return TextCodec(byte_tokenizer(settings), settings=settings)


def counted(llm: LLM, codec: TextCodec, *, num_texts: int, order: int) -> NgramModel:
    """A byte model of texts that a target wrote."""
    params = [SamplingParams(max_tokens=160, temperature=1.0, seed=seed) for seed in range(num_texts)]
    texts = [out.text for out in llm.generate(["Once upon a time"] * num_texts, params, method="plain")]
    tokens = codec.encode("\n".join(f"Once upon a time{text}" for text in texts), add_special_tokens=False)
    return NgramModel(tokens, order=order, vocab_size=codec.vocab_size)


@dataclass(frozen=True, eq=False)
class Speaker:
    """A target and its tokenizer."""

    name: str
    target: Target
    codec: TextCodec
    num_tokens: int

    def served(self, method: Method, prompts: Sequence[str]) -> tuple[list[RequestState], float]:
        """Finished requests, one after the other, and the processor seconds of all."""
        params, found = SamplingParams(max_tokens=self.num_tokens, ignore_eos=True), list[RequestState]()
        began = time.process_time()
        for prompt in prompts:
            ids = self.codec.encode(prompt)
            request = Request(ids, params, self.codec.eos_ids, self.codec.new_stream(ids))
            found.append([step.state for step in run(Engine(self.target, method), [request], max_batch_size=1)][-1])
        return found, time.process_time() - began


def rows_of(mine: Speaker, other: Speaker, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Plain decoding, and drafts of the other model with both methods."""
    plain, spent = mine.served(compose("plain", mine.target), prompts)
    count = sum(len(state.output_ids) for state in plain)
    rows = [{"target": mine.name, "draft": "none", "tokens per pass": 1.0, "ms a token": round(1000 * spent / count, 3)}]
    for name in ("reencode", "tli"):
        translation = TextTranslation(mine.codec, other.codec)
        method = compose(
            name, mine.target, draft=other.target, translation=translation, policy="fixed", options={"num_draft_tokens": 4}
        )
        states, cost = mine.served(method, prompts)
        stats = [state.stats for state in states]
        rows.append({
            "target": mine.name,
            "draft": f"{other.name}, {name}",
            "acceptance": round(sum(one.num_accepted for one in stats) / max(1, sum(one.num_tested for one in stats)), 3),
            "tokens per pass": round(sum(one.num_tokens for one in stats) / sum(one.num_passes for one in stats), 3),
            "ms a token": round(1000 * cost / count, 3),
            "texts of plain decoding": sum(a.output_ids == b.output_ids for a, b in zip(plain, states, strict=True)),
        })  # fmt: skip
    return rows


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=64, help="texts of the target that the byte model counts")
    parser.add_argument("--order", type=int, default=8, help="bytes that it looks at, with the next one")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    llm, small, codec = LLM(method="plain"), LLM(bundled_path("draft"), method="plain"), byte_codec()
    counts = counted(llm, codec, num_texts=chosen.texts, order=chosen.order)
    stories = [json.loads(line)["text"] for line in STORIES.read_text(encoding="utf-8").splitlines()]
    prompts = [story[:60] for story in stories[: chosen.prompts]]
    byte_model = Speaker("bytes (n-grams)", counts, codec, 160)
    word_model = Speaker("words (bundled target)", llm.target, llm.codec, 48)
    draft = Speaker("words (bundled draft)", small.target, small.codec, 48)
    rows = [*rows_of(word_model, byte_model, prompts), *rows_of(byte_model, draft, prompts)]
    for row in rows:
        print(json.dumps(row))
    what = f"drafts across bytes beside plain decoding, greedy, four guesses a round, {len(prompts)} prompts; processor time"
    return keep_results(chosen.json, what, rows, script="benchmarks/bytes_drafts.py")


if __name__ == "__main__":
    main()
