"""Which models ``outrider serve`` serves: several by name, each with a draft of its own, and LoRA adapters of the first."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.api import LLM
from outrider.cli.options import load_llm
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError, nearest
from outrider.models.peft_adapter import merge_adapter
from outrider.models.source import Source, local_path

_NAMED = re.compile(r"([\w.\-]+)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class Named:
    """A model as given by a flag."""

    name: str | None
    """Its name in the API; None for the name of its folder."""
    path: str

    @staticmethod
    def of(given: str) -> Named:
        """``NAME=PATH``, or a path alone."""
        found = None if Path(given).exists() else _NAMED.fullmatch(given)
        return Named(None, given) if found is None else Named(found[1], found[2])


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model to serve."""

    llm: LLM
    name: str | None
    parent: str | None = None
    """The model of an adapter."""


def load_all(arguments: argparse.Namespace, kept: ExitStack) -> list[Loaded]:
    """Load every model, the first one first. ``kept`` holds folders of merged adapters and removes them when closed."""
    models = [Named.of(given) for given in arguments.model or ()]
    if arguments.name and len(models) > 1:
        raise OptionError("--name is for one model; name each of several by --model NAME=PATH")
    drafts = _drafts(arguments, models)
    loaded = [
        Loaded(_load(arguments, model.path, drafts[place]), model.name or arguments.name) for place, model in enumerate(models)
    ]
    loaded = loaded or [
        Loaded(_load(arguments, None, [Named.of(given).path for given in arguments.draft or ()]), arguments.name)
    ]
    return [*loaded, *(_adapted(arguments, Named.of(given), loaded[0], kept) for given in arguments.adapter)]


def _drafts(arguments: argparse.Namespace, models: Sequence[Named]) -> list[list[str]]:
    """The drafts of each model. ``--draft NAME=PATH`` belongs to the model of that name, one without a name to the first."""
    names = [model.name for model in models]
    drafts: list[list[str]] = [[] for _ in models]
    for given in arguments.draft or ():
        draft = Named.of(given)
        if models and draft.name is not None and draft.name not in names:
            known = [name for name in names if name]
            raise OptionError(f"--draft {given}: no model is called {draft.name!r}; {nearest(draft.name, known)}")
        if models:
            drafts[names.index(draft.name) if draft.name else 0].append(draft.path)
    return drafts


def _load(arguments: argparse.Namespace, model: str | None, drafts: Sequence[str]) -> LLM:
    own = copy.copy(arguments)
    own.model, own.draft = model, list(drafts) or None
    return load_llm(own, page_len=arguments.page_len)


def _adapted(arguments: argparse.Namespace, adapter: Named, base: Loaded, kept: ExitStack) -> Loaded:
    if adapter.name is None:
        raise OptionError(f"--adapter {adapter.path} has no name; write NAME=FOLDER")
    folder = kept.enter_context(TemporaryDirectory(prefix="outrider-adapter-"))
    with waiting(f"merging {adapter.path}"):
        merge_adapter(local_path(Source(base.llm.model_name)), Path(adapter.path), Path(folder))
    return Loaded(
        _load(arguments, folder, base.llm.draft_names), adapter.name, parent=base.name or Path(base.llm.model_name).name
    )
