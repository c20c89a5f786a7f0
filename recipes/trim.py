"""What reduced draft vocabularies cost on the bundled pair: tokens per pass, by the number of tokens the draft can say.

The target writes texts from its begin-of-text token. Most of them choose the vocabulary, beginnings of the others are the
prompts.

    python recipes/trim.py                      # some minutes on a CPU
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import main as outrider
from outrider.core.params import SamplingParams


def write_texts(folder: Path, count: int, prompts: int, *, num_tokens: int = 128) -> list[list[int]]:
    """Texts of the target's own: the corpus is written to ``folder``, the last ``prompts`` come back."""
    llm = LLM(max_batch_size=16)
    params = [SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed) for seed in range(count)]
    texts = [output.token_ids for output in llm.generate([[0]] * count, params)]
    lines = [json.dumps({"tokens": tokens}) for tokens in texts[:-prompts]]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return texts[-prompts:]


def judge(name: str, draft: str, prompts: list[list[int]], num_tokens: int) -> None:
    """One draft with chains of four and eight, greedy."""
    llm = LLM(draft=draft, method="draft-model", dtype="float32", max_batch_size=16)
    params = SamplingParams(max_tokens=num_tokens)
    plain = llm.generate(prompts, params, method=llm.compose("plain"))
    found = []
    for length in (4, 8):
        outputs = llm.generate(prompts, params, method=llm.compose("draft-model", num_draft_tokens=length))
        assert all(a.token_ids == b.token_ids for a, b in zip(plain, outputs, strict=True)), "lossless"
        rate = sum(o.stats.num_tokens for o in outputs) / sum(o.stats.num_passes for o in outputs)
        found.append(f"K = {length}: {rate:.3f} tokens per pass")
    print(f"{name:10} {'; '.join(found)}", flush=True)


def main() -> None:
    """Write, trim, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 1024, 512, 256])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prompts = [tokens[:24] for tokens in write_texts(folder, arguments.texts, arguments.prompts)]
        judge("all", bundled_path("draft"), prompts, arguments.tokens)
        for size in arguments.sizes:
            out = folder / str(size)
            data = ["--data", str(folder / "corpus.jsonl"), "--tokens", str(size), "--out", str(out)]
            outrider(["trim", bundled_path("draft"), *data])
            judge(str(size), str(out), prompts, arguments.tokens)


if __name__ == "__main__":
    main()
