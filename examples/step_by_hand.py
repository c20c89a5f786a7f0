"""The loop, written out: each step is one round of plan, propose, score, walk, commit."""

from outrider import LLM, SamplingParams

llm = LLM()
engine = llm.engine()
batch = engine.start(llm.requests(["Tom had a dog.", "It was a sunny day and"], SamplingParams(max_tokens=24)))
while batch.rows:
    for state, tokens in zip(batch.rows, engine.step(batch).emitted, strict=True):
        print(f"{len(tokens)} tokens: {llm.codec.decode(tokens, prompt_ids=state.tokens[: -len(tokens)])!r}")
    batch = batch.without_finished()
