"""Print text as it is written; every chunk says where its tokens came from."""

from outrider import LLM, Origin, SamplingParams

llm = LLM()
accepted = 0
for chunk in llm.stream("The little boat", SamplingParams(max_tokens=60, stop=["The end"])):
    print(chunk.text, end="", flush=True)
    accepted += sum(origin is Origin.ACCEPTED for origin in chunk.origins)
print(f"\n[{accepted} tokens were drafted and accepted]")
