"""Random models and random samplers: is what speculation writes what plain decoding and transformers write?

    python benchmarks/random_exactness.py --models 200 --samplers 1000        the full size
    python benchmarks/random_exactness.py --models 20 --samplers 20           a look

Models: small random configurations of every architecture that transformers builds as a causal language model, opened as a user
would open them. Each is equal to ``generate`` over a ragged batch with lookup and with trees, or refused with the reason.
Samplers: random parameter sets on the bundled models; every method writes plain decoding's text. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from outrider import LLM, OutriderError, SamplingParams, compose
from outrider.core.interfaces import Target
from outrider.core.request import Request
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.models.load import load_model

VOCAB, MOST_PARAMETERS, NUM_TOKENS = 61, 3_000_000, 14
PROMPTS = [[5, 9, 33, 4, 17, 8, 44, 21, 3], [7, 7, 12], [50, 4, 29, 30, 31, 50, 4, 29, 30]]
MODEL_METHODS = ("plain", "prompt-lookup", "token-recycling")
SAMPLER_METHODS = ("draft-model", "draft-tree", "best-first", "rsd-s", "spectr", "prompt-lookup", "token-recycling", "suffix")


def small_config(kind: str, chance: random.Random) -> Any:
    """A configuration of few numbers, under the names that this architecture gives them."""
    heads, layers = chance.choice((2, 4)), chance.choice((2, 3))
    size = 16 * heads
    sizes = {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), size),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), heads),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), 2 * size),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
        "num_key_value_heads": chance.choice((heads, heads // 2)),
        "head_dim": 16,
        "rotary_dim": 8,
        "sliding_window": chance.choice((4, 8, 64)),
        "num_experts_per_tok": 2,
        "is_decoder": True,
        "vocab_size": VOCAB,
    }
    known = vars(CONFIG_MAPPING[kind]())
    given: dict[str, Any] = {name: value for name, value in sizes.items() if name in known}
    given |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[kind](**given)


def small_model(kind: str, seed: int) -> Any:
    """A random model; raises where the architecture cannot be built this small."""
    config = small_config(kind, random.Random(f"{kind} {seed}"))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


def generated(model: Any) -> list[list[int]]:
    """What transformers writes, prompt by prompt."""
    texts: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
    return texts


def written(target: Target, method: str) -> list[list[int]]:
    """What we write, all prompts in one ragged batch."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    engine = Engine(target, compose(method, target, options={} if method == "plain" else {"num_draft_tokens": 5}))
    requests = [Request(prompt, params) for prompt in PROMPTS]
    done = {step.request: step.state.output_ids for step in run(engine, requests, max_batch_size=len(PROMPTS))}
    return [list(done[index]) for index in range(len(PROMPTS))]


@torch.no_grad()
def is_tie(model: Any, expected: list[list[int]], found: list[list[int]]) -> bool:
    """Whether texts part only where the two best logits are equal but for rounding."""
    for prompt, mine, other in zip(PROMPTS, expected, found, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if place is not None:
            logits = model(torch.tensor([[*prompt, *mine[:place]]])).logits[0, -1]
            best = logits.topk(2).values
            if float(best[0] - best[1]) > 1e-4 * float(logits.std()):
                return False
    return True


def try_model(kind: str, seed: int) -> str:
    """ "equal", "refused: ...", "cannot be built: ..." or "DIFFERENT: ..."."""
    try:
        model = small_model(kind, seed)
        expected = generated(model)
    except Exception as error:  # transformers raises many kinds
        return f"cannot be built: {type(error).__name__}: {' '.join(str(error).split())[:80]}"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            target = load_model(folder, dtype="float32", device="cpu")
        except OutriderError as error:
            return f"refused: {str(error).replace(folder, kind)}"
    for method in MODEL_METHODS:
        found = written(target, method)
        if found != expected and not is_tie(model, expected, found):
            return f"DIFFERENT: {method} on {type(target).__name__}"
    return "equal"


def random_params(chance: random.Random) -> SamplingParams:
    """Any sampling parameters."""

    def perhaps(value: Any, other: Any) -> Any:
        return value if chance.random() < 0.4 else other

    return SamplingParams(
        max_tokens=chance.randrange(4, 20),
        temperature=chance.choice((0.0, 0.3, 0.7, 1.0, 1.5)),
        top_k=perhaps(chance.randrange(1, 60), 0),
        top_p=perhaps(chance.uniform(0.05, 1.0), 1.0),
        min_p=perhaps(chance.uniform(0.0, 0.3), 0.0),
        typical_p=perhaps(chance.uniform(0.2, 1.0), 1.0),
        repetition_penalty=perhaps(chance.uniform(0.7, 1.6), 1.0),
        presence_penalty=perhaps(chance.uniform(-1, 2), 0.0),
        frequency_penalty=perhaps(chance.uniform(-1, 2), 0.0),
        logit_bias=perhaps({chance.randrange(4096): chance.choice((3.0, -5.0, -float("inf"))) for _ in range(4)}, {}),
        banned_token_ids=perhaps([chance.randrange(4096) for _ in range(3)], ()),
        min_tokens=perhaps(chance.randrange(6), 0),
        seed=chance.randrange(1 << 32),
    )


def try_samplers(llm: LLM, count: int, seed: int = 0) -> Counter[str]:
    """Texts that differ from plain decoding's, by method; prompts of a set share their passes."""
    chance, different = random.Random(seed), Counter[str]()
    prompts = ["Once upon a time", "One day, a girl", "The dog said: the dog said:"]
    for _ in range(count):
        params = [random_params(chance) for _ in prompts]
        expected = [output.token_ids for output in llm.generate(prompts, params, method="plain")]
        for name in SAMPLER_METHODS:
            found = [output.token_ids for output in llm.generate(prompts, params, method=name)]
            different[name] += sum(mine != other for mine, other in zip(found, expected, strict=True))
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--samplers", type=int, default=1000)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kinds = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes: dict[str, str] = {}
    for number in range(arguments.models):
        kind, seed = kinds[number % len(kinds)], number // len(kinds)
        outcomes[f"{kind} {seed}"] = try_model(kind, seed)
        print(f"{kind:<28}{outcomes[f'{kind} {seed}']}", flush=True)
    different = try_samplers(LLM(dtype="float32"), arguments.samplers) if arguments.samplers else Counter[str]()
    counts = Counter(text.partition(":")[0] for text in outcomes.values())
    print(json.dumps({"models": counts, "samplers": arguments.samplers, "different texts": different}))
    return 1 if counts["DIFFERENT"] or sum(different.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
