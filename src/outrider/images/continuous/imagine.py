"""Images of continuous tokens, by the name of a rule: the interface for ``outrider imagine`` and for programs.

images = ContinuousImages.load("build/images/continuous")
way = way_of("joint-path")
(picture,) = images.imagine([3], way, seed=0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isqrt
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import CompositionError, ModelError, OptionError, RequestError, closest, nearest
from outrider.core.method_rows import fill
from outrider.images.continuous.decode import ContinuousSettings, PathWriter
from outrider.images.continuous.model import KIND, DiffusionModel, Network
from outrider.images.continuous.paths import Schedule
from outrider.images.continuous.rules import PATH_RULES, PathRule
from outrider.images.model import Picture
from outrider.models.load import read_config

NUM_STEPS = 25
"""Steps of the schedule, unless a number is given."""
_KINDS = {"int": ("a whole number", (int,)), "float": ("a number", (int, float)), "bool": ("true or false", (bool,))}
"""For each type of option: its name, and the values it takes."""


@final
@dataclass(frozen=True)
class PathWay:
    """How images are written: rule, drafting and schedule."""

    rule: PathRule | None
    """None for plain decoding."""
    settings: ContinuousSettings
    schedule: Schedule

    @property
    def lossless(self) -> bool:
        return self.rule is None or self.rule.lossless


def way_of(name: str, options: Mapping[str, Any] | None = None) -> PathWay:
    """A rule by name, or ``plain``, with options of the rule, of drafting (``window``, ``prefill``) and of the schedule."""
    if name != "plain" and name not in PATH_RULES:
        raise OptionError(f"unknown rule of continuous tokens {name!r}; {nearest(name, ['plain', *PATH_RULES])}")
    kinds = [ContinuousSettings, Schedule, *([] if name == "plain" else [PATH_RULES[name]])]
    given, valid = dict(options or {}), {one.name: str(one.type) for kind in kinds for one in fields(kind)}
    for option, value in given.items():
        if option not in valid:
            hint = f"{closest(option, valid)}valid: {', '.join(sorted(valid))}"
            raise OptionError(f"rule {name!r} has no option {option!r}; {hint}")
        noun, types = _KINDS[valid[option]]
        if type(value) not in types:
            raise OptionError(f"{option} = {value!r} is not valid; use {noun}")
    schedule = fill(Schedule, {"num_steps": NUM_STEPS, **given})
    rule = None if name == "plain" else fill(PATH_RULES[name], given)
    return PathWay(rule, fill(ContinuousSettings, given), schedule)


def is_continuous(folder: str | Path) -> bool:
    """Whether a folder holds a continuous image model, or a pair of them as the recipe leaves it."""
    path = _inside(Path(folder))
    return (path / "config.json").is_file() and (read_config(path).get("outrider") or {}).get("kind") == KIND


def _inside(folder: Path) -> Path:
    """The target's folder, if the given folder holds a pair; otherwise the given folder."""
    pair = not (folder / "config.json").is_file() and (folder / "target" / "config.json").is_file()
    return folder / "target" if pair else folder


@final
class ContinuousImages:
    """A continuous image model, with or without a draft. Networks are loaded once and serve any schedule."""

    def __init__(self, target: Network, draft: Network | None = None) -> None:
        self.target, self.draft = target, draft
        self.grid, self.patch = isqrt(target.shape.num_tokens), isqrt(target.shape.dim)
        if self.grid**2 != target.shape.num_tokens or self.patch**2 != target.shape.dim:
            sizes = f"{target.shape.num_tokens} tokens of {target.shape.dim} numbers"
            raise ModelError(f"{sizes} do not make a square image of square grey patches; train with a square number of both")

    @staticmethod
    def load(folder: str | Path, *, draft: str | Path | None = None) -> ContinuousImages:
        """The model in a folder, or the pair ``target`` and ``draft`` in it."""
        path = _inside(Path(folder))
        beside = Path(folder) / "draft"
        second = draft or (beside if path != Path(folder) and beside.is_dir() else None)
        networks = [DiffusionModel.load(one, Schedule(NUM_STEPS)).network for one in (path, second) if one is not None]
        return ContinuousImages(*networks)

    def writer(self, way: PathWay) -> PathWriter:
        """The writer for these settings."""
        if way.rule is None:
            return PathWriter(DiffusionModel(self.target, way.schedule))
        if self.draft is None:
            raise CompositionError(
                "a rule of continuous tokens needs a draft model; give draft=, a folder with target and draft, or use 'plain'"
            )
        target, draft = (DiffusionModel(one, way.schedule) for one in (self.target, self.draft))
        return PathWriter(target, draft, way.rule, way.settings)

    def imagine(self, labels: Sequence[int], way: PathWay, *, seed: int = 0) -> list[Picture[list[float]]]:
        """An image of each label, one after the other; the seeds are seed, seed + 1 and so on."""
        if seed < 0:
            raise RequestError(f"seed = {seed} is not valid; use 0 or more")
        writer, found = self.writer(way), list[Picture[list[float]]]()
        for number, label in enumerate(labels):
            written = writer.write(torch.tensor([label]), torch.Generator().manual_seed(seed + number))
            (row,), tokens = written.rows, written.tokens[0]
            found.append(Picture(self.pixels(tokens), tokens.tolist(), row.rounds, row.origins, row.stats))
        return found

    def pixels(self, tokens: Tensor) -> Tensor:
        """[..., side, side, 1] in 0 .. 1 of tokens [..., L, D], which are patches in -1 .. 1."""
        cells = tokens.unflatten(-1, (self.patch, self.patch)).unflatten(-3, (self.grid, self.grid))
        side = self.grid * self.patch
        return (cells.transpose(-3, -2).reshape(*tokens.shape[:-2], side, side, 1) / 2 + 0.5).clamp(0, 1)
