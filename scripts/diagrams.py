"""Draw the diagrams of the documentation: ``python scripts/diagrams.py`` writes ``docs/images/*.svg``.

Every picture is computed from a small example, so the mask, the walk and the choices in it are right by construction. Each
file brings its own background and follows the reader's light or dark setting.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LIGHT = {"page": "#ffffff", "ink": "#1c2333", "quiet": "#5b6478", "line": "#c3c9d5", "box": "#f2f4f9"}
LIGHT |= {"good": "#b7e4c7", "bad": "#f8c4c0", "root": "#c9d8fb", "new": "#ffe3a3"}
DARK = {"page": "#171b26", "ink": "#eef1f8", "quiet": "#a9b2c6", "line": "#4a5369", "box": "#242a3a"}
DARK |= {"good": "#23694a", "bad": "#863733", "root": "#2f4a8c", "new": "#7a5a12"}


def style(colours: dict[str, str]) -> str:
    """CSS classes for one set of colours."""
    fills = "".join(f".{name}{{fill:{value}}}" for name, value in colours.items())
    return (
        f"{fills}.edge{{stroke:{colours['quiet']};fill:none}}.frame{{stroke:{colours['line']}}}"
        f"text{{fill:{colours['ink']}}}text.quiet{{fill:{colours['quiet']}}}"
    )


@dataclass
class Picture:
    """An SVG in the making. Coordinates are pixels from the top left corner."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, kind: str = "", size: int = 14, anchor: str = "middle") -> None:
        """One line of text whose baseline is at y."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, *, kind: str = "box") -> None:
        """A rectangle with a thin frame."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind} frame"/>')

    def label(self, x: float, y: float, width: float, words: str, *, kind: str = "box", height: float = 32) -> None:
        """A box with one line of text in its middle."""
        self.box(x, y, width, height, kind=kind)
        self.text(x + width / 2, y + height / 2 + 5, words, size=13 if len(words) > 9 else 14)

    def arrow(self, *points: tuple[float, float], head: bool = True) -> None:
        """A line through the points, with a head at the last one."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{way}" class="edge" stroke-width="1.6"/>')
        if head:
            (x0, y0), (x, y) = points[-2:]
            angle = math.atan2(y - y0, x - x0)
            sides = [(x - 9 * math.cos(angle + turn), y - 9 * math.sin(angle + turn)) for turn in (-0.42, 0.42)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *sides])
            self.parts.append(f'<polygon points="{corners}" class="quiet"/>')

    def svg(self) -> str:
        """The file's text."""
        styles = f"{style(LIGHT)}@media (prefers-color-scheme: dark){{{style(DARK)}}}"
        body = "\n".join(self.parts)
        page = f'<rect width="{self.width}" height="{self.height}" rx="8" class="page"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="system-ui, sans-serif" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{styles}</style>\n{page}\n{body}\n</svg>\n"
        )


def a_round() -> Picture:
    """The five verbs, what each hands on, and one example below them."""
    picture = Picture(920, 300, "One round: plan, propose, score, walk, commit")
    stages = [
        ("plan", "policy", "up to 3 guesses"),
        ("propose", "drafter", "a tree of guesses"),
        ("score", "target", "logits of every node"),
        ("walk", "acceptance rule", "path and next token"),
        ("commit", "caches", "the path is kept"),
    ]
    for i, (verb, part, result) in enumerate(stages):
        x = 20 + i * 176
        picture.box(x, 30, 150, 76, kind="root" if verb == "score" else "box")
        picture.text(x + 75, 54, verb, size=17)
        picture.text(x + 75, 74, part, kind="quiet")
        picture.text(x + 75, 96, result, size=13)
        if i:
            picture.arrow((x - 26, 68), (x - 3, 68))
    picture.arrow((799, 106), (799, 136), (95, 136), (95, 109))
    picture.text(447, 129, "the round's report teaches the policy and the drafter", kind="quiet", size=13)
    lines = [
        ("committed before", ["a", "little", "fox"], ["root"] * 3, 0),
        ("guessed", ["ran", "into", "a"], ["box"] * 3, 3),
        ("emitted by one pass", ["ran", "into", "the"], ["good", "good", "new"], 3),
    ]
    for i, (name, words, kinds, start) in enumerate(lines):
        y = 160 + i * 44
        picture.text(190, y + 21, name, anchor="end")
        for j, (word, kind) in enumerate(zip(words, kinds, strict=True)):
            picture.label(210 + (start + j) * 84, y, 76, word, kind=kind)
    picture.text(722, 269, "2 accepted and 1 of its own", kind="quiet", size=13, anchor="start")
    return picture


@dataclass(frozen=True)
class Example:
    """A tree with the target's own choice after each node."""

    tokens: Sequence[str] = ("fox", "ran", "sat", "into", "to", "down", "the")
    parents: Sequence[int] = (-1, 0, 0, 1, 1, 2, 3)
    choices: Sequence[str] = ("ran", "into", "on", "a", "him", "and", "den")
    places: Sequence[tuple[int, int]] = ((150, 50), (90, 125), (225, 125), (50, 200), (135, 200), (240, 200), (50, 275))

    def ancestors(self, node: int) -> list[int]:
        """The node and everything above it, the root first."""
        return [] if node < 0 else [*self.ancestors(self.parents[node]), node]

    def accepted(self) -> list[int]:
        """The path that follows the target's own choices, the root first."""
        path = [0]
        while True:
            below = [n for n, parent in enumerate(self.parents) if parent == path[-1]]
            match = [n for n in below if self.tokens[n] == self.choices[path[-1]]]
            if not match:
                return path
            path.append(match[0])

    def draw(self, picture: Picture, kind_of: Callable[[int], str]) -> None:
        """The tree, each node as a box with its token."""
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                (x0, y0), (x, y) = self.places[parent], self.places[node]
                picture.arrow((x0, y0 + 16), (x, y - 16), head=False)
        for node, (x, y) in enumerate(self.places):
            picture.label(x - 36, y - 16, 72, f"{node} {self.tokens[node]}", kind=kind_of(node))


def tree_and_mask() -> Picture:
    """A tree of seven nodes and which keys each of them sees."""
    picture, example, size = Picture(760, 330, "A token tree and its attention mask"), Example(), 30
    example.draw(picture, lambda node: "root" if node == 0 else "box")
    left, top = 470, 62
    picture.text(left - 55, 30, "keys of the text", kind="quiet", size=13)
    picture.text(left + 3.5 * size, 30, "keys of the nodes", kind="quiet", size=13)
    for node, token in enumerate(example.tokens):
        y, seen = top + node * size, example.ancestors(node)
        picture.text(left - 118, y + 20, f"{node} {token}", anchor="end")
        picture.text(left + (node + 0.5) * size, top - 8, str(node), kind="quiet", size=13)
        picture.box(left - 108, y, 100, size - 3, kind="good")
        for key in range(len(example.tokens)):
            picture.box(left + key * size, y, size - 3, size - 3, kind="good" if key in seen else "box")
    picture.text(
        left + 10, top + 7 * size + 28, "Green: visible. A node sees the text and its own path.", kind="quiet", size=13
    )
    return picture


def acceptance_walk() -> Picture:
    """The coupled rule on the same tree: follow the target's own choice while a child holds it."""
    picture, example = Picture(760, 330, "An acceptance walk"), Example()
    path = example.accepted()
    example.draw(picture, lambda node: "root" if node == 0 else "good" if node in path else "bad")
    picture.text(350, 40, "The walk", size=17, anchor="start")
    for i, node in enumerate(path):
        choice, y = example.choices[node], 72 + i * 42
        found = i + 1 < len(path)
        words = f"child {path[i + 1]} holds it: accepted" if found else "no child holds it: the walk ends"
        picture.text(350, y, f"After “{example.tokens[node]}” the target chooses “{choice}”;", anchor="start")
        picture.text(362, y + 17, words, kind="quiet", size=13, anchor="start")
    emitted = [*(example.tokens[n] for n in path[1:]), example.choices[path[-1]]]
    picture.text(350, 222, "Emitted in one pass", size=17, anchor="start")
    for i, word in enumerate(emitted):
        picture.label(350 + i * 92, 236, 84, word, kind="good" if i + 1 < len(emitted) else "new")
    picture.text(350, 290, "Green: accepted guesses. Yellow: the target's own token.", kind="quiet", size=13, anchor="start")
    picture.text(350, 308, "Red: guesses that are dropped.", kind="quiet", size=13, anchor="start")
    return picture


def coupled_noise() -> Picture:
    """Target and draft add the same Gumbel noise to different log-probabilities, and usually agree."""
    picture = Picture(760, 350, "Coupled noise")
    words = ["ran", "sat", "hid", "saw", "ate", "was"]
    target, draft = (0.38, 0.24, 0.15, 0.12, 0.07, 0.04), (0.45, 0.17, 0.18, 0.08, 0.08, 0.04)
    source = random.Random(11)
    noise = [-math.log(-math.log(source.random())) for _ in words]
    panels = [
        ("noise g of this output position", noise),
        ("target: log p + g", [math.log(p) + g for p, g in zip(target, noise, strict=True)]),
        ("draft: log q + g", [math.log(q) + g for q, g in zip(draft, noise, strict=True)]),
    ]
    for panel, (name, values) in enumerate(panels):
        x, best, low = 20 + panel * 250, max(values), min(values)
        picture.box(x, 20, 226, 250)
        picture.text(x + 113, 44, name)
        for i, (word, value) in enumerate(zip(words, values, strict=True)):
            height = 12 + 150 * (value - low) / (best - low)
            kind = "good" if panel and value == best else "line"
            picture.box(x + 18 + i * 33, 240 - height, 25, height, kind=kind)
            picture.text(x + 30 + i * 33, 260, word, size=12)
    chosen = {words[values.index(max(values))] for _, values in panels[1:]}
    agree = f"Both choose “{chosen.pop()}”: the guess is accepted." if len(chosen) == 1 else "The choices differ."
    picture.text(380, 302, agree, size=16)
    likeliest = words[target.index(max(target))]
    note = f"The likeliest token is “{likeliest}”. The noise decides, and it is the same on both sides."
    picture.text(380, 328, note, kind="quiet", size=13)
    return picture


def scheduler() -> Picture:
    """Seats over rounds: requests arrive, read their prompt, emit different numbers of tokens, and leave."""
    picture = Picture(820, 300, "The scheduler")
    seats = [
        [("A", "read"), ("A", 3), ("A", 1), ("A", 4), ("A", 2), ("A", 3), ("A", 2)],
        [("B", "read"), ("B", 2), ("B", 3), ("D", "read"), ("D", 5), ("D", 1), ("D", 4)],
        [None, ("C", "read"), ("C", "read"), ("C", 1), ("C", 2), ("C", 1), None],
    ]
    for column in range(7):
        picture.text(165 + column * 92, 40, f"round {column + 1}", kind="quiet", size=13)
    for row, cells in enumerate(seats):
        y = 56 + row * 50
        picture.text(100, y + 25, f"seat {row + 1}", anchor="end")
        for column, cell in enumerate(cells):
            x = 122 + column * 92
            if cell is None:
                picture.box(x, y, 86, 38, kind="page")
                continue
            name, what = cell
            words = f"{name}: prompt" if what == "read" else f"{name}: {what} token{'s' if what != 1 else ''}"
            picture.label(x, y, 86, words, kind="root" if what == "read" else "good", height=38)
    notes = [
        "Before each round: finished requests leave, waiting ones take free seats, prompts are read in pieces.",
        "All seats of one method share one target pass. Each row drafts and accepts its own number of tokens.",
        "B is finished after round 3, and D takes its seat. C has a long prompt, read in two pieces.",
    ]
    for i, note in enumerate(notes):
        picture.text(410, 232 + i * 22, note, kind="quiet", size=13)
    return picture


def policy_rates(survival: Sequence[float], draft: float, node: float) -> list[float]:
    """Expected tokens per unit of time with 0, 1, 2 ... guesses. A pass of one node takes 1."""
    counts = range(len(survival) + 1)
    return [(1 + sum(survival[:count])) / (1 + count * (draft + node)) for count in counts]


def policy() -> Picture:
    """Guesses ranked by survival, what one more brings and costs, and where the policy stops."""
    picture = Picture(820, 330, "How the policy chooses the number of guesses")
    picture.text(20, 32, "Expected tokens per second by the number of guesses; plain decoding is 1", size=16, anchor="start")
    for row, (words, chance) in enumerate((("predictable text: each guess holds with 0.8", 0.8), ("hard text: 0.15", 0.15))):
        rates = policy_rates([chance ** (depth + 1) for depth in range(8)], draft=0.12, node=0.05)
        best, floor = rates.index(max(rates)), 180 + row * 130
        picture.text(20, floor - 92, words, kind="quiet", anchor="start")
        for count, rate in enumerate(rates):
            x, height = 60 + count * 72, 36 * rate
            picture.box(x, floor - height, 52, height, kind="good" if count == best else "box")
            picture.text(x + 26, floor - max(height, 36) - 6, f"{rate:.2f}", size=12)
            picture.text(x + 26, floor + 16, f"{count}", kind="quiet", size=12)
        picture.arrow((50, floor - 36), (692, floor - 36), head=False)
        chosen = f"{best} guesses" if best else "none: pause"
        picture.text(702, floor - 32, chosen, size=13, anchor="start")
    return picture


DIAGRAMS: dict[str, Callable[[], Picture]] = {
    "round": a_round,
    "tree-mask": tree_and_mask,
    "acceptance-walk": acceptance_walk,
    "coupled-noise": coupled_noise,
    "scheduler": scheduler,
    "policy": policy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder to write to (default: docs/images)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (out / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
