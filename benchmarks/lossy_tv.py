"""What each lossy rule loses in one step, on real models: total variation of the first emitted token, in closed form.

The target writes texts by plain sampling. At every position of them its law p and the draft's law q are computed, and the rule
is applied to one guess. The guess is sampled from q, or (for rules that take chosen guesses) it is q's likeliest token. With
--generate each rule, and the lossless ones, also write texts of their own, and tokens per target pass are counted. Prints
tables and, as its last line, one JSON document.

    python benchmarks/lossy_tv.py [--model NAME --draft NAME] [--temperature 1.0] [--tokens 64] [--generate]
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch
from torch import Tensor

from outrider import LLM, SamplingParams, __version__
from outrider.acceptance import Block, Coupled, Delta, Rejection
from outrider.acceptance.distance import Loss, measure
from outrider.acceptance.divergence import Divergence, DivergenceOptions
from outrider.acceptance.lenient import Lenient, LenientOptions
from outrider.acceptance.lossy import LossyRule, judged_law
from outrider.acceptance.threshold import ThresholdRule, ThresholdRuleOptions
from outrider.acceptance.top_k_rule import TopK, TopKOptions
from outrider.acceptance.typical import TypicalAcceptance, TypicalOptions
from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule, Target
from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Law, Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.model.draft_model import DraftModel
from outrider.models.decoder import Decoder
from outrider.policies.fixed import Fixed, FixedOptions

PROMPTS = [
    "Once upon a time, there was a little fox who",
    "Tom and his dog went to the park. They",
    "The sun was hot, and the children wanted",
    "Lily looked at the big red box and",
    "One day a bird fell out of its nest.",
    "Mia was sad because",
]


def rules(embeddings: Tensor | None) -> dict[str, LossyRule]:
    """Each rule at its default, and milder and bolder."""
    table: dict[str, LossyRule] = {
        "typical epsilon=0.09 delta=0.3": TypicalAcceptance(),
        "typical epsilon=0.3 delta=0.9": TypicalAcceptance(TypicalOptions(epsilon=0.3, delta=0.9)),
        **{f"lenient lenience={x}": Lenient(LenientOptions(lenience=x)) for x in (0.9, 0.5, 0.2)},
        **{f"top-k accept_top_k={k}": TopK(TopKOptions(accept_top_k=k)) for k in (1, 2, 4)},
        **{f"threshold single={x}": ThresholdRule(ThresholdRuleOptions(threshold_single=x)) for x in (0.9, 0.5, 0.2)},
        **{f"threshold acc={x}": ThresholdRule(ThresholdRuleOptions(threshold_acc=x)) for x in (0.9, 0.5)},
    }
    for name, thresholds in {"js": (0.01, 0.05, 0.2), "kl": (0.05, 0.2), "tv": (0.1, 0.3)}.items():
        for x in thresholds:
            table[f"divergence {name} <= {x}"] = Divergence(DivergenceOptions(divergence=name, divergence_threshold=x))
    if embeddings is not None:
        options = DivergenceOptions(divergence="w1", divergence_threshold=0.1, embeddings=embeddings)
        table["divergence w1 <= 0.1"] = Divergence(options)
    return table


def law_of(model: Target, tokens: list[int], params: SamplingParams) -> Law:
    """The model's law after every token of a text."""
    tree = TokenTree.chain(torch.tensor([tokens], device=model.device))
    logits = model.score(tree, model.new_cache(1)).logits
    state = RequestState.of(Request(tokens[:1], params))
    zeros = torch.zeros(1, dtype=torch.int64, device=model.device)
    return Sampler([state], model.vocab_size, model.device).law(logits.double(), tree, Noise(zeros, zeros))


def collect(llm: LLM, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and the law guesses are judged by, [M, V] each, at every written position."""
    assert llm.draft is not None, "give a draft model"
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for output in llm.generate(PROMPTS, params, method=llm.compose("plain")):
        begin = len(output.prompt_token_ids) - 1
        tokens = [*output.prompt_token_ids, *output.token_ids[:-1]]
        p, q = law_of(llm.target, tokens, params), law_of(llm.draft, tokens, params)
        found.append((p.probs[0, begin:], q.probs[0, begin:], judged_law(p)[0, begin:]))
    p, q, judged = (torch.cat(parts) for parts in zip(*found, strict=True))
    return p, q, judged


def as_json(loss: Loss) -> dict[str, float]:
    numbers = {"tv_mean": loss.tv.mean(), "tv_max": loss.tv.max(), "kept": loss.kept.mean()}
    return {name: round(float(value), 5) for name, value in numbers.items()}


def report(llm: LLM, params: SamplingParams) -> dict[str, Any]:
    """Every rule's loss with a sampled guess, and with the draft's likeliest token where the rule is made for such."""
    p, q, judged = collect(llm, params)
    likeliest = torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1.0)
    target = llm.target
    embeddings = target.embed(torch.arange(target.vocab_size)) if isinstance(target, Decoder) else None
    rows: dict[str, Any] = {}
    for name, rule in rules(embeddings).items():
        rows[name] = {"sampled": as_json(measure(rule, p, q, judged=judged))}
        if Draws.DETERMINISTIC in rule.exact_for:
            rows[name]["chosen"] = as_json(measure(rule, p, likeliest, judged=judged))
    lossless = {"sampled": float(torch.minimum(p, q).sum(-1).mean()), "chosen": float((p * likeliest).sum(-1).mean())}
    return {"temperature": params.temperature, "contexts": len(p), "lossless_kept": lossless, "rules": rows}


def tokens_per_pass(llm: LLM, rule: AcceptanceRule, temperature: float) -> float:
    """Tokens per pass with the rule, five guesses a round, over twelve requests of 80 tokens."""
    assert llm.draft is not None, "give a draft model"
    drafter = DraftModel(llm.draft, vocab_size=llm.target.vocab_size, draws=rule.exact_for[0])
    method = Method(drafter, rule, Fixed(FixedOptions(num_draft_tokens=5)))
    each = [SamplingParams(max_tokens=80, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(12)]
    stats = [output.stats for output in llm.generate(PROMPTS * 2, each, method=method)]
    return sum(one.num_tokens for one in stats) / sum(one.num_passes for one in stats)


def generated(llm: LLM, temperature: float) -> dict[str, float]:
    exact: dict[str, AcceptanceRule] = {"coupled": Coupled(), "rejection": Rejection(), "block": Block(), "delta": Delta()}
    return {name: round(tokens_per_pass(llm, rule, temperature), 3) for name, rule in {**exact, **rules(None)}.items()}


def show(found: dict[str, Any]) -> None:
    lossless = found["lossless_kept"]
    print(f"temperature {found['temperature']}, {found['contexts']} contexts")
    print(f"{'':<34}{'a guess sampled from q':>27}   {'the likeliest of q':>27}")
    print(f"{'rule':<34}" + f"{'TV mean':>9}{'TV max':>9}{'kept':>9}   " * 2)
    print(f"{'(lossless)':<34}" + "".join(f"{0:>9}{0:>9}{lossless[way]:>9.1%}   " for way in ("sampled", "chosen")))
    for name, ways in found["rules"].items():
        cells = [f"{way['tv_mean']:>9.4f}{way['tv_max']:>9.4f}{way['kept']:>9.1%}   " for way in ways.values()]
        print(f"{name:<34}" + "".join(cells))
    for name, speed in found.get("tokens_per_pass", {}).items():
        print(f"{name:<34}{speed:>9.2f} tokens per pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--generate", action="store_true")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, draft=arguments.draft, method="draft-model", dtype="float32")
    found = report(llm, SamplingParams(max_tokens=arguments.tokens, temperature=arguments.temperature, seed=0, ignore_eos=True))
    if arguments.generate:
        found["tokens_per_pass"] = generated(llm, arguments.temperature)
    show(found)
    provenance = {"outrider": __version__, "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({**provenance, **found}))


if __name__ == "__main__":
    main()
