"""The decision of a rule on the host, and the form in which a captured round receives it.

A captured round follows, from the root on, the child that holds what was chosen after its parent
(``device/acceptance/coupled.py``). A rule on the host has decided already. So the device receives a tree that holds only the
rule's path, and the tokens along it as choices. The last one is the token that the rule adds.

    nodes:    root   -1   x1   -1   x2          following:    x1   .   x2   .   next
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft
from outrider.core.interfaces import AcceptanceRule
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict


def verdicts_of(rule: AcceptanceRule, draft: Draft, law: Law, noise: Noise, *, all_greedy: bool) -> Sequence[RowVerdict]:
    """The rule's verdict on each row. This is the only place where a round waits for the device. The rule is not asked if the
    target has walked along its own choices, or if there is no guess to test and nothing to draw."""
    has_choice = draft.tree.num_nodes > 1 or not all_greedy
    if rule.follows_choices or not has_choice:
        walks = law.walks
        if walks is not None:
            return walks
    return rule.walk(draft, law, noise).rows if has_choice else [RowVerdict((), one, False) for (one,) in law.choices.tolist()]


def told_rows(
    tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]], ends: Sequence[int], num_nodes: int
) -> list[tuple[list[int], list[int]]]:
    """For each row, its nodes on ``paths``, with the others removed, and the token after each node. Along the path that is the
    next node's token, and at the end the token of ``ends``."""
    found = list[tuple[list[int], list[int]]]()
    for row, path, end in zip(tokens, paths, ends, strict=True):
        nodes, following = [-1] * num_nodes, [0] * num_nodes
        for node, then in zip(path, (*path[1:], None), strict=True):
            nodes[node], following[node] = row[node], end if then is None else row[then]
        found.append((nodes, following))
    return found


def path_along(tokens: Sequence[int], parents: Sequence[int], size: int, chosen: Sequence[int]) -> list[int]:
    """The nodes along the chosen tokens, the root first, as far as the tree has them."""
    path = [0]
    for token in chosen:
        node = next((n for n in range(path[-1] + 1, size) if parents[n] == path[-1] and tokens[n] == token), None)
        if node is None:
            break
        path.append(node)
    return path
