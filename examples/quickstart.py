"""Continue a prompt with the bundled pair and see what speculation did."""

from outrider import LLM, SamplingParams

llm = LLM()
output = llm.generate("Once upon a time", SamplingParams(max_tokens=60))[0]
print(output.text)
stats = output.stats
print(f"{stats.num_tokens} tokens in {stats.num_passes} target passes, acceptance {stats.acceptance:.0%}")
