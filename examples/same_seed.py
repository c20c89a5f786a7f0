"""Same seed, same text: plain decoding, a draft model and prompt lookup write the same sampled story."""

from outrider import LLM, SamplingParams

llm = LLM(dtype="float32")  # in bfloat16 a close call may round differently in a wider pass
params = SamplingParams(max_tokens=60, temperature=0.8, top_p=0.95, seed=7)
texts = {
    name: llm.generate("One day, a bear", params, method=llm.compose(name))[0]
    for name in ("plain", "draft-model", "prompt-lookup")
}
for name, output in texts.items():
    print(f"{name:<14}{output.stats.num_passes:>4} passes   ...{output.text[-50:]!r}")
assert len({output.text for output in texts.values()}) == 1
