"""vLLM's part of ``check_vllm.py``: sees nothing of ours but the files it is given."""

import json
import sys
from pathlib import Path

import vllm  # pyright: ignore[reportMissingImports]

PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    """Serve the prompts of ``job.json`` with its speculation; texts and counters go to ``found.json``."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    llm = vllm.LLM(
        job["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative"],
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params)
    counted = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
    found = {
        "version": vllm.__version__,
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "num_rounds": counted[f"{PREFIX}drafts"].value,
        "by_place": counted[f"{PREFIX}accepted_tokens_per_pos"].values,
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
