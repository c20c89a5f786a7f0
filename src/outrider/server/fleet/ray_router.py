"""Routing by prefix as Ray Serve calls it: the table of ``affinity.py`` in the place of its two random choices."""

from __future__ import annotations

from typing import Any, final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # pyright: ignore[reportMissingImports]

from outrider.server.fleet.affinity import Affinity


@final
class PrefixRouter(RequestRouter):
    """Prefers the replica that has read a prefix of the request. Lives in the front door's process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._affinity = Affinity()

    def initialize_state(self, **options: Any) -> None:
        del options

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas one after the other; Ray takes the first with room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        return [[by_name[name]] for name in self._affinity.rank(_text_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        del result
        self._affinity.note(_text_of(pending_request), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.forget(replica_id.unique_id)


def _text_of(pending: PendingRequest | None) -> str:
    return pending.args[0] if pending is not None and pending.args else ""
