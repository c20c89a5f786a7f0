"""One round of speculative decoding, for a batch of requests of different lengths.

    plan -> propose -> score -> walk -> commit

``Engine.step`` is that sentence, and returns what happened as a ``RoundReport``. It may be called by hand: the scheduler has
no private powers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import RequestError
from outrider.core.interfaces import Cache, Context, Observation, Plan, Target
from outrider.core.method import Method
from outrider.core.own_time import own_seconds
from outrider.core.reading_target import PromptPiece, ReadingTarget
from outrider.core.reason import Reason, ReasonCode
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState, TokenLogprob
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.verdict import RowVerdict
from outrider.engine.finish import take
from outrider.engine.forced import Forced
from outrider.engine.host_verdicts import verdicts_of
from outrider.engine.job import Slots
from outrider.engine.limits import plain_plan, within
from outrider.engine.pieces import PieceSizes
from outrider.engine.prefill import Prefill, Prefilled, wait_for


@dataclass(eq=False)
class Batch:
    """Requests that share target passes, with all state that changes."""

    rows: list[RequestState]
    ids: list[int]
    """The caller's number for each row. The engine does not use it."""
    cache: Cache
    drafter_state: Any
    policy_state: Any
    sampler: Sampler

    def fork(self, rows: Sequence[int]) -> Batch:
        """The batch of the named rows only."""
        return self._of(rows, self.cache.fork(rows), self.drafter_state.fork(rows))

    def narrow(self, rows: Sequence[int]) -> Batch:
        """The batch of the named rows, where this batch is not used again. Rows that keep their place are not copied if
        possible."""
        return self._of(rows, self.cache.narrow(rows), self.drafter_state.narrow(rows))

    def _of(self, rows: Sequence[int], cache: Cache, drafter_state: Any) -> Batch:
        kept, sampler = [self.rows[row] for row in rows], self.sampler
        sampler = Sampler(kept, sampler.vocab_size, sampler.device)
        return Batch(kept, [self.ids[row] for row in rows], cache, drafter_state, self.policy_state.fork(rows), sampler)

    def join(self, other: Batch) -> Batch:
        """This batch with another's rows after its own."""
        rows = [*self.rows, *other.rows]
        return Batch(
            rows,
            [*self.ids, *other.ids],
            self.cache.join(other.cache),
            self.drafter_state.join(other.drafter_state),
            self.policy_state.join(other.policy_state),
            Sampler(rows, self.sampler.vocab_size, self.sampler.device),
        )

    def without_finished(self) -> Batch:
        running = [i for i, row in enumerate(self.rows) if not row.is_finished]
        return self if len(running) == len(self.rows) else self.fork(running)


class Engine:
    """A target and a method. It has no state between calls: everything that changes is in the ``Batch``."""

    def __init__(self, target: Target, method: Method, pieces: PieceSizes | None = None) -> None:
        """``pieces`` limits how much of a text a drafter may read in a round; without it, there is no limit."""
        self.target = target
        self.method = method
        self._pieces = pieces or PieceSizes(Slots())

    def start(self, requests: Sequence[Request], ids: Sequence[int] | None = None) -> Batch:
        """Prefill: everything but the last prompt token, which becomes the root of the first tree."""
        for request in requests:
            self.check(request)
        return self.restart(list(zip(ids or range(len(requests)), map(RequestState.of, requests), strict=True)))

    def restart(self, rows: Sequence[tuple[int, RequestState]]) -> Batch:
        """A batch from numbers and states of requests that may already have part of their text."""
        return self.batch(Prefill(self.target, self.method.drafter.taps, rows).whole())

    def batch(self, read: Prefilled) -> Batch:
        """A batch of requests that the target has read; the drafter reads them now."""
        method, target, began, rows = self.method, self.target, self.clock(), read.states
        drafter_state = method.drafter.start([row.tokens for row in rows], read.taps)
        seconds = self.clock() - began
        for row in rows:
            row.stats.prefill_seconds += seconds
        sampler = Sampler(rows, target.vocab_size, target.device)
        return Batch(rows, read.ids, read.cache, drafter_state, method.policy.start(len(rows)), sampler)

    @torch.inference_mode()
    def step(self, batch: Batch, room: int = sys.maxsize, pieces: Sequence[PromptPiece] = ()) -> RoundReport:
        """Run one round, with at most ``room`` guesses a row, and report it. Finished rows stay in the batch (see
        ``Batch.without_finished``). A ``ReadingTarget`` reads ``pieces`` of prompts in the same pass."""
        num_threads = torch.get_num_threads() if self.target.traits.has_own_threads else 1
        if num_threads == 1:
            return self._step(batch, room, pieces)
        torch.set_num_threads(1)
        try:
            return self._step(batch, room, pieces)
        finally:
            torch.set_num_threads(num_threads)

    def _step(self, batch: Batch, room: int, pieces: Sequence[PromptPiece]) -> RoundReport:
        method, began = self.method, self.clock()
        limits, left = [row.max_draft for row in batch.rows], self._left(batch, room)
        forced = Forced.of(batch.rows, left, method.drafter.draws)
        context, plain = self._context(batch), plain_plan(limits, room) or forced.plan
        plan = plain or self._read_up(batch, context, forced.without(self._plan(batch, limits, room).clipped(left)))
        planned = self._own_clock()  # a round is what a policy can compare; its own thinking comes and goes
        own_draft = method.drafter.asked(batch.drafter_state, context, plan)
        forced = forced.beside(own_draft)
        draft, drafted = forced.put_into(own_draft, self.target.vocab_size), self._own_clock()
        taps = method.drafter.round_taps(batch.drafter_state)
        scores = self._scores(draft, batch.cache, taps, pieces)
        scored = self._own_clock()
        law = batch.sampler.law_of(scores, draft.tree, context.noise)
        verdicts = verdicts_of(method.rule, draft, law, context.noise, all_greedy=batch.sampler.all_greedy)
        paths = [[0, *verdict.path] for verdict in verdicts]
        batch.cache.commit(paths)
        own = 1 - self._reading_share(draft, pieces, scored - planned)  # so that rounds with and without prompts compare
        seconds = drafted - planned, own * (scored - drafted)
        seen = Observation(draft, scores, paths, [len(path) - 1 for path in paths], *seconds, plan)
        forced.remember(batch.rows, seen)
        method.drafter.observe(batch.drafter_state, forced.seen_by(method.drafter, own_draft, seen))
        seen = replace(seen, round_seconds=own * (self._own_clock() - planned), padded=self.target.traits.pads)
        if plain is None:
            method.policy.update(batch.policy_state, forced.apart(own_draft, seen))
        return self._emit(batch, verdicts, seen, began)

    def _scores(self, draft: Draft, cache: Cache, taps: Sequence[int], pieces: Sequence[PromptPiece]) -> Scores:
        if not pieces:
            return self.target.score(draft.tree, cache, taps=taps, resume=draft.resume)
        assert isinstance(self.target, ReadingTarget), "only some targets read prompts in the passes of rounds"
        return self.target.score_and_read(draft.tree, cache, pieces, taps=taps, resume=draft.resume)

    def _reading_share(self, draft: Draft, pieces: Sequence[PromptPiece], seconds: float) -> float:
        """The part of a round of so many seconds that prompts took; every piece is told its own."""
        num_tokens = sum(piece.num_tokens for piece in pieces)
        if not num_tokens:
            return 0.0
        share = self._pieces.share_of(num_tokens, sum(draft.tree.sizes))
        for piece in pieces:
            piece.seconds = share * seconds * piece.num_tokens / num_tokens
        return share

    def _plan(self, batch: Batch, limits: Sequence[int | None], room: int) -> Plan:
        """The policy's plan, cut to what requests and memory allow."""
        return within(self.method.policy.plan(batch.policy_state, len(batch.rows)), limits, room)

    def _left(self, batch: Batch, room: int) -> list[int]:
        """Guesses that each row has room for: in its answer and in the context (one token is always free), in memory, and as
        many as its request allows."""
        most = [room if row.max_draft is None else min(room, row.max_draft) for row in batch.rows]
        left = (min(row.params.max_tokens - row.num_output, self.target.max_len - len(row.tokens)) - 1 for row in batch.rows)
        return [max(0, min(pair)) for pair in zip(most, left, strict=True)]

    def _read_up(self, batch: Batch, context: Context, plan: Plan) -> Plan:
        """The plan without guesses for rows whose texts the drafter is still reading. The drafter reads its next piece now.
        That time counts as arrival, so the policy compares rounds without it."""
        most = self._pieces.of_a_drafter(len(batch.rows))
        if most is None or not any(plan.max_depth):
            return plan
        late = self.method.drafter.read_up(batch.drafter_state, context, most)
        if not late:
            return plan
        clipped = plan.clipped([0 if row in late else depth for row, depth in enumerate(plan.max_depth)])
        return clipped if any(clipped.max_depth) else replace(clipped, reason=Reason(ReasonCode.READING, {"tokens": most}))

    def _context(self, batch: Batch) -> Context:
        device = self.target.device
        positions = torch.tensor([row.num_output for row in batch.rows], device=device)
        noise = Noise(batch.sampler.seeds, positions, self.target.gumbel_stream, self.target.choose)
        return Context([row.tokens for row in batch.rows], batch.sampler, noise, device, batch.cache)

    def _emit(self, batch: Batch, verdicts: Sequence[RowVerdict], seen: Observation, began: float) -> RoundReport:
        """Give every request its tokens, up to where one of them ends it."""
        rejected = [verdict.rejected for verdict in verdicts]
        tokens = seen.draft.tree.tokens.tolist()
        positions = [row.num_output for row in batch.rows]
        emitted: list[list[int]] = []
        for i, (state, path) in enumerate(zip(batch.rows, seen.paths, strict=True)):
            run = [*(tokens[i][node] for node in path[1:]), verdicts[i].next_token]
            taken = take(state, run, len(path) - 1, rejected=rejected[i], max_len=self.target.max_len)
            if state.params.logprobs is not None:
                _add_logprobs(state, seen.scores.logits[i], path, taken)
            emitted.append(taken)
            if state.is_finished:
                self.method.drafter.finish(batch.drafter_state, i, state.tokens)
        seconds = self.clock() - began
        report = RoundReport(batch.ids, batch.rows, positions, seen, seen.draft.num_drafted, rejected, emitted, seconds)
        report.count()
        return report

    def check(self, request: Request) -> None:
        """Refuse what cannot be served, before any work is done on it."""
        size, limit = len(request.prompt_ids), self.target.max_len
        if size == 0:
            raise RequestError("the prompt is empty; give at least one token (a begin-of-sequence token will do)")
        if size >= limit:
            raise RequestError(
                f"the prompt has {size} tokens and the model's context holds {limit}; shorten the prompt to at most {limit - 1}"
            )
        vocab_size = self.target.vocab_size
        params = request.params
        for name, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", params.logit_bias),
            ("banned_token_ids", params.banned_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            bad = next((token for token in ids if not 0 <= token < vocab_size), None)
            if bad is not None:
                raise RequestError(
                    f"{name} holds token {bad}, and the vocabulary is 0 to {vocab_size - 1}; check the tokenizer"
                )
        params.check_support(vocab_size, request.end_ids)
        if params.stop and request.new_stream is None:
            raise RequestError("stop strings need a tokenizer; load the model with one, or use stop_token_ids")

    def clock(self) -> float:
        """Seconds; waits for the device, so that parts of a round can be told apart."""
        wait_for(self.target.device)
        return time.perf_counter()

    def _own_clock(self) -> float:
        """Seconds without the time of other work on the machine, by which rounds are compared."""
        wait_for(self.target.device)
        return own_seconds()


def _add_logprobs(state: RequestState, logits: Tensor, path: Sequence[int], run: Sequence[int]) -> None:
    """Log-probabilities of emitted tokens under the raw logits of the node each one follows."""
    count = state.params.logprobs
    log_probs = logits[list(path[: len(run)])].float().log_softmax(-1)
    top = log_probs.topk(count, -1) if count else None
    for i, token in enumerate(run):
        best = () if top is None else tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True))
        state.logprobs.append(TokenLogprob(token, float(log_probs[i, token]), best))
