"""Grammars: constrained text matches, whatever the method; masks are those of an oracle that tries every token."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import in_turn
from tokenizers import Tokenizer, decoders, models, normalizers

from outrider import LLM, SamplingParams
from outrider.codecs.grammar import GrammarCompiler, GrammarState, TokenGrammar
from outrider.codecs.text import TextCodec
from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.plan import Plan
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.engine.forced import Forced

pytest.importorskip("llguidance", reason="grammars need llguidance: pip install 'outrider[grammar]'")
sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]
from forced_text import Unforced  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "shy"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"The (fox|cat|dog) has [1-9][0-9]? (apples|nuts)\."
EBNF = """
start: sentence (" " sentence)? "!"
sentence: NAME " " verb " " NAME
verb: "likes" | "sees"
NAME: /[A-Z][a-z]{2,5}/
"""
EBNF_SHAPE = re.compile(r"[A-Z][a-z]{2,5} (likes|sees) [A-Z][a-z]{2,5}( [A-Z][a-z]{2,5} (likes|sees) [A-Z][a-z]{2,5})?!")
GREEDY, SEEDED = {"max_tokens": 60}, {"max_tokens": 60, "temperature": 0.9, "seed": 5}
METHODS = [("draft-model", 1), ("draft-model", 3), ("draft-model", 7), ("prompt-lookup", 4)]
PROMPT = "Once upon a time there was a fox. The fox has 3 apples. Her card: "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def compiler(llm: LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.codec)


@pytest.fixture(scope="module")
def grammars(compiler: GrammarCompiler) -> dict[str, TokenGrammar]:
    return {"json": compiler.json_schema(SCHEMA), "regex": compiler.regex(REGEX), "ebnf": compiler.ebnf(EBNF)}


def is_valid(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "ebnf":
        return EBNF_SHAPE.fullmatch(text) is not None
    value = json.loads(text)
    return (
        set(value) == {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 10
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 99
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"red", "shy"}
    )


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "way"), in_turn(("json", "regex", "ebnf"), ("greedy", "seeded")))
def test_text_matches_and_no_method_changes_it(llm: LLM, grammars, kind: str, way: str) -> None:
    params = SamplingParams(grammar=grammars[kind], **{"greedy": GREEDY, "seeded": SEEDED}[way])
    plain = llm.generate(PROMPT, params, method=llm.compose("plain"))[0]
    assert plain.finish_reason == "stop" and is_valid(kind, plain.text), plain.text
    for method, length in METHODS:
        fast = llm.generate(PROMPT, params, method=llm.compose(method, num_draft_tokens=length))[0]
        assert fast.token_ids == plain.token_ids, f"{method} {length}"
        assert fast.text == plain.text


def test_speculation_still_saves_passes(llm: LLM, grammars) -> None:
    params = SamplingParams(grammar=grammars["json"], **GREEDY)
    fast = llm.generate(PROMPT, params, method=llm.compose("draft-model", num_draft_tokens=5))[0]
    assert fast.stats.num_passes < fast.stats.num_tokens


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_may_mix_grammars_and_none(llm: LLM, grammars, options: dict[str, Any]) -> None:
    options = {**options, "max_tokens": 40}
    each = [SamplingParams(grammar=grammar, **options) for grammar in (*grammars.values(), None, grammars["json"])]
    prompts = [PROMPT, "Say: ", "A story: ", "Once upon a time", "Another card: "]
    alone = [llm.generate(p, s, method=llm.compose("plain"))[0].token_ids for p, s in zip(prompts, each, strict=True)]
    for method in ("plain", "draft-model"):
        together = llm.generate(prompts, each, method=llm.compose(method))
        assert [output.token_ids for output in together] == alone


def test_one_grammar_serves_many_requests(llm: LLM, grammars) -> None:
    texts = [llm.generate(PROMPT, SamplingParams(grammar=grammars["json"], **SEEDED))[0].text for _ in range(2)]
    assert texts[0] == texts[1]


# --- masks ------------------------------------------------------------------------------------------------------------

ORACLE_REGEX = r"(ca[rt]s?|dog) (is|was) [0-3]{1,2}é?"
ORACLE_TEXTS = [
    f"{noun} {verb} {number}{accent}".encode()
    for noun in ("car", "cars", "cat", "cats", "dog")
    for verb in ("is", "was")
    for number in map("".join, [*itertools.product("0123"), *itertools.product("0123", repeat=2)])
    for accent in ("", "é")
]
PREFIXES = {text[:size] for text in ORACLE_TEXTS for size in range(len(text) + 1)}


def byte_level(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of every ordinary token of a byte-level vocabulary: each letter stands for a byte, as GPT-2 has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return {
        token: bytes(byte_of[letter] for letter in text)
        for text, token in tokenizer.get_vocab().items()
        if token not in special and all(letter in byte_of for letter in text)
    }


def sentence_piece(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The same where a low line is a space and ``<0x41>`` a byte."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    found: dict[int, bytes] = {}
    for text, token in tokenizer.get_vocab().items():
        if token in special:
            continue
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
        found[token] = bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
    return found


def check_masks(grammar: TokenGrammar, codec: TextCodec, token_bytes: dict[int, bytes]) -> int:
    """Walk every state that can be reached and try every token at each; returns how many were visited."""
    vocab_size = codec.vocab_size + 7  # models pad their vocabulary
    said = b"\n".join(ORACLE_TEXTS)
    fitting = {token: piece for token, piece in token_bytes.items() if piece and piece in said}
    others = [token for token in token_bytes if token not in fitting][:50]
    frontier: list[tuple[GrammarState, bytes]] = [(grammar.initial(), b"")]
    visited: set[bytes] = set()
    while frontier:
        state, text = frontier.pop()
        if text in visited:
            continue
        visited.add(text)
        allowed = set(grammar.allowed(state, vocab_size).nonzero()[:, 0].tolist())
        expected = {token for token, piece in fitting.items() if text + piece in PREFIXES}
        expected |= codec.eos_ids if text in ORACLE_TEXTS else set()
        assert allowed == expected, f"after {text!r}: {allowed ^ expected}"
        for token in expected - codec.eos_ids:
            below = grammar.advance(state, token)
            assert below is not None
            frontier.append((below, text + token_bytes[token]))
        for token in list({*fitting, *others} - expected)[:50]:
            assert grammar.advance(state, token) is None
    return len(visited)


def test_masks_are_those_of_an_oracle(llm: LLM, compiler: GrammarCompiler) -> None:
    assert check_masks(compiler.regex(ORACLE_REGEX), llm.codec, byte_level(llm.codec.tokenizer)) > 100


def small_sentence_piece() -> TextCodec:
    """A vocabulary as Llama 2 has it: byte tokens, low lines for spaces, pieces with and without one in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁catsrdogisw0123é"]
    merges = [
        "c a",
        "ca t",
        "ca r",
        "cat s",
        "▁ i",
        "▁i s",
        "▁ w",
        "▁w a",
        "▁wa s",
        "d o",
        "do g",
        "▁ 1",
        "▁1 2",
        "1 2",
        "▁ cat",
    ]
    pieces += [merge.replace(" ", "") for merge in merges]
    vocab = {piece: token for token, piece in enumerate(dict.fromkeys(pieces))}
    pairs = [(merge.split()[0], merge.split()[1]) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextCodec(tokenizer, settings={"bos_token": "<s>", "eos_token": "</s>"})


def test_masks_with_a_sentence_piece_vocabulary() -> None:
    codec = small_sentence_piece()
    assert check_masks(GrammarCompiler(codec).regex(ORACLE_REGEX), codec, sentence_piece(codec.tokenizer)) > 100


def test_masks_with_a_real_sentence_piece_vocabulary(stories15m: Path) -> None:
    codec = TextCodec.from_folder(stories15m)
    token_bytes = sentence_piece(codec.tokenizer)
    assert check_masks(GrammarCompiler(codec).regex(ORACLE_REGEX), codec, token_bytes) > 100


# --- states -----------------------------------------------------------------------------------------------------------


def test_states_are_values(llm: LLM, compiler: GrammarCompiler) -> None:
    """Asking about one branch changes nothing on another, or above."""
    grammar = compiler.regex("(aa|ab)c")
    token = {text: llm.codec.tokenizer.token_to_id(text) for text in "abc"}
    start = grammar.initial()
    before = grammar.allowed(start, llm.target.vocab_size).clone()
    a = grammar.advance(start, token["a"])
    assert a is not None and grammar.advance(start, token["b"]) is None
    left, right = grammar.advance(a, token["a"]), grammar.advance(a, token["b"])
    assert left is not None and right is not None and left is not right
    assert grammar.advance(a, token["a"]) is left  # remembered
    assert grammar.advance(left, token["c"]) is not None and grammar.advance(left, token["a"]) is None
    assert torch.equal(grammar.allowed(start, llm.target.vocab_size), before)


def test_every_node_of_a_tree_has_its_own_mask(llm: LLM, compiler: GrammarCompiler) -> None:
    grammar, vocab_size = compiler.regex("(aa|ab)c"), llm.target.vocab_size
    token = {text: llm.codec.tokenizer.token_to_id(text) for text in "abc"}
    state = RequestState.of(Request([7], SamplingParams(temperature=1.0, grammar=grammar), llm.codec.eos_ids))
    tree = TokenTree.of_rows([([7, *(token[letter] for letter in "abacab")], [-1, 0, 0, 1, 1, 3, 5])])
    noise = Noise(torch.tensor([0]), torch.tensor([0]))
    law = Sampler([state], vocab_size, torch.device("cpu")).law(torch.zeros(1, 7, vocab_size), tree, noise)
    said = [set(law.probs[0, node].nonzero()[:, 0].tolist()) for node in range(7)]
    assert token["a"] in said[0] and token["b"] not in said[0]
    assert token["c"] in said[3] and token["a"] not in said[3]  # after aa
    assert {token["a"], token["b"]} <= said[1]


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(llm: LLM, compiler: GrammarCompiler) -> None:
    grammar, end = compiler.regex("a{1,2}"), sorted(llm.codec.eos_ids)
    token = llm.codec.tokenizer.token_to_id("a")
    state = grammar.initial()
    assert not grammar.allowed(state, 4096)[end].any() and grammar.advance(state, end[0]) is None
    one = grammar.advance(state, token)
    assert one is not None and grammar.allowed(one, 4096)[end].all() and grammar.allowed(one, 4096)[token]
    two = grammar.advance(one, token)
    assert two is not None and grammar.allowed(two, 4096).nonzero()[:, 0].tolist() == end
    over = grammar.advance(two, end[-1])  # ignore_eos goes on: only the end may follow the end
    assert over is not None and grammar.allowed(over, 4096).nonzero()[:, 0].tolist() == end
    assert grammar.advance(over, token) is None and grammar.advance(over, end[0]) is not None


def test_forced_text_is_known_as_tokens_that_follow_each_other(llm: LLM, compiler: GrammarCompiler) -> None:
    grammar, encode = compiler.regex("(Tom|Mia) went to the park\\."), llm.codec.encode
    state: Any = grammar.initial()
    assert grammar.forced(state) == (), "there is a choice"
    for token in encode("Tom"):
        state = grammar.advance(state, token)
    forced = grammar.forced(state)
    assert llm.codec.decode([*encode("Tom"), *forced]).endswith("Tom went to the park.")
    for token in forced:
        state = grammar.advance(state, token)
    assert grammar.forced(state) == () and grammar.may_end(state)


def test_states_die_with_their_request(compiler: GrammarCompiler, llm: LLM) -> None:
    grammar, token = compiler.regex("a*"), llm.codec.tokenizer.token_to_id("a")
    state: Any = grammar.initial()
    first = state
    for _ in range(50):
        state = grammar.advance(state, token)
    assert sys.getrefcount(first) <= 3  # nothing below or in the grammar holds on to it


# --- errors -----------------------------------------------------------------------------------------------------------


def test_gbnf_is_read_too(compiler: GrammarCompiler, llm: LLM) -> None:
    grammar = compiler.ebnf('root ::= "x" [0-9]+ ("y" | "z")')
    text = llm.generate("Say: ", SamplingParams(grammar=grammar, max_tokens=40, temperature=1.0, seed=1))[0].text
    assert re.match(r"x[0-9]+", text)


def test_whitespace_may_be_allowed(compiler: GrammarCompiler, llm: LLM) -> None:
    strict, free = compiler.json_schema(SCHEMA), compiler.json_schema(json.dumps(SCHEMA), whitespace=True)
    newline = llm.codec.encode("{\n", add_special_tokens=False)
    states: list[Any] = [strict.initial(), free.initial()]
    for token in newline:
        states = [g.advance(s, token) if s is not None else None for g, s in zip((strict, free), states, strict=True)]
    assert states[0] is None and states[1] is not None


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [
        ("regex", "[a-", "regular expression is not valid"),
        ("regex", "(?=a)b", "regular expression is not valid"),
        ("ebnf", "root ::= (", "grammar cannot be read"),
        ("ebnf", "start: /a", "grammar is not valid"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", {"type": "objec"}, "JSON schema is not valid"),
    ],
)
def test_bad_grammars_are_refused(compiler: GrammarCompiler, kind: str, source: Any, word: str) -> None:
    compile_it = {"regex": compiler.regex, "ebnf": compiler.ebnf, "json_schema": compiler.json_schema}[kind]
    with pytest.raises(OptionError, match=word):
        compile_it(source)


def test_without_the_library_the_error_says_what_to_install(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"outrider\[grammar\]"):
        GrammarCompiler(llm.codec)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    codec = small_sentence_piece()
    codec.eos_ids = frozenset()
    with pytest.raises(OptionError, match="end-of-sequence"):
        GrammarCompiler(codec)


FORCED = [
    ("plain", {}),
    ("draft-model", {"num_draft_tokens": 3}),
    ("draft-model", {"num_draft_tokens": 3, "acceptance": "rejection"}),
    ("draft-model", {"policy": "adaptive"}),
    ("best-first", {"num_draft_tokens": 3}),
    ("token-recycling", {"num_draft_tokens": 3}),
    ("early-exit", {"num_draft_tokens": 2}),
    ("hybrid", {}),
]


@pytest.mark.parametrize(("case", "sampled"), in_turn(FORCED, (GREEDY, SEEDED)))
def test_forced_text_is_a_draft(
    llm: LLM, grammars: dict[str, TokenGrammar], case: tuple[str, dict[str, Any]], sampled: dict[str, Any]
) -> None:
    """For every method, also one that guesses nothing: the same text in fewer passes, and drafters go on as if nothing was."""
    name, options = case
    method, texts, passes = llm.compose(name, **options), list[list[int]](), list[int]()
    for grammar in (Unforced(grammars["json"]), grammars["json"]):
        params = [SamplingParams(**sampled, grammar=grammar), SamplingParams(**{**sampled, "max_tokens": 20})]
        outputs = llm.generate([PROMPT, PROMPT], params, method=method)
        texts.append(outputs[0].token_ids + outputs[1].token_ids)
        passes.append(outputs[0].stats.num_passes)
    assert options.get("acceptance") == "rejection" or texts[0] == texts[1]
    assert passes[1] < passes[0] or name != "plain"


def test_forced_text_keeps_to_the_limits_of_a_request(llm: LLM, grammars: dict[str, TokenGrammar]) -> None:
    request = llm.requests([PROMPT], [SamplingParams(max_tokens=30, grammar=grammars["json"])])[0]
    state = RequestState.of(request)
    full = Forced.of([state], [16], Draws.DETERMINISTIC)
    assert full and len(full.runs[0]) > 3 and full.plan is not None
    assert Forced.of([state], [2], Draws.DETERMINISTIC).runs == [full.runs[0][:2]]
    assert not Forced.of([state], [0], Draws.DETERMINISTIC) and not Forced.of([state], [16], Draws.BEAM)
    beside = Forced([*full.runs, ()], [True, False])
    assert beside.plan is None and beside.without(Plan((3, 3), (6, 6))).max_nodes == (0, 6)


def test_forced_text_that_seldom_holds_leaves_the_row_to_the_drafter(llm: LLM, grammars: dict[str, TokenGrammar]) -> None:
    request = llm.requests([PROMPT], [SamplingParams(max_tokens=30, grammar=grammars["json"])])[0]
    state, root = RequestState.of(request), ([7], [-1])
    state.forced = (5, 2)
    unsure = Forced.of([state], [16], Draws.DETERMINISTIC)
    assert unsure and unsure.plan is None and unsure.without(Plan((3,), (6,))).max_nodes == (6,)
    nothing, guess = (Draft(TokenTree.of_rows([row]), Draws.DETERMINISTIC) for row in (root, ([7, 8], [-1, 0])))
    assert unsure.beside(nothing).runs == unsure.runs and not unsure.beside(guess)
    state.forced = (20, 2)
    assert not Forced.of([state], [16], Draws.DETERMINISTIC)
