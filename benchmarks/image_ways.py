"""The ways to draw an image that the image benchmarks compare: a method, its rule and its options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.core.method import Method
from outrider.images.model import ImageModel
from outrider.models.load import read_config

NUM_GUESSES = 5
"""Guesses of a draft model or of heads."""
Rule = tuple[str, tuple[tuple[str, Any], ...]]
"""A rule and its options."""
LIKELY: Rule = ("lantern++", (("num_neighbours", 50), ("lantern_lambda", 2.0)))
"""A relaxed rule for them."""
GENEROUS: tuple[Rule, ...] = (
    ("lantern", (("num_neighbours", 10), ("lantern_delta", 0.05))),
    ("lantern", (("num_neighbours", 50), ("lantern_delta", 0.2))),
    ("gsd", (("group_size", 14),)),
)
"""More of them, for the trees of heads, which LANTERN was made for."""


@dataclass(frozen=True)
class Way:
    """A method with its rule, by name."""

    method: str
    acceptance: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    shuffled: bool = False
    """Neighbours are random codes instead of near ones."""
    heads: Path | None = None

    @property
    def label(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options)
        rule = " + ".join(filter(None, (self.method, self.acceptance)))
        return f"{rule} ({options}{', random neighbours' if self.shuffled else ''})" if options else rule

    def compose(self, model: ImageModel, window: int) -> Method:
        options = {**dict(self.options), **({} if self.method == "plain" else {"num_draft_tokens": window})}
        if self.heads is not None:
            options["heads"] = str(self.heads)
        if self.shuffled:
            book = model.codebook.embeddings(model.target.vocab_size)
            order = torch.randperm(model.codebook.num_codes, generator=torch.Generator().manual_seed(0))
            options["codebook"] = torch.cat([book[: len(order)][order], book[len(order) :]])
        return model.compose(self.method, acceptance=self.acceptance, options=options)


RELAXED = (
    Way("sjd", "lantern", (("num_neighbours", 10), ("lantern_delta", 0.05))),
    Way("sjd", "lantern", (("num_neighbours", 50), ("lantern_delta", 0.2))),
    Way("sjd", "lantern", (("num_neighbours", 50), ("lantern_delta", 0.2)), shuffled=True),
    Way("sjd", "lantern", (("num_neighbours", 100), ("lantern_delta", 0.4))),
    Way("sjd", "lantern", (("num_neighbours", 100), ("lantern_delta", 0.4)), shuffled=True),
    Way("sjd", "lantern++", (("num_neighbours", 50), ("lantern_lambda", 2.0))),
    Way("sjd", "lantern++", (("num_neighbours", 50), ("lantern_lambda", 5.0))),
    Way("sjd", "lantern++", (("num_neighbours", 50), ("lantern_lambda", 2.0)), shuffled=True),
    Way("sjd", "lantern++", (("num_neighbours", 50), ("lantern_lambda", 5.0)), shuffled=True),
    Way("sjd", "gsd", (("group_size", 14),)),
    Way("sjd", "gsd", (("group_size", 50),)),
    Way("sjd", "gsd-partition", (("num_groups", 128),)),
    Way("sjd", "gsd-partition", (("num_groups", 32),)),
    Way("sjd", "lenient", (("lenience", 0.5),)),
)
EXACT = (
    Way("sjd"),
    Way("sjd", None, (("fill", "uniform"),)),
    Way("sjd", None, (("fill", "point"),)),
    Way("sjd-coupled"),
    Way("jacobi"),
)


def kind_of(heads: Path) -> str:
    """The method of a folder of heads."""
    return str(read_config(heads)["outrider"]["kind"])


def ways_of(model: ImageModel, heads: Sequence[Path], windows: Sequence[int]) -> Iterator[tuple[Way, int]]:
    """Every way with its window."""
    yield from ((way, window) for window in windows for way in EXACT)
    yield from ((way, windows[-1]) for way in RELAXED)
    drafts = [] if model.draft is None else [Way("draft-model"), Way("draft-model", "rejection")]
    drafts += [Way("draft-model", *LIKELY)] if model.draft is not None else []
    for folder in heads:
        kind = kind_of(folder)
        drafts += [Way(kind, *rule, heads=folder) for rule in ((None, ()), ("recursive", ()), LIKELY, *GENEROUS)]
    yield from ((way, NUM_GUESSES) for way in drafts)
