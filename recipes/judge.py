"""Judge decoding on a task that can be checked: what a head gains, what it loses, and where it fails.

Running sums modulo 5, said in words: ``q 2 4 1 :`` is answered ``so 1 so 2 ans 2``. The target mostly says "so", the draft
mostly "and", and the draft also makes mistakes. A swapped word is harmless, a wrong digit is not: the head must tell them
apart. The second task is the failing case: ``c so and then so :`` asks for a copy, in which a swapped word is an error.
Neither the head nor the draft ever saw it. Prints a table and, as its last line, one JSON document.

    python recipes/judge.py [--out build/judge] [--steps 2400] [--questions 300] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from outrider.api import LLM
from outrider.bench.provenance import results_head
from outrider.core.params import SamplingParams
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.judge_head import basis_of
from outrider.train.judge import JudgeSettings, examples_of, last_number, train_judge, verdict_of

BASE = 5
WORDS = ("so", "and", "then")
VOCAB = ["<end>", "q", "c", ":", "ans", *WORDS, *(str(digit) for digit in range(BASE))]
SIZES = {"target": (64, 2), "draft": (24, 1)}
"""Hidden size and layers."""


def sum_of(chance: random.Random, favourite: str) -> tuple[str, str]:
    """A question and its answer, whose words come from somebody who likes ``favourite``."""
    terms = [chance.randrange(BASE) for _ in range(4)]
    total, said = terms[0], []
    for term in terms[1:]:
        total = (total + term) % BASE
        said += [favourite if chance.random() < 0.85 else chance.choice(WORDS), str(total)]
    return f"q {' '.join(map(str, terms))} :", f"{' '.join(said)} ans {total}"


def copy_of(chance: random.Random) -> tuple[str, str]:
    words = " ".join(chance.choice(WORDS) for _ in range(4))
    return f"c {words} :", words


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(VOCAB)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


def batch_of(chance: random.Random, favourite: str, size: int, encode: Callable[[str], list[int]]) -> tuple[Any, Any]:
    """Tokens [B, L] with labels of the answers only."""
    copies = 0.2 if favourite == WORDS[0] else 0.0  # the draft never learns to copy
    pairs = [copy_of(chance) if chance.random() < copies else sum_of(chance, favourite) for _ in range(size)]
    rows = [(encode(question), [*encode(answer), 0]) for question, answer in pairs]
    longest = max(len(q) + len(a) for q, a in rows)
    tokens, labels = torch.zeros(size, longest, dtype=torch.int64), torch.full((size, longest), -100)
    for place, (q, a) in enumerate(rows):
        tokens[place, : len(q) + len(a)] = torch.tensor([*q, *a])
        labels[place, len(q) : len(q) + len(a)] = torch.tensor(a)
    return tokens, labels


def build(folder: Path, name: str, *, num_steps: int, favourite: str, device: str) -> None:
    """Train a small Llama and write it as any checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = SIZES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, eos_token_id=0,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model, words, chance = LlamaForCausalLM(config), tokenizer(), random.Random(name)
    model.to(torch.device(device))  # pyright: ignore
    rule = torch.optim.AdamW(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.OneCycleLR(rule, 3e-3, total_steps=num_steps)
    loss = torch.zeros(())
    for _ in range(num_steps):
        tokens, labels = batch_of(chance, favourite, 64, lambda text: words.encode(text).ids)
        loss = model(input_ids=tokens.to(device), labels=labels.to(device)).loss
        rule.zero_grad()
        loss.backward()
        rule.step()
        decay.step()
    model.cpu().save_pretrained(folder / name)
    words.save(str(folder / name / "tokenizer.json"))
    (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    print(f"{name}: loss {loss.item():.3f}")


def rate(llm: LLM, pairs: Sequence[tuple[str, str]], method: Any, right: Callable[[str, str], bool]) -> dict[str, float]:
    """Share of right answers, and tokens per target pass."""
    outs = llm.generate([question for question, _ in pairs], SamplingParams(max_tokens=16), method=method)
    passes = sum(out.stats.num_passes for out in outs)
    answers = zip(outs, pairs, strict=True)
    share = sum(right(out.text.strip(), answer) for out, (_, answer) in answers) / len(pairs)
    return {"accuracy": share, "tokens_per_pass": sum(len(out.token_ids) for out in outs) / passes}


def same_number(text: str, answer: str) -> bool:
    return last_number(text) == last_number(answer)


def same_text(text: str, answer: str) -> bool:
    return text == answer


def study(folder: Path, *, num_questions: int, seed: int = 1) -> dict[str, Any]:
    """Train the head on sums, then measure sums and copies with and without it."""
    chance = random.Random(seed)
    llm = LLM(str(folder / "target"), method="draft-model", draft=str(folder / "draft"), max_batch_size=64, fast=False)
    taught, sums = ([sum_of(chance, "so") for _ in range(num_questions)] for _ in range(2))
    copies = [copy_of(chance) for _ in range(num_questions)]
    settings = JudgeSettings(max_tokens=16)
    questions = [llm.codec.encode(question) for question, _ in taught]
    examples = examples_of(llm, llm.drafts[0], questions, answer=last_number, settings=settings)
    _, ends = read_target(str(folder / "target"))
    head, verdict = train_judge(examples, basis_of(ends.readout * ends.norm), settings=settings)
    head.save(folder / "judge", {"lossy": True})
    copied = [llm.codec.encode(question) for question, _ in copies]
    elsewhere = examples_of(llm, llm.drafts[0], copied, answer=str.strip, settings=settings)
    options: dict[str, Any] = {"num_draft_tokens": 4}
    methods = {
        "plain": llm.compose("plain"),
        "exact": llm.compose("draft-model", acceptance="delta", **options),
        "judge": llm.compose("draft-model", acceptance="judge", judge=str(folder / "judge"), **options),
    }
    return {
        "held_out": asdict(verdict),
        "copies_held_out": asdict(verdict_of(head, elsewhere)) if elsewhere else None,
        "sums": {name: rate(llm, sums, method, same_number) for name, method in methods.items()},
        "copies": {name: rate(llm, copies, method, same_text) for name, method in methods.items()},
    }


def guesses_of(verdict: dict[str, Any] | None) -> dict[str, Any]:
    """What the head does with guesses that it was not taught, and how far the law of a step moves where the models disagree."""
    known = verdict or {}
    return {name: known[name] for name in ("kept_of_harmless", "kept_of_harmful", "distance") if name in known}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/judge"))
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, favourite, share in (("target", "so", 1.0), ("draft", "and", 0.1)):
        build(chosen.out, name, num_steps=max(1, round(share * chosen.steps)), favourite=favourite, device=chosen.device)
    found = study(chosen.out, num_questions=chosen.questions)
    rows = [
        {"task": task, "rule": name, **row, **(guesses_of(found[verdict]) if name == "judge" else {})}
        for task, verdict in (("sums", "held_out"), ("copies", "copies_held_out"))
        for name, row in found[task].items()
    ]
    for row in rows:
        rates = f"accuracy {row['accuracy']:.3f}  tokens per pass {row['tokens_per_pass']:.2f}"
        print(f"{row['task']:<8}{row['rule']:<8}{rates}")
    print(json.dumps(found))
    if chosen.json:
        what = (
            "judge decoding on running sums, which its head was taught, and on copies, which it never saw; four guesses a round"
        )
        head = results_head(what, script="recipes/judge.py")
        verdicts = {name: found[name] for name in ("held_out", "copies_held_out")}
        chosen.json.write_text(json.dumps({**head, "verdicts": verdicts, "rows": rows}, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
