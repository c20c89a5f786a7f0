"""Several drafters in one tree: copies where the text repeats itself, a draft model elsewhere.

python examples/drafters_together.py
"""

from outrider import LLM, SamplingParams

PROMPT = "Once upon a time, there was a boy named Tom. He loved to play with his red ball. Once upon a time, there was a boy"


def main() -> None:
    llm = LLM(method="hybrid", parts=["suffix", "draft-model"])
    params = SamplingParams(max_tokens=48, temperature=0.5, seed=7)
    methods = {
        "plain": llm.compose("plain"),
        "suffix": llm.compose("suffix"),
        "draft-model": llm.compose("draft-model"),
        "hybrid": llm.method,
        "rasd": llm.compose("rasd"),
    }
    texts = set[str]()
    for name, method in methods.items():
        output = llm.generate(PROMPT, params, method=method)[0]
        texts.add(output.text)
        print(f"{name:<12} {output.stats.tokens_per_pass:.2f} tokens per target pass")
    assert len(texts) == 1, "whoever guesses, the text is the seed's"
    print(PROMPT + texts.pop())


if __name__ == "__main__":
    main()
