"""Scaling by goodput, as a policy of Ray Serve: its own delays and limits apply to what this asks for."""

from __future__ import annotations

from typing import Any

from outrider.server.goodput import replicas_wanted

ENOUGH = "enough"
"""The name under which replicas report how many requests fill them."""


def by_goodput(context: Any) -> tuple[int, dict[str, Any]]:
    """Replicas wanted for the requests of an ``AutoscalingContext``, and no state to keep."""
    reports = (context.aggregated_metrics or {}).get(ENOUGH, {})
    return replicas_wanted(context.total_num_requests, list(reports.values()), context.config.target_ongoing_requests), {}
