"""A task of ten steps that can be checked, and the small Llamas that learn it: a draft, a target and a reward model.

A question is a first value and ten terms: ``a+d,*f,?c, ...``. A step applies the next term to the value so far and ends its
line: ``+d=g``. Values are the letters a to m. There are three operations with tables drawn at random. In training, ``+`` is
common, ``*`` is rarer and ``?`` is the rarest. So a model with little room or little time errs on ``?`` more often. A text is
right if all of its steps are. The reward model is a third writer, of the draft's size and with more training. Its score of a
step is how likely it would write it, so it errs too.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from outrider.routing.steps import WrittenStep

VALUES = "abcdefghijklm"
OPERATIONS = {"+": 0.6, "*": 0.25, "?": 0.15}
"""With their shares of the terms."""
NUM_STEPS = 10
TERMS = [f"{name}{value}" for name in OPERATIONS for value in VALUES]
VOCAB = ["<end>", ",", *VALUES, *TERMS, *(f"={value}\n" for value in VALUES), ":\n", "yes", "no"]
"""The last two words are for a reward model that says them; nobody does here."""
_tables = random.Random("tables")
TABLE = {(one, name, two): _tables.choice(VALUES) for name in OPERATIONS for one in VALUES for two in VALUES}


@dataclass(frozen=True)
class Size:
    """Size of a model and of its training."""

    hidden: int
    layers: int
    num_steps: int
    seed: str
    """Seed of its training texts."""


SIZES = {"draft": Size(96, 3, 150, "draft"), "target": Size(224, 5, 300, "target"), "reward": Size(96, 3, 260, "reward")}
"""The draft has 0.35 million numbers, the target 3.0 million."""


def question_of(chance: random.Random) -> str:
    """A question; its answer begins on the next line."""
    names = chance.choices(list(OPERATIONS), list(OPERATIONS.values()), k=NUM_STEPS)
    return f"{chance.choice(VALUES)}{''.join(f'{name}{chance.choice(VALUES)},' for name in names)}:\n"


def terms_of(question: str) -> list[str]:
    """The terms of a question."""
    return question[1:].split(",")[:NUM_STEPS]


def answer_of(question: str) -> str:
    """The steps of a question, all right."""
    value, lines = question[0], list[str]()
    for term in terms_of(question):
        value = TABLE[value, term[0], term[1]]
        lines.append(f"{term}={value}\n")
    return "".join(lines)


def checked(text: str, step: WrittenStep) -> float:
    """The exact reward: 1 if the step follows from the line before and the question, else 0."""
    question, _, said = text.partition("\n")
    lines = said.splitlines()
    value, terms = lines[-1][-1] if lines and lines[-1] else question[0], terms_of(question)
    if len(lines) >= len(terms):
        return 0.0
    term = terms[len(lines)]
    return float(step.text == f"{term}={TABLE.get((value, term[0], term[1]), '')}\n")


def tokenizer() -> Tokenizer:
    """One token for a term, and one for a result with the end of its line."""
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(VOCAB)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[+*?][a-m]|=[a-m]\\n|:\\n|yes|no|,|[a-m]"), "isolated")  # type: ignore[assignment]
    made.decoder = decoders.Fuse()  # type: ignore[assignment]
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


def lessons(words: Tokenizer, chance: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, L] of questions and answers, and labels [B, L]: what comes next in the answers."""
    tokens, labels = list[list[int]](), list[list[int]]()
    for _ in range(size):
        question = question_of(chance)
        asked, said = words.encode(question).ids, words.encode(answer_of(question)).ids
        tokens.append([*asked, *said, 0])
        labels.append([-100] * (len(asked) - 1) + [*said, 0, -100])
    return torch.tensor(tokens), torch.tensor(labels)


def train(folder: Path, kind: str) -> dict[str, Any]:
    """Train one model and write it as any checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size, words = SIZES[kind], tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(LlamaConfig, size))
    loss = learn(model, words, size.seed, size.num_steps)
    model.save_pretrained(folder / kind)
    words.save(str(folder / kind / "tokenizer.json"))
    (folder / kind / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return {"millions": round(millions, 2), "steps": size.num_steps, "loss": round(loss, 4)}


def learn(model: Any, words: Tokenizer, seed: str, num_steps: int, batch: int = 16) -> float:
    """The lessons; returns the last loss."""
    rule = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    began, loss, chance = time.monotonic(), torch.zeros(()), random.Random(seed)
    for step in range(num_steps):
        for group in rule.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 40) * (1 - 0.95 * step / num_steps)
        tokens, labels = lessons(words, chance, batch)
        loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
        rule.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        if (step + 1) % 20 == 0:
            print(f"{seed}: step {step + 1}, loss {loss.item():.4f}, {time.monotonic() - began:.0f} s", flush=True)
    return loss.item()


def config_of(kind: Any, size: Size) -> Any:
    """A Llama's config."""
    return kind(
        vocab_size=len(VOCAB), hidden_size=size.hidden, intermediate_size=8 * size.hidden // 3, num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32, num_key_value_heads=size.hidden // 32, max_position_embeddings=128,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def is_right(question: str, text: str) -> bool:
    """Whether all steps of an answer are."""
    return text == answer_of(question)


def questions(seed: str, count: int) -> Sequence[str]:
    """Questions that follow from a seed."""
    chance = random.Random(seed)
    return [question_of(chance) for _ in range(count)]
