"""The Python API on the bundled pair: what a user calls, in the ways users call it."""

from __future__ import annotations

import pytest

from outrider import LLM, Origin, RequestError, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


def test_prompts_are_strings_or_token_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    ids = llm.codec.encode("Once upon a time")
    outputs = llm.generate(["Once upon a time", ids], params)
    assert outputs[0].token_ids == outputs[1].token_ids == llm.generate(ids, params)[0].token_ids
    assert outputs[0].text == llm.generate("Once upon a time", params)[0].text


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"One day, {name} found" for name in "Tom Lily Ben Sue Max Ann Tim Sam Joe Mia Leo Zoe".split()]
    lengths = [SamplingParams(max_tokens=3 + 5 * (i % 4), ignore_eos=True) for i in range(len(prompts))]
    together = llm.generate(prompts, lengths)
    for prompt, params, output in zip(prompts, lengths, together, strict=True):
        assert output.token_ids == llm.generate(prompt, params)[0].token_ids
        assert len(output.token_ids) == params.max_tokens and output.finish_reason == "length"


def test_a_stream_adds_up_to_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, temperature=0.9, seed=2, stop=["and the", "friend"])
    expected = llm.generate(["Tom had a cat.", "It was raining."], params)
    texts, tokens, finals = ["", ""], [[], []], [None, None]
    for chunk in llm.stream(["Tom had a cat.", "It was raining."], params):
        texts[chunk.index] += chunk.text
        tokens[chunk.index] += chunk.token_ids
        assert len(chunk.token_ids) == len(chunk.origins)
        finals[chunk.index] = chunk.output or finals[chunk.index]
    for i, output in enumerate(expected):
        assert texts[i] == output.text and tokens[i] == output.token_ids
        assert finals[i].text == output.text and finals[i].finish_reason == output.finish_reason


def test_a_stop_string_is_cut_off_or_kept(llm: LLM) -> None:
    text = llm.generate("Once upon a time", SamplingParams(max_tokens=60))[0].text
    word = text.split()[6]
    cut = llm.generate("Once upon a time", SamplingParams(max_tokens=60, stop=word))[0]
    assert cut.text == text[: text.index(word)] and cut.finish_reason == "stop"
    params = SamplingParams(max_tokens=60, stop=[word], include_stop_str_in_output=True)
    assert llm.generate("Once upon a time", params)[0].text == text[: text.index(word) + len(word)]


def test_the_draft_model_is_mostly_right(llm: LLM) -> None:
    method = llm.compose("draft-model", num_draft_tokens=4)  # a fixed length: drafting need not pay on this machine
    stats = llm.generate("Once upon a time", SamplingParams(max_tokens=100), method=method)[0].stats
    assert stats.tokens_per_pass > 2.0 and stats.acceptance > 0.5


def test_same_seed_same_text_over_methods(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.8, top_p=0.95, seed=7)
    expected = llm.generate("One day, a bear", params, method=llm.compose("plain"))[0]
    methods = [llm.compose("draft-model", num_draft_tokens=k) for k in (1, 3, 7)] + [llm.compose("prompt-lookup")]
    for method in methods:
        assert llm.generate("One day, a bear", params, method=method)[0].token_ids == expected.token_ids


def test_chat_uses_the_template_and_stops(llm: LLM) -> None:
    message = {"role": "user", "content": "Tell me a short story about a dog."}
    output = llm.chat([message], SamplingParams(max_tokens=400))[0]
    assert output.finish_reason == "stop" and len(output.text) > 50
    assert "<|" not in output.text
    assert len(llm.chat([[message], [message]], SamplingParams(max_tokens=5))) == 2
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"role": "wizard", "content": "x"}])


def test_a_trace_tells_every_round(llm: LLM) -> None:
    output = llm.generate("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True), trace=True)[0]
    assert [token for seen in output.trace for token in seen.emitted] == output.token_ids
    for seen in output.trace:
        assert seen.parents[0] == -1 and len(seen.path) <= len(seen.tokens) - 1
        assert [seen.tokens[node] for node in seen.path][: len(seen.emitted)] == seen.emitted[: len(seen.path)]
        assert seen.origins[: len(seen.path)] == [Origin.ACCEPTED] * len(seen.origins[: len(seen.path)])
        assert seen.to_json()["request"] == 0


def test_batched_prompts_with_one_parameter_each_must_match(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match="no prompts"):
        llm.generate([])
