"""Runs another engine in its own Python and answers over pipes. This file stands alone: it imports nothing of ours.

    PYTHON worker.py        one JSON job on the first line of stdin, one answer per line after it

Job: engine, variant, model, draft, dtype, threads, max_len, num_draft_tokens. Then requests ``{"prompt": ids, "max_tokens":
n}``, each answered by ``{"tokens": ids, "first": tokens of the first step, "first_seconds": t, "seconds": t}``: speeds are
taken after the first step, so that every engine's prefill is left out. An engine that cannot run answers ``{"error":
reason}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Answer = dict[str, Any]
Run = Callable[[list[int], int], Answer]
counts_cpu = os.environ.get("OUTRIDER_PEER_CLOCK") == "process_time"
now: Callable[[], float] = time.process_time if counts_cpu else time.perf_counter
"""Seconds by the clock, or those of this process's processor (``process_time``)."""


def timed(generate: Callable[[list[int], int], list[int]]) -> Run:
    """An engine that answers all at once. Its call for one token stands for the prefill."""

    def run(prompt: list[int], max_tokens: int) -> Answer:
        began = now()
        generate(prompt, 1)
        first = now()
        tokens = generate(prompt, max_tokens)
        return {"tokens": tokens, "first": 1, "first_seconds": first - began, "seconds": now() - first}

    return run  # seconds less first_seconds: two calls, the same prefill


class Stopwatch:
    """Records when tokens arrive, as a Hugging Face streamer."""

    def __init__(self) -> None:
        self.began = now()
        self.arrivals: list[tuple[int, float]] = []

    def put(self, value: Any) -> None:
        self.arrivals.append((value.numel(), now()))

    def end(self) -> None:
        pass


def hugging_face(job: dict[str, Any]) -> tuple[Run, str]:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()

    def load(name: str) -> Any:
        folder, file = (os.path.dirname(name), os.path.basename(name)) if name.endswith(".gguf") else (name, None)
        more = {"gguf_file": file} if file else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=job["dtype"], **more).eval()
        model.generation_config.eos_token_id = None
        return model

    model, extra = load(job["model"]), {}
    if job["variant"] == "assisted":
        draft = load(job["draft"])
        draft.generation_config.num_assistant_tokens = job["num_draft_tokens"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        extra = {"assistant_model": draft}
    elif job["variant"] == "prompt-lookup":
        extra = {"prompt_lookup_num_tokens": job["num_draft_tokens"], "max_matching_ngram_size": 3}

    def run(prompt: list[int], max_tokens: int) -> Answer:
        ids, watch = torch.tensor([prompt]), Stopwatch()
        limits = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **limits, **extra)
        ended = now()
        tokens = out[0, len(prompt) :].tolist()
        count, first = watch.arrivals[1] if len(watch.arrivals) > 1 else (len(tokens), ended)
        return {"tokens": tokens, "first": count, "first_seconds": first - watch.began, "seconds": ended - watch.began}

    return run, f"transformers {transformers.__version__}"


def vllm(job: dict[str, Any]) -> tuple[Run, str]:
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": f"0-{job['threads'] - 1}"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import vllm as engine  # pyright: ignore[reportMissingImports]

    k = job["num_draft_tokens"]
    speculative = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft-model": {"method": "draft_model", "model": job["draft"], "num_speculative_tokens": k},
        # prompts come back in every round, and it would remember their answers
        "suffix": {"method": "suffix", "num_speculative_tokens": k, "suffix_decoding_max_cached_requests": 0},
    }[job["variant"]]
    more = {"speculative_config": speculative} if speculative else {}
    llm = engine.LLM(job["model"], dtype=job["dtype"], max_model_len=job["max_len"], enable_prefix_caching=False, **more)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        params = engine.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

    return timed(generate), f"vllm {engine.__version__}"


def llama_cpp(job: dict[str, Any]) -> tuple[Run, str]:
    import llama_cpp as engine  # pyright: ignore[reportMissingImports]
    import numpy
    from llama_cpp import llama_speculative as drafting  # pyright: ignore[reportMissingImports]

    options = {"n_ctx": job["max_len"], "n_threads": job["threads"], "n_threads_batch": job["threads"], "verbose": False}
    more: dict[str, Any] = {}
    if job["variant"] == "prompt-lookup":
        more["draft_model"] = drafting.LlamaPromptLookupDecoding(num_pred_tokens=job["num_draft_tokens"])
    elif job["variant"] == "draft-model":
        draft = engine.Llama(job["draft"], **options)

        class SecondModel(drafting.LlamaDraftModel):  # the bindings' interface; what they keep of the prefix is reused
            def __call__(self, input_ids: Any, /, **_: Any) -> Any:
                guesses = zip(range(job["num_draft_tokens"]), draft.generate(input_ids.tolist(), temp=0.0, reset=True))
                return numpy.array([token for _, token in guesses], dtype=numpy.intc)

        more["draft_model"] = SecondModel()
    llm = engine.Llama(job["model"], logits_all=bool(more), **options, **more)

    def run(prompt: list[int], max_tokens: int) -> Answer:
        llm.reset()
        began, first, tokens = now(), 0.0, []
        for token in llm.generate(prompt, temp=0.0, reset=True):
            tokens.append(int(token))
            first = first or now()
            if len(tokens) == max_tokens:
                break
        return {"tokens": tokens, "first": 1, "first_seconds": first - began, "seconds": now() - began}

    return run, f"llama-cpp-python {engine.__version__}"


def llama_server(job: dict[str, Any]) -> tuple[Run, str]:
    """llama.cpp's own server, in this process, with its own speculation."""
    from importlib.metadata import version
    from urllib.request import Request, urlopen

    import xllamacpp as engine  # pyright: ignore[reportMissingImports]

    kinds, params = engine.common_speculative_type, engine.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = job["model"], job["max_len"], 1, -1
    draft, ngrams = params.speculative.draft, params.speculative.ngram_simple
    for used in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        used.n_threads = job["threads"]
    if job["variant"] == "draft-model":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path, draft.n_max, draft.p_min = job["draft"], job["num_draft_tokens"], 0.0
    elif job["variant"] == "prompt-lookup":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        ngrams.size_n, ngrams.size_m = 3, job["num_draft_tokens"]
    server = engine.Server(params)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked | {"return_tokens": True, "cache_prompt": False}).encode()
        with urlopen(Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})) as reply:
            return json.load(reply)["tokens"]

    return timed(generate), f"xllamacpp {version('xllamacpp')} ({wide_features(engine.get_system_info())})"


def wide_features(system_info: str) -> str:
    """What llama.cpp was compiled for beyond AVX2 and plain NEON: a wheel for any processor is slower than a native build."""
    pairs = (pair.partition(" = ") for pair in system_info.replace(":", "|").split("|"))
    names = [name.strip() for name, _, value in pairs if value.strip() == "1"]
    wide = [name for name in names if name.startswith(("AVX512", "AVX_VNNI", "AMX", "DOTPROD", "MATMUL", "SVE"))]
    return " ".join(wide) or "compiled for any processor"


def openvino(job: dict[str, Any]) -> tuple[Run, str]:
    import numpy
    import openvino as base  # pyright: ignore[reportMissingImports]
    import openvino_genai as engine  # pyright: ignore[reportMissingImports]

    hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[job["dtype"]]
    whole = engine.SchedulerConfig()
    whole.enable_prefix_caching = False  # both calls that are timed read the whole prompt
    more: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": job["threads"]}
    more["scheduler_config"] = whole
    if job["variant"] == "draft-model":
        more["draft_model"] = engine.draft_model(job["draft"], "CPU")
    elif job["variant"] == "prompt-lookup":
        more["prompt_lookup"] = True
    pipeline = engine.LLMPipeline(job["model"], "CPU", **more)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        config = engine.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        if job["variant"] != "plain":
            config.num_assistant_tokens = job["num_draft_tokens"]
        if job["variant"] == "prompt-lookup":
            config.max_ngram_size = 3
        return list(pipeline.generate(base.Tensor(numpy.array([prompt], dtype=numpy.int64)), config).tokens[0])

    return timed(generate), f"openvino-genai {engine.__version__}"


ENGINES = {
    "hugging-face": hugging_face,
    "vllm": vllm,
    "llama-cpp": llama_cpp,
    "llama-server": llama_server,
    "openvino": openvino,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # engines print to standard output; answers have a channel of their own
    os.dup2(2, 1)

    def answer(document: Answer) -> None:
        print(json.dumps(document), file=answers, flush=True)

    work(sys.stdin, answer)


def work(asked: TextIO, answer: Callable[[Answer], None]) -> None:
    """Answer every line. The first one describes the engine."""
    job = json.loads(asked.readline())
    try:
        run, version = ENGINES[job["engine"]](job)
        answer({"ready": version})
    except BaseException as error:
        answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"})
        return
    for line in asked:
        request = json.loads(line)
        try:
            answer(run(request["prompt"], request["max_tokens"]))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
