"""The server's metrics, under the names that dashboards of other engines know, and one number that they lack: the net speed-up.

Counters of guesses carry vLLM's names. The net speed-up compares the tokens per second of rounds with guesses and of rounds
without. The latter are measured per batch size, whenever one happens; the adaptive policy makes some.

    net = (tokens / seconds of the last rounds) / (rows / seconds of a round without guesses);   wasted = drafted - accepted
"""

from __future__ import annotations

from collections import deque
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.core.report import RoundReport
from outrider.engine.scheduler import Scheduler
from outrider.server.goodput import GoodputCurve
from outrider.server.queued_request import method_of
from outrider.server.response_store import ResponseStore

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_MOST_POSITIONS = 16
_WINDOW = 256
"""Number of recent rounds in the live speed-up."""
_SMOOTHING = 0.1


@final
class LiveSpeed:
    """Live net speed-up."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)

    def add(self, seen: RoundReport) -> None:
        num_rows = len(seen.drafted)
        if not any(seen.drafted):
            old = self._plain.get(num_rows, seen.seconds)
            slow = min(seen.seconds, 3 * old)  # one hiccup is not a new machine
            self._plain[num_rows] = old + _SMOOTHING * (slow - old)
        self._recent.append((num_rows, seen.num_tokens, seen.seconds))

    @property
    def net(self) -> float:
        """The net speed-up; 1 while nothing is known."""
        if not self._plain or not self._recent:
            return 1.0
        plain = sum(tokens / rows * self._plain_round(rows) for rows, tokens, _ in self._recent)
        return plain / sum(seconds for *_, seconds in self._recent)

    def _plain_round(self, num_rows: int) -> float:
        """Seconds of a round without guesses, at the nearest batch size that had one."""
        return self._plain[min(self._plain, key=lambda known: abs(known - num_rows))]


@final
class GrowingTotal:
    """A counter that never falls. It follows a total of the engine, which is reset when the engine restarts."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._last = counter, 0

    def see(self, total: int) -> None:
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total


@final
class StoredSizes:
    """Gauges of stored responses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = Gauge("outrider:stored_responses", "Responses that are stored", registry=registry)
        self._bytes = Gauge("outrider:stored_response_bytes", "Bytes of stored responses", registry=registry)

    def watch(self, store: ResponseStore) -> None:
        """Show the size of this store from now on."""
        self._count.set_function(lambda: store.num_responses)
        self._bytes.set_function(lambda: store.num_bytes)


@final
class Metrics:
    """The server's counters, in a registry of their own."""

    def __init__(self, *, model: str = "", method: str = "", replica: str = "0") -> None:
        """The arguments are labels of ``outrider:server_info``."""
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"outrider:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider:{name}", text, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"outrider:{name}", text, buckets=_SECONDS, registry=registry)

        self.drafts = counter("spec_decode_num_drafts", "Rounds of a request with guesses")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Guesses")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Guesses the target agreed with")
        self.per_position = counter("spec_decode_num_accepted_tokens_per_pos", "The same by depth", ("position",))
        self.wasted = counter("spec_decode_num_wasted_tokens", "Guesses verified in vain")
        self.rounds = counter("rounds", "Target passes")
        self.generation_tokens = counter("generation_tokens", "Tokens emitted")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.requests = counter("requests", "Requests by status", ("status",))
        self.cancelled = counter("requests_cancelled", "Choices whose client left")
        self.failures = counter("engine_failures", "Times the engine was started anew")
        self.request_failures = counter("request_failures", "Requests that failed by themselves, through a defect")
        self.draft_swaps = counter("draft_swaps", "Better draft models that learning put into service")
        self.grammars_killed = counter("grammars_killed", "Grammars that took too long or too much memory to compile")
        self.grammar_bytes = gauge("grammar_cache_bytes", "Compiled grammars that are kept")
        self.waiting = gauge("num_requests_waiting", "Choices in the queue")
        self.running = gauge("num_requests_running", "Choices that hold a slot")
        self._preempted = GrowingTotal(counter("num_preemptions", "Times a choice gave up its slot for memory"))
        self._prefix_hits = GrowingTotal(counter("prefix_cache_hits", "Prompts whose beginning was known"))
        self._prefix_tokens = GrowingTotal(counter("prefix_cache_hit_tokens", "Prompt tokens that need not be read again"))
        self.prefix_bytes = gauge("prefix_cache_bytes", "Shared beginnings that are kept")
        self.cache_bytes = gauge("cache_bytes", "Memory of keys, values and logits, as counted against the budget")
        self.cache_usage = gauge("kv_cache_usage_perc", "The same over the budget, 0 to 1; 0 without a budget")
        self.reasons = counter("rounds_by_reason", "Target passes by why the policy planned them so", ("reason",))
        self.finished = counter("request_success", "Choices by how they ended", ("finished_reason",))
        self.by_method = {
            noun: counter(f"method_{noun}", f"{noun} by method".capitalize(), ("method",))
            for noun in ("rounds", "tokens", "draft_tokens", "accepted_tokens", "wasted_tokens")
        }
        self.net = gauge("spec_decode_net_speedup", "Tokens per second over that of decoding without guesses, live")
        self.acceptance = gauge("spec_decode_acceptance", "Accepted over drafted, in all")
        self.round_seconds = histogram("round_seconds", "Time of a round")
        self.queue_time = histogram("request_queue_time_seconds", "Time a choice waited for its slot")
        self.first_token = histogram("time_to_first_token_seconds", "Time from request to first token")
        self.per_token = histogram("time_per_output_token_seconds", "Time per further token of a request")
        self.latency = histogram("e2e_request_latency_seconds", "Time from request to answer")
        info = Gauge("outrider:server_info", "What is served", ("model", "method", "replica"), registry=registry)
        info.labels(model, method, replica).set(1)
        self.speed, self.goodput = LiveSpeed(), GoodputCurve()
        self._totals = [0, 0]
        self.stored = StoredSizes(registry)

    def round(self, seen: RoundReport) -> None:
        """Count a round of a lane. Requests that failed before their first round have none."""
        if not seen.num_tokens:
            return
        drafted, accepted = sum(seen.drafted), sum(seen.accepted)
        self.rounds.inc()
        self.round_seconds.observe(seen.seconds)
        self.generation_tokens.inc(seen.num_tokens)
        self.speed.add(seen)
        self.goodput.add(len(seen.accepted), seen.num_tokens, seen.seconds)
        self._count_method(seen, drafted, accepted)
        self.reasons.labels(seen.reason.code.value if seen.reason else "none").inc()
        if not drafted:
            return
        self.drafts.inc(sum(count > 0 for count in seen.drafted))
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
        self.wasted.inc(drafted - accepted)
        for position in range(min(max(seen.accepted), _MOST_POSITIONS)):
            self.per_position.labels(str(position)).inc(sum(count > position for count in seen.accepted))
        self._totals[0] += drafted
        self._totals[1] += accepted

    def _count_method(self, seen: RoundReport, drafted: int, accepted: int) -> None:
        method = method_of(seen.lane)
        name = "prediction" if method is None else method or "default"
        counts = {"rounds": 1, "tokens": seen.num_tokens, "draft_tokens": drafted, "accepted_tokens": accepted}
        for noun, amount in {**counts, "wasted_tokens": drafted - accepted}.items():
            self.by_method[noun].labels(name).inc(amount)

    def engine(self, scheduler: Scheduler) -> None:
        """Read the engine's state between two rounds."""
        self.waiting.set(scheduler.num_waiting)
        self.running.set(scheduler.num_running)
        self.cache_bytes.set(scheduler.cache_bytes)
        self.cache_usage.set(scheduler.cache_bytes / scheduler.memory.budget if scheduler.memory.budget else 0)
        self._preempted.see(scheduler.num_preempted)
        if scheduler.prefixes is not None:
            self.prefix_bytes.set(scheduler.prefixes.num_bytes)
            self._prefix_hits.see(scheduler.prefixes.num_hits)
            self._prefix_tokens.see(scheduler.prefixes.num_hit_tokens)

    def refresh(self) -> None:
        """Update the gauges that are computed on demand."""
        self.net.set(self.speed.net)
        self.acceptance.set(self._totals[1] / self._totals[0] if self._totals[0] else 0.0)

    def text(self) -> bytes:
        """The metrics in Prometheus' exposition format."""
        self.refresh()
        return generate_latest(self.registry)
