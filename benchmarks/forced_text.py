"""Passes and time that text forced by grammars saves, over a suite of JSON schemas.

    python benchmarks/forced_text.py [--methods plain,draft-model,prompt-lookup] [--max-tokens 120] [--json build/forced.json]

Each schema is asked for twice, greedily: with its grammar, and with one that says nothing of what must follow. Both give the
same text. Seconds are of the rounds, without the time that other work on the machine had, and the two take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.codecs.grammar import GrammarCompiler, TokenGrammar
from outrider.core.method import Method
from outrider.core.own_time import own_seconds
from outrider.engine.step import Engine

WHAT = "answers to JSON schemas with and without drafting the text that the grammar forces, bundled pair, greedy"
_TEXT, _NUMBER = {"type": "string", "maxLength": 16}, {"type": "integer", "minimum": 0, "maximum": 999}


def schemas() -> dict[str, dict[str, Any]]:
    """Objects as tools and extraction ask for them."""
    kinds = {
        "weather call": {"location": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}, "num_days": _NUMBER},
        "person": {"first_name": _TEXT, "last_name": _TEXT, "age_in_years": _NUMBER, "is_employed": {"type": "boolean"}},
        "order": {
            "order_number": _NUMBER,
            "customer_name": _TEXT,
            "total_price": _NUMBER,
            "status": {"enum": ["open", "sent"]},
        },
        "verdict": {"reasoning": _TEXT, "verdict": {"enum": ["correct", "incorrect"]}},
        "tags": {"tags": {"type": "array", "items": {"enum": ["urgent", "billing", "other"]}, "minItems": 1, "maxItems": 3}},
    }
    kinds["nested"] = {"customer": _object(kinds["person"]), "latest_order": _object(kinds["order"])}
    return {name: _object(properties) for name, properties in kinds.items()}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class Unforced:
    """A grammar that allows what another one allows, and never says which text must follow."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self.initial, self.advance, self.allowed = grammar.initial, grammar.advance, grammar.allowed

    def forced(self, state: Any) -> tuple[int, ...]:
        del state
        return ()


def measure(llm: LLM, method: Method, grammars: list[TokenGrammar], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a pass and seconds over all schemas, without and with forced text."""
    seconds, passes, tokens = [0.0, 0.0], [0, 0], 0
    for repeat in range(args.repeats + 1):  # the first warms up
        for grammar in grammars:
            found = [_decoded(llm, method, one, args.max_tokens) for one in (Unforced(grammar), grammar)]
            assert found[0][0] == found[1][0], "the same text"
            tokens += bool(repeat) * len(found[0][0])
            for number, (_, count, took) in enumerate(found):
                seconds[number], passes[number] = seconds[number] + bool(repeat) * took, passes[number] + bool(repeat) * count
    row = {"tokens/pass without": tokens / passes[0], "tokens/pass with": tokens / passes[1]}
    return {name: round(value, 2) for name, value in (row | {"speed-up": seconds[0] / seconds[1]}).items()}


def _decoded(llm: LLM, method: Method, grammar: Any, max_tokens: int) -> tuple[list[int], int, float]:
    engine = Engine(llm.target, method)
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar)
    batch = engine.start(llm.requests(["Once upon a time there was a fox. All about it: "], [params]))
    began, passes = own_seconds(), 0
    while not batch.rows[0].is_finished:
        engine.step(batch)
        passes += 1
    return batch.rows[0].output_ids, passes, own_seconds() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="plain,draft-model,prompt-lookup")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where the table goes")
    args = parser.parse_args()
    llm, rows = LLM(), list[dict[str, Any]]()
    compiler = GrammarCompiler(llm.codec)
    grammars = [compiler.json_schema(schema) for schema in schemas().values()]
    for name in args.methods.split(","):
        rows.append({"method": name} | measure(llm, llm.compose(name), grammars, args))
        print(", ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
        keep_results(args.json, WHAT, rows, script="benchmarks/forced_text.py")


if __name__ == "__main__":
    main()
