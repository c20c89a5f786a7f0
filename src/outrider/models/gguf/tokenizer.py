"""The tokenizer a GGUF file describes, and its chat template.

Two kinds exist: byte-level merges (``gpt2``), where ``tokenizer.ggml.pre`` names how text is cut before merging, and
SentencePiece (``llama``), whose merges are implied by the tokens' scores. Both become a ``tokenizers.Tokenizer``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.core.errors import ModelError, nearest
from outrider.models.gguf.reader import GGUFFile, Value

TOKENS = "tokenizer.ggml.tokens"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
"""SentencePiece's visible space."""

SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Tokens that end an answer, whether or not the file names them: many name only the end of the text."""

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDINGS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_word(digits: str) -> str:
    """Contractions, words with one leading mark, runs of digits, punctuation with the newlines after it, space."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + ENDINGS


def _by_case(digits: str, suffix: str) -> str:
    """Word pattern that also splits where small letters turn to capitals."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{CAPITALS}*{SMALL}+{suffix}|{lead}{CAPITALS}+{SMALL}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + ENDINGS


@dataclass(frozen=True)
class Splitting:
    """How text is cut before byte-level merges: one value of ``tokenizer.ggml.pre``."""

    pattern: str | None = None
    """None means GPT-2's own pattern, which the library has built in."""
    digits_apart: bool = False
    whole_words_first: bool = False
    """A piece that is itself a token becomes that token, without merges."""
    adds_bos: bool = False
    composed: bool = False
    """Unicode normal form C first."""


GPT2, DIGITS = Splitting(), Splitting(digits_apart=True)
LLAMA3 = Splitting(_by_word(r"\p{N}{1,3}"), whole_words_first=True, adds_bos=True)
SPLITTINGS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting(_by_word(r"\p{N}{1,3}"))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Splitting(_by_word(r"\p{N}"), composed=True)),
    "stablelm2": Splitting(_by_word(r"\p{N}")),
    "tekken": Splitting(_by_case(r"\p{N}", ""), whole_words_first=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Splitting(_by_case(r"\p{N}{1,3}", f"{CONTRACTIONS}?"))),
}


def chat_template(file: GGUFFile) -> str | None:
    """The Jinja template that turns messages into a prompt, if the file has one."""
    template = file.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """The texts chat templates refer to: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``, where given."""
    ids = _special_ids(file)
    tokens = file.metadata.some_strings(TOKENS, ids.values())
    return {name: tokens[id] for name, id in ids.items()}


def _special_ids(file: GGUFFile) -> dict[str, int]:
    num_tokens = file.num_items(TOKENS)
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_KEYS.items()}
    return {name: id for name, id in ids.items() if isinstance(id, int) and 0 <= id < num_tokens}


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer the file describes. ``encode`` adds a beginning-of-text token where the model expects one.

    Control and user-defined tokens are recognised in text. Prompts made with the chat template already hold their
    beginning-of-text token: encode them with ``add_special_tokens=False``.
    """
    builders = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}
    kind = file.text("tokenizer.ggml.model")
    if kind not in builders:
        raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported; {nearest(kind, builders)}")
    tokenizer, adds_bos = builders[kind](file)
    _recognise_special_tokens(tokenizer, file)
    _add_ends(tokenizer, file, adds_bos=adds_bos)
    return tokenizer


def _bpe(file: GGUFFile, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: id for id, token in enumerate(file.strings(TOKENS))}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens for one
        raise ModelError(f"{file.path}: the vocabulary cannot be used: {error}; convert the model again") from error


def _token_types(file: GGUFFile) -> Sequence[Value]:
    """One type per token. Old files have none: then the tokens they name as special are control tokens."""
    num_tokens, special = file.num_items(TOKENS), _special_ids(file).values()
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list):
        return [CONTROL if id in special else NORMAL for id in range(num_tokens)]
    if len(types) != num_tokens:
        raise ModelError(f"{file.path}: {num_tokens} tokens but {len(types)} token types; convert the model again")
    return types


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """The ``*_token_id`` keys of config.json; ``eos_token_id`` lists every token that ends an answer."""
    ids: dict[str, Any] = {f"{name}_id": None for name in SPECIAL_KEYS}  # else readers take a model's usual ones
    if TOKENS not in file.metadata:
        return ids
    ids |= {f"{name}_id": id for name, id in _special_ids(file).items()}
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    marked = np.flatnonzero(np.isin(np.array(_token_types(file)), (CONTROL, USER_DEFINED))).tolist()
    known = [id for id, token in file.metadata.some_strings(TOKENS, marked).items() if token in TURN_ENDS]
    ends = list(dict.fromkeys(id for id in named + known if isinstance(id, int)))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _byte_level_tokenizer(file: GGUFFile) -> tuple[Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        warnings.warn(f"{file.path}: unknown pre-tokenizer {name!r}: text is split as for GPT-2", stacklevel=3)
        splitting = GPT2
    parts = [merge.partition(" ") for merge in file.strings("tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in parts]
    tokenizer = _bpe(file, merges, ignore_merges=splitting.whole_words_first)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, splitting.adds_bos


def _sentencepiece_tokenizer(file: GGUFFile) -> tuple[Tokenizer, bool]:
    tokens, types = file.strings(TOKENS), _token_types(file)
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{file.path}: there is not one score per token; convert the model again")
    scored = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    unknown = special_tokens(file).get("unk_token")
    merges = _merges_from_scores(scored)
    tokenizer = _bpe(file, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types)
    to_space: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    from_space: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        from_space.insert(0, normalizers.Prepend(SPACE))
        to_space.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(from_space)
    tokenizer.decoder = decoders.Sequence(to_space)
    return tokenizer, True


def _merges_from_scores(scored: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece model, which joins the neighbours whose union has the best score: all ways to split each
    token in two, the best token first.

    Several splits of one token are ordered by the ids of their parts, as in tokenizers that Hugging Face converts.
    """
    age = {token: index for index, token in enumerate(scored)}
    merges: list[tuple[str, str]] = []
    for token in sorted(scored, key=lambda token: -scored[token]):
        cuts = [(token[:index], token[index:]) for index in range(1, len(token))]
        possible = [cut for cut in cuts if cut[0] in age and cut[1] in age]
        merges += sorted(possible, key=lambda cut: (age[cut[0]], age[cut[1]]))
    return merges


def _recognise_special_tokens(tokenizer: Tokenizer, file: GGUFFile) -> None:
    # Phi-3's own tokens swallow the white space after them; the file does not say so.
    swallowing = [file.metadata.get(key) for key in ("general.architecture", "tokenizer.ggml.model")] == [
        "phi3",
        "llama",
    ]
    added: list[AddedToken] = []
    for token, kind in zip(file.strings(TOKENS), _token_types(file), strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token:
            rstrip = swallowing and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=rstrip))
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, file: GGUFFile, *, adds_bos: bool) -> None:
    """Beginning- and end-of-text tokens around every encoded text, where the file or its kind asks for them."""
    special = special_tokens(file)
    bos, eos = special.get("bos_token"), special.get("eos_token")
    around = ["$A"]
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        around.insert(0, bos)
    if eos is not None and file.metadata.get("tokenizer.ggml.add_eos_token", False):
        around.append(eos)
    if len(around) > 1:
        ids = [(token, tokenizer.token_to_id(token)) for token in around if token != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
