"""Draw how every method guesses: ``python scripts/method_pictures.py`` writes ``docs/images/methods/*.svg``.

A picture shows what the drafter reads, what it is, and the tree of one round. A frame around levels is one step of the drafter.
Green guesses are an example of an accepted path. Each page describes its own picture, in a comment above it:

    <!-- picture: reads the text; from a small draft model; steps each level; levels 3 5 4 2 uneven -->

``steps`` is ``none``, ``each level`` or ``all levels``. ``levels`` has the guesses of every level; in an uneven tree likely
nodes have more children. ``second`` has the guesses of a second drafter.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from diagrams import IMAGES, Picture

PAGES = IMAGES.parent / "methods"
_LEFT, _STEP, _MIDDLE, _ROOM = 540, 62, 112, 150


class Steps(Enum):
    """How often the drafter runs in a round."""

    NONE = "none"
    LEVEL = "each level"
    ONCE = "all levels"


SAID = {
    Steps.NONE: "no model runs",
    Steps.LEVEL: "one step per level",
    Steps.ONCE: "one step for all levels",
}
"""The words below the tree."""


@dataclass(frozen=True)
class Guessing:
    """One method: what it reads, what guesses, how often that runs, and how many guesses each level has."""

    reads: str
    drafter: str
    steps: Steps
    levels: Sequence[int]
    uneven: bool = False
    """Whether likely nodes have more children."""
    others: Sequence[int] = ()
    """Guesses of a second drafter on each level, which stand last."""


COMMENT = re.compile(
    r"^<!-- picture: reads (.+?); from (.+?); steps (.+?); levels ([\d ]+|none)( ?uneven)?(?:; second ([\d ]+))? -->$", re.M
)


def guessing_of(page: str) -> Guessing:
    """What the comment of a page says of its method."""
    found = COMMENT.search(page)
    if found is None:
        raise SystemExit(
            "a page has no comment `<!-- picture: reads ...; from ...; steps ...; levels ... -->`; see docs/extending.md"
        )
    reads, drafter, steps, levels, uneven, others = found.groups("")
    own = tuple(map(int, levels.replace("none", "").split()))
    return Guessing(reads, drafter, Steps(steps), own, bool(uneven), tuple(map(int, others.split())))


def parents_of(levels: Sequence[int], *, uneven: bool) -> list[list[int]]:
    """For every level, the index of each node's parent on the level above. The root is a level of one node."""
    above, found = 1, list[list[int]]()
    for size in levels:
        found.append([int((place / size) ** (1.8 if uneven else 1) * above) for place in range(size)])
        above = size
    return found


def place(level: int, number: int, size: int) -> tuple[float, float]:
    """The centre of a node. Level 0 is the root."""
    gap = min(30, _ROOM / size)
    return _LEFT + level * _STEP, _MIDDLE + (number - (size - 1) / 2) * gap


def draw_tree(picture: Picture, method: Guessing) -> None:
    """The tree of one round; guesses of the second drafter are yellow."""
    sizes = [1, *(own + other for own, other in _both(method))]
    trees = [parents_of(method.levels, uneven=method.uneven), parents_of(method.others, uneven=False)]
    for number, tree in enumerate(trees):
        for level, parents in enumerate(tree, 1):
            first = method.levels[level - 1] if number and level <= len(method.levels) else 0
            before = method.levels[level - 2] if number and 1 < level <= len(method.levels) + 1 else 0
            for child, parent in enumerate(parents):
                start = place(level - 1, parent + (before if level > 1 else 0), sizes[level - 1])
                end = place(level, child + first, sizes[level])
                picture.arrow((start[0] + 9, start[1]), (end[0] - 9, end[1]), head=False)
                good = not number and child == 0 and level < max(3, len(method.levels))
                kind = "new" if number else "good" if good else "box"
                picture.box(end[0] - 9, end[1] - 9, 18, 18, kind=kind)
    picture.box(_LEFT - 9, _MIDDLE - 9, 18, 18, kind="root")


def _both(method: Guessing) -> list[tuple[int, int]]:
    """Guesses of both drafters, level by level."""
    count = max(len(method.levels), len(method.others))
    return [(sum(method.levels[i : i + 1]), sum(method.others[i : i + 1])) for i in range(count)]


def frame_steps(picture: Picture, method: Guessing) -> None:
    """A frame around the levels of each step."""
    depth = len(_both(method))
    width = _STEP if method.steps is Steps.LEVEL else depth * _STEP
    for step in range(0 if method.steps is Steps.NONE else depth * _STEP // width):
        picture.box(_LEFT + 20 + step * width + 3, 26, width - 6, 172)


def drawn(name: str, method: Guessing) -> Picture:
    """The picture of a method."""
    picture = Picture(920, 230, f"How {name} guesses")
    for x, above, words in ((20, "reads", method.reads), (270, "guesses come from", method.drafter)):
        picture.box(x, 82, 210, 60, kind="root" if x == 20 else "box")
        picture.text(x + 105, 72, above, kind="quiet", size=13)
        picture.text(x + 105, 117, words, size=13)
    picture.arrow((232, 112), (267, 112))
    picture.arrow((482, 112), (_LEFT - 14, 112))
    if method.levels:
        frame_steps(picture, method)
    draw_tree(picture, method)
    said = SAID[method.steps] if method.levels else "one target pass per token"
    picture.text(_LEFT - 9, 219, said, kind="quiet", size=13, anchor="start")
    return picture


def pictures() -> dict[str, Picture]:
    """The picture of every page about a method, by its name."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md")) if path.stem != "README"}
    return {name: drawn(name, guessing_of(page)) for name, page in pages.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    (IMAGES / "methods").mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (IMAGES / "methods" / f"{name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
