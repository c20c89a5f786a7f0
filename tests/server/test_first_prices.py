"""What rounds cost is measured before a server says that it is ready: the first request would make all others wait."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.cli.serve import _read_prices  # pyright: ignore[reportPrivateUsage]


class Composer:
    """A model whose methods note that they were started."""

    def __init__(self, *, can_be_captured: bool) -> None:
        self.started: list[str] = []
        self.target = SimpleNamespace(traits=SimpleNamespace(can_be_captured=can_be_captured))
        self.method = self.compose("its own")

    def compose(self, name: str) -> Any:
        return SimpleNamespace(policy=SimpleNamespace(start=lambda num_rows: self.started.append(f"{name} {num_rows}")))


@pytest.mark.parametrize(
    ("can_be_captured", "warm_up", "is_measured"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_the_methods_of_usual_requests_are_measured(can_be_captured: bool, warm_up: bool, is_measured: bool) -> None:
    llm = Composer(can_be_captured=can_be_captured)
    _read_prices(cast(Any, llm), argparse.Namespace(warm_up=warm_up))
    assert llm.started == (["its own 1", "reference 1"] if is_measured else [])
