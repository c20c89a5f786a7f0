"""Settings to measure: the rows of the method table, each with a rule, a policy and options, or the reason why it cannot run.

The table is read, never repeated here, so new rows are measured automatically. If a row needs something that the caller has not
given (such as a datastore), it is made from prompts and from text that the target writes, where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.core.errors import OutriderError
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.methods import METHODS, RULES

BASELINE = "plain"


@dataclass(frozen=True)
class Setting:
    """One line of a bench: a method and its rule, policy and options."""

    method: str
    acceptance: str | None = None
    policy: str | None = None
    """None for the choice of ``generate``: ``adaptive``, or ``fixed`` if a length is given."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = [self.method, *filter(None, (self.acceptance, self.policy))]
        shown = {name: value for name, value in self.options.items() if len(str(value)) < 24 and "/" not in str(value)}
        parts += [f"K={value}" if name == "num_draft_tokens" else f"{name}={value}" for name, value in shown.items()]
        return " ".join(parts)

    @property
    def lossless(self) -> bool:
        return RULES[self.acceptance or METHODS[self.method].acceptance].rule.lossless

    @property
    def keeps_seed(self) -> bool:
        """Whether the text equals that of plain decoding with the same seed, and not only its law."""
        return RULES[self.acceptance or METHODS[self.method].acceptance].rule.keeps_seed

    def compose(self, llm: LLM) -> Method:
        return llm.compose(self.method, acceptance=self.acceptance, policy=self.policy, **self.options)

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "method": self.method,
            "acceptance": self.acceptance,
            "policy": self.policy,
            "options": dict(self.options),
        }


@dataclass(frozen=True)
class Skipped:
    """A setting that was not measured, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Grid:
    """Options to vary. Every method is run with every combination that it can be composed with."""

    methods: Sequence[str] = ()
    """Names in the method table; none means all of them."""
    lengths: Sequence[int] = ()
    """Values of num_draft_tokens; none keeps each method's default."""
    acceptances: Sequence[str] = ()
    policies: Sequence[str] = ()
    """None leaves the choice to ``generate`` (see ``Setting.policy``)."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of each method, by its name."""

    def settings(self) -> list[Setting]:
        """All settings, plain decoding first and once."""
        found = [Setting(BASELINE)]
        for name in self.methods or METHODS:
            METHODS[name]  # an unknown name is refused with the nearest one
            if name != BASELINE:
                found += self._of(name)
        return found

    def _of(self, name: str) -> Iterable[Setting]:
        for acceptance in self.acceptances or (None,):
            for policy in self.policies or (None,):
                for length in self.lengths or (None,):
                    chosen = {} if length is None else {"num_draft_tokens": length}
                    yield Setting(name, acceptance, policy, {**self.options.get(name, {}), **chosen})


def runnable(llm: LLM, settings: Iterable[Setting], provide: Callable[[str], Any]) -> tuple[list[Setting], list[Skipped]]:
    """Settings that can be composed on these models. ``provide`` makes missing options, or returns None."""
    kept: list[Setting] = []
    skipped: list[Skipped] = []
    for setting in settings:
        try:
            complete = _completed(setting, provide)
            complete.compose(llm)
        except OutriderError as error:
            skipped.append(Skipped(setting.label, str(error)))
        else:
            kept.append(complete)
    return kept, skipped


def _completed(setting: Setting, provide: Callable[[str], Any]) -> Setting:
    made = {need: provide(need) for need in METHODS[setting.method].needs if need not in setting.options}
    made = {need: value for need, value in made.items() if value is not None}
    return Setting(setting.method, setting.acceptance, setting.policy, {**setting.options, **made}) if made else setting


class Provider:
    """Makes data that rows need, once, in a folder of its own."""

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        self._llm, self._prompts, self._folder = llm, prompts, folder
        self._made: dict[str, Any] = {}

    def __call__(self, need: str) -> Any:
        if need not in self._made:
            self._made[need] = self._datastore() if need == "datastore" else None
        return self._made[need]

    def _datastore(self) -> str:
        """Text that the target writes at temperature 1 after the prompts' first words. It is of the same domain, but does not
        hold the answers."""
        starts = [list(prompt[: max(2, len(prompt) // 4)]) for prompt in self._prompts[:16]]
        params = [SamplingParams(max_tokens=96, temperature=1.0, seed=1000 + i) for i in range(len(starts))]
        written = self._llm.generate(starts, params, method=self._llm.compose(BASELINE))
        path = self._folder / "datastore"
        documents = [[*output.prompt_token_ids, *output.token_ids] for output in written]
        build_datastore(documents, path, vocab_size=self._llm.target.vocab_size)
        return str(path)
