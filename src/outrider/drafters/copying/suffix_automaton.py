"""A suffix automaton that counts: how often every recent context occurred, and what followed it.

States are classes of contexts that end at the same places, so n tokens make at most 2n states. The suffixes of the present
context are a short chain of suffix links. Each append walks that chain once. It counts the token after every context and keeps
each context's most frequent continuations in order, so the best guess needs no search. Contexts longer than ``max_context`` are
not counted. That limits the length of the chain, and so the cost of a token, on any text.

    P(t | s) = count(s t) / followed(s),     followed(s) = sum_t count(s t)

Online construction: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". For several texts at once,
each has its own ``Tail``, and an existing transition is followed or split instead of being made.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

MAX_CHILDREN = 8
"""Continuations of a context kept in order of frequency; rarer ones are counted but not proposed."""
_NONE, _MANY = -1, -2
_WINDOW = 8
"""Initial guess at a match's length. Most matches are short, and a short look is cheap."""


class _Branch:
    """Transitions of a state with several of them, and its most frequent tokens, the best first."""

    __slots__ = ("next", "top")

    def __init__(self, following: dict[int, int], top: list[int]) -> None:
        self.next = following
        self.top = top


@dataclass(slots=True)
class Tail:
    """The end of one growing text inside an automaton."""

    last: int = 0
    """State of the whole text."""
    context: int = 0
    """State of its last ``context_len`` tokens."""
    context_len: int = 0

    def copy(self) -> Tail:
        return Tail(self.last, self.context, self.context_len)


@final
class SuffixAutomaton:
    """Every substring of the texts added so far, up to ``max_context`` tokens, with exact counts."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.num_tokens = 0
        self.length = array("i", [0])
        """Longest string of each state; state 0 is the empty string."""
        self.link = array("i", [-1])
        """State of the longest suffix that occurs in more places."""
        self.count = array("i", [0])
        self.followed = array("i", [0])
        """Occurrences with a token after them."""
        self._only_token = array("i", [_NONE])
        self._only_next = array("i", [_NONE])
        self._branches: dict[int, _Branch] = {}

    @property
    def num_states(self) -> int:
        return len(self.length)

    def copy(self) -> SuffixAutomaton:
        """An independent copy."""
        twin = SuffixAutomaton(self.max_context)
        twin.num_tokens = self.num_tokens
        twin.length, twin.link, twin.count, twin.followed = self.length[:], self.link[:], self.count[:], self.followed[:]
        twin._only_token, twin._only_next = self._only_token[:], self._only_next[:]
        twin._branches = {state: _Branch(dict(b.next), list(b.top)) for state, b in self._branches.items()}
        return twin

    def extend(self, tail: Tail, tokens: Iterable[int]) -> None:
        """Append tokens to the text that ends at ``tail``."""
        for token in tokens:
            tail.last = self._grow(tail.last, token)
            # This text's growth, or another's, may have split the state the context was in.
            context = self._settled(tail.context, tail.context_len)
            self._count(context, token)
            tail.context_len = min(tail.context_len + 1, self.max_context)
            tail.context = self._settled(self.step(context, token), tail.context_len)
            self.num_tokens += 1

    def step(self, state: int, token: int) -> int:
        """The state after one more token, or -1."""
        only = self._only_token[state]
        if only == token:
            return self._only_next[state]
        return self._branches[state].next.get(token, _NONE) if only == _MANY else _NONE

    def match(self, history: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of ``history`` that occurs here, up to ``max_context`` tokens."""
        limit, window = min(len(history), self.max_context), _WINDOW
        while True:
            window = min(window, limit)
            state, size = self._read(history[len(history) - window :])
            if size < window or window == limit:
                return self._settled(state, size), size
            window *= 4

    def children(self, state: int, limit: int = MAX_CHILDREN) -> list[tuple[int, float, int]]:
        """Most frequent continuations as (token, probability, state), the best first; among equals, the more recent
        first.

        At the end of a text, where there are none, those of its longest suffix that has some. The empty context has none.
        """
        followed, count, longest = self.followed, self.count, self.max_context
        while state > 0 and not followed[state]:
            state = self.link[state]
        if state <= 0:
            return []
        total, only = followed[state], self._only_token[state]
        if only != _MANY:
            after = self._only_next[state]
            return [(only, count[after] / total, self._settled(after, longest))]
        branch = self._branches[state]
        found = [(token, branch.next[token]) for token in branch.top[:limit]]
        return [(token, count[after] / total, self._settled(after, longest)) for token, after in found]

    def best(self, state: int) -> list[tuple[int, float, int]]:
        """The first of ``children``, if there is one."""
        return self.children(state, 1)

    def suffixes(self, state: int, size: int) -> Iterator[tuple[int, int]]:
        """(state, length) of the suffixes of a matched context that were followed by a token, the longest first."""
        while state > 0:
            if self.followed[state]:
                yield state, min(size, self.length[state])
            state = self.link[state]

    def _read(self, tokens: Sequence[int]) -> tuple[int, int]:
        state, size = 0, 0
        for token in tokens:
            after = self.step(state, token)
            while after < 0 and state:
                state = self.link[state]
                size = self.length[state]
                after = self.step(state, token)
            state, size = (after, size + 1) if after >= 0 else (0, 0)
        return state, size

    def _settled(self, state: int, size: int) -> int:
        """The state of the last ``size`` tokens of a string that belongs to ``state``."""
        length, link = self.length, self.link
        above = link[state]
        while above >= 0 and length[above] >= size:
            state, above = above, link[above]
        return state

    def _count(self, context: int, token: int) -> None:
        """Count one occurrence of ``token`` after every suffix of the context."""
        count, followed, link, branches = self.count, self.followed, self.link, self._branches
        only_token, only_next = self._only_token, self._only_next
        state, counted = context, _NONE
        while state >= 0:
            followed[state] += 1
            if only_token[state] == token:
                after, branch = only_next[state], None
            else:
                branch = branches[state]
                after = branch.next[token]
            if after != counted:
                count[after] += 1
                counted = after
            if branch is not None and branch.top[0] != token:
                self._promote(branch, token)
            state = link[state]

    def _promote(self, branch: _Branch, token: int) -> None:
        """Restore the order of frequency after ``token`` was counted; the newest goes first among equals."""
        top, following, count = branch.top, branch.next, self.count
        mine = count[following[token]]
        if token in top:
            place = top.index(token)
        elif len(top) < MAX_CHILDREN:
            place = len(top)
            top.append(token)
        elif count[following[top[-1]]] <= mine:
            place = len(top) - 1
            top[place] = token
        else:
            return
        while place and count[following[top[place - 1]]] <= mine:
            top[place] = top[place - 1]
            place -= 1
        top[place] = token

    def _grow(self, last: int, token: int) -> int:
        """Add the states for appending ``token`` to a text that ended at ``last``; returns the new last state."""
        link, length = self.link, self.length
        known = self.step(last, token)
        if known >= 0:
            return known if length[known] == length[last] + 1 else self._split(last, token, known)
        new = self._add_state(length[last] + 1, 0)
        state, after = last, _NONE
        while state >= 0:
            after = self.step(state, token)
            if after >= 0:
                break
            self._connect(state, token, new)
            state = link[state]
        if after >= 0:
            link[new] = after if length[after] == length[state] + 1 else self._split(state, token, after)
        return new

    def _split(self, state: int, token: int, old: int) -> int:
        """Give the shorter strings of ``old`` a state of their own, because they occurred where its longer ones did not."""
        link = self.link
        new = self._add_state(self.length[state] + 1, link[old])
        self.count[new], self.followed[new] = self.count[old], self.followed[old]
        self._only_token[new], self._only_next[new] = self._only_token[old], self._only_next[old]
        if self._only_token[old] == _MANY:
            branch = self._branches[old]
            self._branches[new] = _Branch(dict(branch.next), list(branch.top))
        link[old] = new
        while state >= 0 and self.step(state, token) == old:
            self._connect(state, token, new)
            state = link[state]
        return new

    def _add_state(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(0)
        self.followed.append(0)
        self._only_token.append(_NONE)
        self._only_next.append(_NONE)
        return len(self.length) - 1

    def _connect(self, state: int, token: int, after: int) -> None:
        """Set a transition. A state's first one needs no dictionary, and most states have only one."""
        only = self._only_token[state]
        if only in (_NONE, token):
            self._only_token[state], self._only_next[state] = token, after
        elif only == _MANY:
            branch = self._branches[state]
            branch.next[token] = after
            if len(branch.top) < MAX_CHILDREN and token not in branch.top:
                branch.top.append(token)
        else:
            self._branches[state] = _Branch({only: self._only_next[state], token: after}, [only, token])
            self._only_token[state] = _MANY
