"""A captured round that is told what a rule decided: its own walk finds that path and no other."""

from __future__ import annotations

import pytest

from outrider.engine.host_verdicts import path_along, told_rows


@pytest.mark.parametrize(
    ("path", "end"),
    [([0], 7), ([0, 2], 9), ([0, 2, 3], 5), ([0, 1], 4), ([0], 8)],
)
def test_only_the_rules_path_is_left(path: list[int], end: int) -> None:
    """Two children hold the same token, and the last token may be one that was guessed and rejected."""
    tokens, parents = [1, 7, 7, 9, 8], [-1, 0, 0, 2, 0]
    ((nodes, following),) = told_rows([tokens], [path], [end], 6)
    assert len(nodes) == len(following) == 6
    assert [node for node, token in enumerate(nodes) if token >= 0] == path
    said = [following[node] for node in path]
    assert said == [*(tokens[node] for node in path[1:]), end]
    assert path_along(nodes[:5], parents, 5, said[:-1]) == path
