"""What online updates are worth after a domain shift, on the bundled target.

A draft that has only read stories serves conversations. Its acceptance there is below that of a draft that knows
conversations; while it serves, it learns from the answers (`train/online.py`). Prompts that measure are never
served. What was lost is the gap to a draft of the same shape and training that read both (`build/distill/distill`, or the
one named); the share that came back is what counts.

    python recipes/online.py --draft build/distill/stories --other build/distill/distill
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from distill import held_prompts

from outrider.api import LLM
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.methods import compose
from outrider.train.draft_lm import DraftLM
from outrider.train.online import OnlineDraft, OnlineSettings


def rate(llm: LLM, model: Target, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per pass with a draft, chains of four, and the texts."""
    method = compose("draft-model", llm.target, draft=model, options={"num_draft_tokens": 4})
    outputs = llm.generate(prompts, params, method=method)
    tokens, passes = sum(o.stats.num_tokens for o in outputs), sum(o.stats.num_passes for o in outputs)
    return tokens / passes, [output.token_ids for output in outputs]


def main() -> None:
    """Serve, learn, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", default="build/distill/stories", help="knows the old domain")
    parser.add_argument("--other", default="build/distill/distill", help="knows both, for the size of the loss")
    parser.add_argument("--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy, held_chat.npy")
    parser.add_argument("--serve", type=int, default=240, help="conversations served")
    parser.add_argument("--measure", type=int, default=48, help="prompts that measure")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--num-steps", type=int, default=32, help="of an update")
    parser.add_argument("--rejected-only", action="store_true", help="learn where guesses were rejected, as the paper does")
    arguments = parser.parse_args()
    llm, cpu = LLM(method="plain", max_batch_size=16), torch.device("cpu")
    params = SamplingParams(max_tokens=arguments.max_tokens)
    chats = held_prompts(arguments.prompts, "chat", arguments.measure + arguments.serve)
    measured, served = chats[: arguments.measure], chats[arguments.measure :]
    stories = held_prompts(arguments.prompts, "story", arguments.measure)
    draft = DraftLM.load(arguments.draft, cpu)
    model = draft.served(llm.target.dtype)
    home, _ = rate(llm, model, stories, params)
    before, texts = rate(llm, model, measured, params)
    other, _ = rate(llm, DraftLM.load(arguments.other, cpu).served(llm.target.dtype), measured, params)
    print(f"stories {home:.3f}, conversations {before:.3f}, a draft that knows both {other:.3f} tokens per pass", flush=True)
    settings = OnlineSettings(
        learning_rate=arguments.learning_rate,
        num_steps=arguments.num_steps,
        loss="mixed",
        rejected_only=arguments.rejected_only,
    )
    online, learning, began = OnlineDraft(draft, llm.target, settings), 0.0, time.monotonic()
    for begin in range(0, len(served), 16):
        method = compose("draft-model", llm.target, draft=model, options={"num_draft_tokens": 4})
        for output in llm.generate(served[begin : begin + 16], params, method=method):
            online.observe(output.prompt_token_ids, output.token_ids, output.origins)
        paused = time.monotonic()
        model = online.maybe_update() or model
        learning += time.monotonic() - paused
    after, again = rate(llm, model, measured, params)
    home_after, _ = rate(llm, model, stories, params)
    for step in online.judgements:
        print(f"  held out: serving {step.served:.3f}, learned {step.learned:.3f}{', swapped' if step.swapped else ''}")
    back, seconds = (after - before) / max(other - before, 1e-9), time.monotonic() - began
    print(f"after {len(served)} requests: conversations {after:.3f} ({back:.0%} of what was lost), stories {home_after:.3f}")
    print(f"{learning:.0f} s of {seconds:.0f} s learning; texts that measure unchanged: {again == texts}")


if __name__ == "__main__":
    main()
