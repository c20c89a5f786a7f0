"""What rounds cost is measured before a server says that it is ready: the first request would make all others wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from inprocess import bundled

from outrider.rehearsal.rehearsal import KnownPrices
from outrider.server.queued_request import DEFAULT_LANE, PredictedLane
from outrider.server.service import Service
from outrider.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("can_be_captured", "is_warm", "is_measured"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_the_methods_of_usual_requests_are_measured(
    can_be_captured: bool, is_warm: bool, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Any]()

    def found(lane: Any) -> Any:
        return SimpleNamespace(policy=SimpleNamespace(start=lambda num_rows: started.append((lane, num_rows))))

    service = Service(bundled(), ServerSettings())
    monkeypatch.setattr(service, "_find_method", found)
    traits = SimpleNamespace(can_be_captured=can_be_captured)
    monkeypatch.setattr(service, "llm", SimpleNamespace(target=SimpleNamespace(traits=traits), prices=KnownPrices()))
    service.prepare(is_warm=is_warm)
    assert service.llm.prices.is_serving is is_measured
    assert started == ([(DEFAULT_LANE, 1), (PredictedLane(()), 1)] if is_measured else [])


def test_a_prediction_of_nothing_has_a_method_and_grammars_are_ready() -> None:
    """The method is the one whose costs are measured."""
    pytest.importorskip("llguidance")
    service = Service(bundled(), ServerSettings())
    assert service.intake.grammars._vocabulary is None
    service.prepare(is_warm=False)
    assert service.intake.grammars._vocabulary is not None
