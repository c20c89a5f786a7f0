"""Several models in one server: each has an engine of its own, and requests name the one they want."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from outrider.core.errors import OptionError, nearest
from outrider.server.failures import ApiError
from outrider.server.service import Service

_OF_THE_SERVER = ("outrider:requests", "outrider:stored_responses", "outrider:stored_response_bytes")
"""Counted once for all models, in the first one's metrics."""


@final
class Models:
    """The served models by name. The first one answers requests that name none."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._by_name = {service.name: service for service in services}
        if len(self._by_name) < len(services):
            names = ", ".join(service.name for service in services)
            raise OptionError(f"two models have one name ({names}); name them apart: --model NAME=PATH")
        self.first = services[0]

    def __iter__(self) -> Iterator[Service]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str | None) -> Service:
        """The model that a request names. An unknown name is refused, and the nearest one suggested."""
        if name is None:
            return self.first
        if name not in self._by_name:
            message = f"model {name!r} is not served here; {nearest(name, list(self._by_name))}"
            raise ApiError(404, message, param="model")
        return self._by_name[name]

    def start(self) -> None:
        for service in self:
            service.worker.start()

    def drain(self) -> None:
        """Take no new requests."""
        for service in self:
            service.is_draining = True

    def close(self) -> None:
        for service in self:
            service.close()

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' exposition format. With several models, every sample is labelled with its model."""
        if len(self) == 1:
            return self.first.metrics.text()
        for service in self:
            service.metrics.refresh()
        return generate_latest(_Merged(self))  # pyright: ignore[reportArgumentType]


@final
class _Merged:
    """The registries of several models as one, with a label that tells their samples apart."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for service in self._models:
            for family in service.metrics.registry.collect():
                self._add(families.setdefault(family.name, _like(family)), family, service)
        return iter(families.values())

    def _add(self, total: Metric, family: Metric, service: Service) -> None:
        is_shared = family.name in _OF_THE_SERVER
        if is_shared and service is not self._models.first:
            return
        label: dict[str, Any] = {} if is_shared else {"model": service.name}
        total.samples += [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]


def _like(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)
