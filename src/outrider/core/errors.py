"""Every error a user can cause, as one small tree of ``ValueError``s.

    OutriderError
    ├── OptionError        an option, name or value that does not exist or cannot be
    │   └── RequestError   the same, in one request: prompt, sampling parameters
    │       └── GrammarError   a grammar that no text of the model can follow any further
    ├── ModelError         a checkpoint that is missing, damaged or not what it should be
    ├── CompositionError   a drafter, rule and policy that may not be combined
    └── DraftError         a drafter proposed what no model can score: a defect of the drafter

A message is one line: what is wrong, why, and what to do. ``assert`` is for our own invariants, never for input.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(ValueError):
    """Base of every error caused by input rather than by a defect of ours."""


class OptionError(OutriderError):
    """An option, name or value is not valid."""


class RequestError(OptionError):
    """A request cannot be served as it is written."""


class GrammarError(RequestError):
    """A grammar reached a state that allows no token."""


class ModelError(OutriderError):
    """A checkpoint or tokenizer cannot be used."""


class CompositionError(OutriderError):
    """The parts of a method cannot be combined: together they are not exact, or not possible."""


class DraftError(OutriderError):
    """A drafter proposed a tree that cannot be scored."""


class RankError(RuntimeError):
    """A process of a model that is divided among several processes has died. No input caused it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The hint that ends an unknown-name error: the closest valid name, then all of them."""
    names = sorted(valid)
    return f"{closest(name, names)}valid: {', '.join(names)}"


def check_one_of(option: str, value: str, valid: Iterable[str]) -> None:
    """Refuse an option whose value is none of the valid names."""
    if value not in valid:
        raise OptionError(f"{option} = {value!r} is not valid; {nearest(str(value), valid)}")


_LONGEST_NAME = 256


def closest(name: str, valid: Iterable[str]) -> str:
    """``did you mean 'x'? ``, or nothing where no valid name is near. A name far longer than any is near to none: comparing
    it would take minutes."""
    if len(name) > _LONGEST_NAME:
        return ""
    bare = {one.lstrip("-"): one for one in valid}  # the dashes of options are no likeness
    found = difflib.get_close_matches(name.lstrip("-"), list(bare), n=1, cutoff=0.6)
    return f"did you mean {bare[found[0]]!r}? " if found else ""
