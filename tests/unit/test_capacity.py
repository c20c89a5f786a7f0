"""Replicas for a load and the price of tokens: division, and no more."""

from __future__ import annotations

import json

import pytest

from outrider.bench.capacity import Capacity
from outrider.cli.main import main
from outrider.core.errors import OptionError


def test_replicas_and_price() -> None:
    plan = Capacity(10, 200, utilisation=0.5, price=3.6)
    assert plan.replicas(1000) == 4 and plan.replicas(4000) == 1 and plan.replicas(999) == 5
    assert plan.million_tokens(1000) == pytest.approx(2.0)
    assert plan.compared(1000, 2000) == "4 replicas plain, 2 with speculation; a million tokens 2.00 and 1.00 (saves 1.00)"
    assert "million" not in Capacity(10, 200).compared(1000, 2000)


@pytest.mark.parametrize("wrong", [{"utilisation": 1.5}, {"requests_per_second": 0}, {"price": -1}])
def test_loads_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="is not valid"):
        Capacity(**{"requests_per_second": 1, "tokens_per_request": 1, **wrong})


def test_the_command_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("simulate --batch-sizes 8 --load 50 --request-tokens 200 --price 4".split()) == 0
    said = capsys.readouterr().out
    row = json.loads(said.strip().splitlines()[-1])["rows"][0]
    assert row["replicas"] < row["replicas_plain"] and "a million tokens" in said
