"""Opens the models of ``LLM(...)``. Names and options are checked first, because loading takes long.

A target can be opened whole, divided among processes, or with a small model that shortens prompts. A draft model can be opened
in a process of its own. ``api.py`` puts the parts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from typing import Any

from outrider.bundled import bundled_path, has_bundled
from outrider.codecs.load import load_codec
from outrider.codecs.text import TextCodec
from outrider.core.choice import Choice
from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.core.key_storage import not_available, storage_named
from outrider.core.layered_target import LayeredTarget
from outrider.methods import METHODS, TABLES, rows_of
from outrider.models.heads import Head
from outrider.models.importance import ImportantTokens, PromptShare
from outrider.models.source import Source, local_path
from outrider.vision.load import can_see, load_vision
from outrider.vision.prompts import Vision


def name_of(model: Any) -> str:
    """A model's name as text; anything but a name or a path is refused."""
    if not isinstance(model, str | PathLike):
        raise OptionError(f"{model!r} is not the name of a model; give a folder, a hub name or a .gguf file")
    return fspath(model)


def needs_draft(method: str, options: Mapping[str, Any]) -> bool:
    """Whether a method, or a method that its options make it of, runs a draft model."""
    return any(row.needs_draft for row in rows_of(method, options).values())


def with_token_texts(codec: TextCodec, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method, with texts replaced by token ids."""
    found = dict(options)
    for option in {text for row in rows_of(method, options).values() for text in row.texts} & set(options):
        texts = [found[option]] if isinstance(found[option], str) else found[option]
        found[option] = [codec.encode(text, add_special_tokens=False) if isinstance(text, str) else text for text in texts]
    return found


def has_bundled_heads(model_name: str, method: str) -> bool:
    """Whether the package holds heads of this method for this model. Only the bundled target has any."""
    return model_name == bundled_path("target") and has_bundled(f"heads/{method}")


def with_heads(model_name: str, method: str, options: Mapping[str, Any], loaded: Mapping[str, Head]) -> dict[str, Any]:
    """The options of a method, completed for trained heads. If no folder is given, the heads are those already ``loaded`` of
    this kind, or the bundled ones."""
    found = dict(options)
    headed = next((part for part, row in rows_of(method, options).items() if "heads" in row.needs), None)
    if headed:
        found.setdefault("target_folder", model_name)
    if headed and headed in loaded:
        found.setdefault("heads", loaded[headed])
    if headed and has_bundled_heads(model_name, headed):
        found.setdefault("heads", bundled_path(f"heads/{headed}"))
    return found


def can_run(method: str, model_name: str, target: Target, drafts: Sequence[Target]) -> bool:
    """Whether a method can run on these models with its default options."""
    row = METHODS[method]
    missing = set(row.needs) - ({"heads"} if has_bundled_heads(model_name, method) else set())
    divided = drafts[:1] if row.needs_draft else [target]
    has_layers = not row.needs_layers or all(isinstance(model, LayeredTarget) for model in divided)
    return not missing and not row.any_tokenizer and has_layers and (bool(drafts) or not row.needs_draft)


def checked_batch_size(size: int | None) -> int | None:
    """The batch size, checked to be at least 1. None leaves it to the device."""
    if size is not None and size < 1:
        raise OptionError(f"max_batch_size = {size} is not valid; use at least 1")
    return size


def check_share(keep: float, drafts: Sequence[str]) -> None:
    """Refuse an invalid share of the prompt, and one that no small model can choose."""
    PromptShare(keep)
    if keep != 1 and not drafts:
        raise OptionError(f"keep_prompt = {keep} needs a small model that chooses among tokens; give draft=, or leave it out")


def check_choice(
    model_name: str,
    method: str,
    acceptance: str | None,
    drafts: Sequence[str],
    options: Mapping[str, Any],
    *,
    also: Iterable[str],
) -> None:
    """Find mistakes in names and options before anything is loaded. ``also`` are the caller's own option names: one of them is
    suggested for a misspelt one."""
    given = {name: value for name, value in options.items() if name != "policy"}
    row = METHODS[method]
    if "heads" in row.needs and has_bundled_heads(model_name, method):
        given.setdefault("heads", bundled_path(f"heads/{method}"))
    choice = Choice(method, acceptance, options.get("policy") or row.policy, given)
    own = [name for name in also if name != "options"]
    choice.check(TABLES, num_drafts=len(drafts), translates=bool(drafts), also=own)
    for name in drafts:
        local_path(name)


def check_vocabularies(codec: TextCodec, drafts: Sequence[TextCodec], method: str, model_name: str) -> None:
    """Refuse a draft model whose tokens mean something else, unless the method translates."""
    other = next((draft for draft in drafts if not codec.same_vocabulary(draft)), None)
    if other is not None and not METHODS[method].any_tokenizer:
        raise ModelError(
            f"the draft model has another vocabulary ({other.vocab_size} tokens) than {model_name!r} "
            f"({codec.vocab_size}), and method {method!r} needs the same one; use method 'tli' or 'reencode', which "
            "translate, or a draft of the same family, or method 'prompt-lookup'"
        )


def divided(size: int, load: partial[Target], source: Source, *, numerics: str, kv_cache: str, **options: Any) -> Target:
    """The target divided among ``size`` processes, opened as ``load`` would."""
    from outrider.models.parallel import load_parallel

    if (storage := storage_named(kv_cache)).is_rounded:
        raise not_available(storage, f"with tensor_parallel = {size} every rank keeps its keys in the model's own type")
    target = load_parallel(source, size, **load.keywords, numerics=numerics, **options)
    if numerics == "invariant" and not target.traits.is_invariant:
        target.team.close()
        needed = "the native pass of a CPU, or the kernels of a GPU"
        raise OptionError(f"numerics = {numerics!r} of a divided model needs {needed}; leave it or tensor_parallel out")
    return target


def open_target(
    load: partial[Target], source: Source, codec: TextCodec, tensor_parallel: int, **options: Any
) -> tuple[Target, Vision | None]:
    """The target, and for a vision-language model the part that reads images."""
    if tensor_parallel != 1:
        return divided(tensor_parallel, load, source, **options), None
    path = local_path(source)
    if not can_see(path):
        return load(source, **options), None
    vision = load_vision(path, codec, **load.keywords, **options)
    return vision.target, vision


def open_drafts(load: partial[Target], names: Sequence[str], *, dtype: str, apart: bool, at_once: int) -> list[Target]:
    """The draft models. ``apart`` opens each in its own process. With ``at_once`` above 1, so many processes run its layers."""
    if apart and at_once != 1:
        raise OptionError(f"draft_process and draft_parallel = {at_once} both say where the draft runs; leave one of them out")
    load = partial(load, dtype=dtype)
    if at_once == 1:
        return [_elsewhere(load, name) if apart else load(name) for name in names]
    from outrider.models.parallel import load_layers_apart

    return [load_layers_apart(name, at_once, **load.keywords) for name in names]


def _elsewhere(load: partial[Target], name: str) -> Target:
    """A model in a process of its own, opened as ``load`` would."""
    from outrider.models.remote import RemoteModel

    return RemoteModel(name, **load.keywords)


def with_sparse_prompts(target: Target, codec: TextCodec, keep: float, drafts: Sequence[str], load: partial[Target]) -> Target:
    """The target, reading only the part of every prompt that a small model keeps; the target itself if all is kept. The small
    model is the first draft, opened again as the plain decoder, because only that one's attention can be read."""
    if keep == 1:
        return target
    from outrider.models.sparse_prompts import SparsePrompts

    draft = drafts[0]
    if not codec.same_vocabulary(load_codec(draft)):
        what = f"keep_prompt = {keep} needs a draft model with the target's vocabulary, and {draft!r} has another"
        raise ModelError(f"{what}; give a draft of the same family, or leave keep_prompt out")
    reader = load(draft, fast=False, dtype="auto")
    return SparsePrompts(target, ImportantTokens.of(reader, PromptShare(keep)))
