"""Requests in slots of captured rounds, behind the scheduler: joining, leaving, frames that grow and shrink. The device is
played by a function of the tokens so far, so that every request's text is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.bench.decode import decode
from outrider.core.device_round import PIECE_LEN, LateTexts
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.plan import Plan
from outrider.core.request import Request, RequestState
from outrider.engine import device_seats
from outrider.engine.device_lane import DeviceLane
from outrider.engine.device_seats import Seat
from outrider.engine.job import Job, Slots
from outrider.engine.round_kind import RoundKind, frame_sizes, num_slots
from outrider.engine.scheduler import Scheduler
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.random_decoder import tiny_config, tiny_weights

VOCAB = tiny_config().vocab_size


def next_token(tokens: Sequence[int]) -> int:
    return (7 * sum(tokens[-3:]) + 3 * len(tokens)) % VOCAB


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeGraph.clock

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class FakeGraph:
    """A round of a frame: every slot says up to three tokens, as many as its length tells."""

    logits = logprobs = None
    is_constrained = is_told = False
    clock = 0.0
    """Milliseconds of all rounds; the first pieces of prompts make one a third longer."""

    def __init__(self, graphs: FakeGraphs, size: int, num_guesses: int, num_pieces: int) -> None:
        self._graphs, self._size, self.num_guesses, self.num_pieces = graphs, size, num_guesses, num_pieces
        self.num_nodes = num_guesses + 1
        self._notes: list[list[list[int]]] = []

    def launch(self, pieces: Sequence[tuple[int, int]]) -> int:
        assert len(pieces) <= self.num_pieces
        FakeGraph.clock += 1.35 if self.num_pieces else 1.0
        for slot, start in pieces:
            self._graphs.take_piece(self._size, slot, start)
        self._graphs.num_reading_rounds += bool(pieces)
        self._notes.append([self._play(slot) for slot in range(self._size)])
        return len(self._notes) - 1

    def note(self, number: int) -> list[list[int]]:
        return self._notes[number]

    def _play(self, slot: int) -> list[int]:
        held = self._graphs.slots.get((self._size, slot)) if (self._size, slot) in self._graphs.started else None
        choices: list[int] = []
        if held is not None:
            tokens, limit = held
            for _ in range(min(1 + len(tokens) % 3 if self.num_guesses else 1, limit - len(tokens))):
                tokens.append(next_token(tokens))
                choices.append(tokens[-1])
        agreed = max(0, len(choices) - 1)
        return [len(choices), self.num_guesses, agreed, 0, *choices]


class FakeCutGraph(FakeGraph):
    """A round in parts: the host sees the guesses, changes them, and says which tokens may follow each node."""

    is_constrained = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._guesses: list[list[int]] = []

    def drafted(self) -> tuple[list[list[int]], list[list[int]]]:
        assert not any(self._notes[-1]), "the choice has not been made"
        for slot in range(self._size):
            tokens = list(self._graphs.slots.get((self._size, slot), ([0, 0], 0))[0])
            size = len(tokens)
            for _ in range(self.num_guesses):
                tokens.append(next_token(tokens))
            self._guesses.append(tokens[size - 1 :])
        return [list(row) for row in self._guesses], [list(range(-1, self.num_guesses))] * self._size

    def score(self, amended: Mapping[int, Sequence[int]]) -> None:
        for slot, tokens in amended.items():
            assert tokens[0] == self._guesses[slot][0], "roots stay"
            self._guesses[slot] = list(tokens)
        self._graphs.num_amended += len(amended)

    def choose(self, masks: Mapping[int, torch.Tensor]) -> None:
        self._notes[-1] = [self._walk(slot, masks.get(slot)) for slot in range(self._size)]

    def _play(self, slot: int) -> list[int]:
        return []

    def _walk(self, slot: int, masks: torch.Tensor | None) -> list[int]:
        held = self._graphs.slots.get((self._size, slot)) if (self._size, slot) in self._graphs.started else None
        choices: list[int] = []
        if held is not None:
            tokens, limit = held
            for node in range(min(self.num_guesses + 1, limit - len(tokens))):
                allowed = None if masks is None else np.unpackbits(masks[node].numpy(), bitorder="little")[:VOCAB]
                choices.append(chosen(tokens, allowed))
                tokens.append(choices[-1])
                if node == self.num_guesses or self._guesses[slot][node + 1] != choices[-1]:
                    break
        return [len(choices), self.num_guesses, max(0, len(choices) - 1), 0, *choices]


def chosen(tokens: Sequence[int], allowed: Any) -> int:
    """What follows the tokens: the next one in a circle that is allowed."""
    token = next_token(tokens)
    while allowed is not None and not allowed[token]:
        token = (token + 1) % VOCAB
    return token


class Turns:
    """A grammar: multiples of 3, then the token 7, then multiples of 3 again."""

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return (state + 1) % 2 if self.allowed(state, VOCAB)[token] else None

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        tokens = torch.arange(vocab_size)
        return tokens == 7 if state else tokens % 3 == 0

    def forced(self, state: int) -> tuple[int, ...]:
        return (7,) if state else ()


class FakeDrafter:
    """A drafter that reads late what rounds without guesses have added, before there is too much of it."""

    most_late = 8

    def __init__(self, graphs: FakeGraphs) -> None:
        self._graphs, self.num_late = graphs, list[int]()

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        for slot, row in zip(late.slots, late.rows, strict=True):
            assert self._graphs.slots[batch_size, slot][0] == row, "no round is in flight"
        self.num_late += late.added


class FakeGraphs:
    """What ``RoundGraphs`` is to a lane."""

    prompt_taps = (1,)
    beside: Any = None
    most_guesses = longest_at_hand = 2
    depths = (0, 2)
    most_pieces = 16
    slack = 3
    least_len = 2

    def __init__(self, target: Decoder, method: Method) -> None:
        self.target, self.drafter = target, FakeDrafter(self)
        self.policy: Any = method.policy
        self.slots: dict[tuple[int, int], tuple[list[int], int]] = {}
        self.started: set[tuple[int, int]] = set()
        self.num_read: dict[tuple[int, int], int] = {}
        self.num_read_in_rounds = self.num_reading_rounds = 0
        self.num_amended = 0
        self.seats = self
        self.sizes: list[int] = []
        self.played: list[int] = []
        """Guesses of the rounds."""
        self._holder: object = None

    def fits(self, capacity: int) -> bool:
        return capacity < 1000

    def has_pages(self, num_tokens: int, num_rows: int) -> bool:
        return num_tokens >= num_rows

    def has_room(self, size: int, states: Mapping[int, RequestState]) -> bool:
        return len(states) <= size

    def grow(self, size: int, states: Mapping[int, RequestState]) -> dict[int, int]:
        assert all((size, slot) in self.slots for slot in states)
        return {slot: len(state.tokens) + 2 * self.slack + 1 for slot, state in states.items()}

    def is_held_by_another(self, lane: object) -> bool:
        return self._holder not in (None, lane)

    def hold(self, lane: object) -> None:
        self._holder = lane

    def let_go(self) -> None:
        self._holder = None
        self.slots.clear()
        self.started.clear()

    def _of(self, state: RequestState) -> tuple[list[int], int]:
        return list(state.tokens), len(state.request.prompt_ids) + state.params.max_tokens

    def resize(self, old: int, new: int, states: Mapping[int, RequestState]) -> None:
        self.sizes.append(new)
        self.slots = {(new, place): self._of(state) for place, state in enumerate(states.values())}
        self.num_read = {(new, place): self.num_read[old, slot] for place, slot in enumerate(states)}
        self.started.clear()
        assert old != new

    def seat(self, size: int, seats: Mapping[int, Seat]) -> None:
        for slot, seat in seats.items():
            assert (size, slot) not in self.slots
            if seat.cache is not None:
                assert seat.features is not None
                assert seat.cache.lengths == [len(seat.state.tokens) - 1] == [len(seat.features)]
            self.slots[size, slot], self.num_read[size, slot] = self._of(seat.state), seat.num_read

    def take_piece(self, size: int, slot: int, start: int) -> None:
        """Pieces come in order, of slots that do not run yet."""
        assert (size, slot) not in self.started and self.num_read[size, slot] == start
        self.num_read[size, slot] = min(start + PIECE_LEN, len(self.slots[size, slot][0]) - 1)
        self.num_read_in_rounds += 1

    def start(self, size: int, states: Mapping[int, RequestState]) -> None:
        for slot, state in states.items():
            assert self.num_read[size, slot] == len(state.tokens) - 1 or self.slots[size, slot][0] == state.tokens
            self.started.add((size, slot))

    def cache_of(self, size: int, slot: int, length: int) -> object:
        assert self.num_read[size, slot] == length
        return SimpleNamespace(lengths=[length])

    def stop(self, size: int, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.slots[size, slot]
            self.started.discard((size, slot))

    def at_hand(self, wanted: RoundKind) -> FakeGraph:
        assert not wanted.logprobs and (wanted.stages or not wanted.constrained)
        self.played.append(wanted.num_guesses)
        new_graph = FakeCutGraph if wanted.constrained else FakeGraph
        num_pieces = min(wanted.num_pieces, self.most_pieces)
        return new_graph(self, wanted.num_slots, min(wanted.num_guesses, self.longest_at_hand), num_pieces)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> tuple[Scheduler, FakeGraphs]:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    target = Decoder(tiny_config(), tiny_weights(tiny_config(), seed=0))
    method = compose("prompt-lookup", target, policy="fixed", options={"num_draft_tokens": 2})
    graphs = FakeGraphs(target, method)
    lane = lambda _: DeviceLane(graphs)  # type: ignore[arg-type]  # noqa: E731
    return Scheduler(target, lambda _: method, slots=Slots(9, 64), device_lane=lane), graphs


def text_of(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("at_hand", [(2, 16), (1, 4), (0, 4)])
def test_requests_come_and_go_and_everyone_gets_its_text(world: tuple[Scheduler, FakeGraphs], at_hand: tuple[int, int]) -> None:
    """Also where only rounds with fewer guesses and pieces are captured than are wanted."""
    scheduler, graphs = world
    graphs.longest_at_hand, graphs.most_pieces = at_hand
    rng = random.Random(0)
    prompts = {n: [rng.randrange(VOCAB) for _ in range(rng.choice((2, 5, 12, 33, 64, 65, 150)))] for n in range(40)}
    counts = {n: rng.randint(1, 30) for n in prompts}
    said: dict[int, list[int]] = {n: [] for n in prompts}
    waiting, states = list(prompts), dict[int, RequestState]()
    while waiting or not scheduler.is_idle:
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 6)))):
            number = waiting.pop(0)
            states[number] = RequestState.of(Request(prompts[number], SamplingParams(max_tokens=counts[number])))
            scheduler.submit(Job(number, states[number]))
        for report in scheduler.round():
            for step in report.progress():
                said[step.request] += step.new_tokens
        scheduler.check_integrity()
    assert said == {n: text_of(prompts[n], counts[n]) for n in prompts}
    assert all(state.is_finished and state.stats.num_tokens == counts[n] for n, state in states.items())
    assert graphs.num_read_in_rounds > 20
    assert max(graphs.sizes) > 4 and graphs.slots == {} and not graphs.is_held_by_another(None)


class Beside:
    """A drafter on the host that has guesses for every other round."""

    listens, rule = False, None

    def __init__(self, rounds: FakeGraphs) -> None:
        self.rounds, self.asked, self.took_part, self.ended = rounds, list[int](), list[int](), list[RequestState]()

    def noted(self, notes: list[list[int]]) -> list[list[int]]:
        return notes

    def ready(
        self, states: Mapping[int, RequestState], plan: Plan, depth: int, *, batch_size: int, is_told: bool = False
    ) -> int:
        assert not is_told
        held = {slot: tokens for (size, slot), (tokens, _) in self.rounds.slots.items() if size == batch_size}
        started = {slot for size, slot in self.rounds.started if size == batch_size}
        assert {slot: state.tokens for slot, state in states.items()} == {slot: held[slot] for slot in started}
        assert len(plan.max_depth) == batch_size
        self.asked.append(depth * (len(self.asked) % 2))
        return self.asked[-1]

    def took(self, notes: Mapping[int, Sequence[int]], logits: torch.Tensor | None) -> None:
        assert logits is None
        self.took_part += notes

    def finish(self, states: Mapping[int, RequestState]) -> None:
        self.ended += states.values()


def test_a_drafter_on_the_host_sees_all_tokens_and_may_have_no_guess(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    beside = graphs.beside = Beside(graphs)
    states = [RequestState.of(Request([3 + n, 5, 1], SamplingParams(max_tokens=9 + n))) for n in range(5)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    while not scheduler.is_idle:
        scheduler.round()
    assert [state.tokens[3:] for state in states] == [text_of([3 + n, 5, 1], 9 + n) for n in range(5)]
    assert {0, 2} == set(beside.asked) and {0, 2} == set(graphs.played)
    assert set(beside.took_part) == set(range(5)) and {id(state) for state in beside.ended} == set(map(id, states))


@pytest.mark.parametrize("reading_guesses", [2, 1])
@pytest.mark.parametrize(("num_seats", "in_groups"), [(32, True), (4, False)])
def test_prompts_are_read_in_groups_where_many_come(
    world: tuple[Scheduler, FakeGraphs], num_seats: int, in_groups: bool, reading_guesses: int
) -> None:
    """With many seats others come soon, so a prompt waits for them. With few it is read at once. Rounds that read may have
    fewer guesses than others."""
    scheduler, graphs = world
    scheduler.slots, places = Slots(num_seats, 4096), [0]
    graphs.policy.carry = lambda _, prompts: places.append(prompts.num_places)
    graphs.policy.plan = lambda _, rows: Plan((reading_guesses if places[-1] else 2,) * rows, (2,) * rows)
    states = [RequestState.of(Request([n, 3, 4], SamplingParams(max_tokens=40 + n % 17))) for n in range(4 * num_seats)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    while not scheduler.is_idle:
        scheduler.round()
    assert all(state.output_ids == text_of(state.request.prompt_ids, state.params.max_tokens) for state in states)
    per_round = graphs.num_read_in_rounds / graphs.num_reading_rounds
    assert per_round > 3 if in_groups else per_round < 2, per_round


def test_a_drafter_catches_up_before_it_guesses_and_before_there_is_too_much(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    states = [RequestState.of(Request([n, 3], SamplingParams(max_tokens=60 + n))) for n in range(3)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    drafts = graphs.policy.plan
    for turn in count():
        is_plain = turn % 21 < 18
        graphs.policy.plan = (lambda _, rows: Plan((0,) * rows, (0,) * rows)) if is_plain else drafts
        if scheduler.is_idle:
            break
        scheduler.round()
    assert [state.output_ids for state in states] == [text_of([n, 3], 60 + n) for n in range(3)]
    assert max(graphs.drafter.num_late) == FakeDrafter.most_late and min(graphs.drafter.num_late) >= 1


def test_grammars_run_beside_others_and_force_their_text(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    grammars = [None, Turns(), Turns(), None, Turns()]
    prompts = [[3 + n, 5, 1, 2 * n] for n in range(len(grammars))]
    states = [
        RequestState.of(Request(prompt, SamplingParams(max_tokens=6 + 3 * n, grammar=grammar)))
        for n, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
    ]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    while not scheduler.is_idle:
        scheduler.round()
    for prompt, state, grammar in zip(prompts, states, grammars, strict=True):
        tokens, place = list(prompt), 0
        for _ in range(state.params.max_tokens):
            tokens.append(chosen(tokens, None if grammar is None else grammar.allowed(place, VOCAB)))
            place = 1 - place
        assert state.tokens == tokens and state.failure is None
    assert graphs.num_amended > 3
    assert max(state.stats.num_accepted for state in states) > 0


def test_a_grammar_that_fails_ends_its_request_alone(world: tuple[Scheduler, FakeGraphs]) -> None:
    class Failing(Turns):
        def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
            raise ValueError("planted")

    scheduler, _ = world
    states = [RequestState.of(Request([4, 5], SamplingParams(max_tokens=9, grammar=g))) for g in (Failing(), Turns())]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    while not scheduler.is_idle:
        scheduler.round()
    assert "planted" in str(states[0].failure) and states[0].is_finished
    assert states[1].failure is None and states[1].num_output == 9


def test_what_the_device_cannot_do_runs_on_the_host_beside_it(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    options: list[dict[str, Any]] = [{}, {"logits_processors": [lambda tokens, logits: logits]}, {}]
    for number, more in enumerate(options):
        state = RequestState.of(Request([1, 2, 3], SamplingParams(max_tokens=4, **more)))
        scheduler.submit(Job(number, state, traced=number == 2))
    emitted: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while not scheduler.is_idle:
        for report in scheduler.round():
            for step in report.progress():
                emitted[step.request] += step.new_tokens
    assert emitted[0] == text_of([1, 2, 3], 4)
    assert emitted[1] == emitted[2] and emitted[1] != emitted[0], "both were decoded by the target"
    assert max(graphs.sizes) == 1


def test_a_cancelled_request_leaves_its_slot(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    for number in range(3):
        scheduler.submit(Job(number, RequestState.of(Request([4, 5], SamplingParams(max_tokens=20)))))
    scheduler.round()
    scheduler.cancel(1)
    scheduler.check_integrity()
    assert len(graphs.slots) == 2
    scheduler.close()
    assert scheduler.is_idle and graphs.slots == {} and not graphs.is_held_by_another(None)


def test_another_drafter_lets_requests_read_themselves_again(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, _ = world
    states = [RequestState.of(Request([n, 5], SamplingParams(max_tokens=20))) for n in range(3)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    for _ in range(4):
        scheduler.round()
    scheduler.redraft([None])
    scheduler.check_integrity()
    while not scheduler.is_idle:
        scheduler.round()
    assert [state.output_ids for state in states] == [text_of([n, 5], 20) for n in range(3)]


def test_the_bench_decodes_in_captured_rounds_and_traces_on_the_host(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    prompts, params = [[1, 2, 3], [4, 5], [6, 7, 8]], [SamplingParams(max_tokens=7 + n) for n in range(3)]
    lane = scheduler._new_device_lane
    requests = [Request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    llm: Any = SimpleNamespace(target=scheduler.target, rounds=SimpleNamespace(lane=lane), requests=lambda *_: requests)
    ticks = count()
    done = decode(llm, scheduler._find_method(None), prompts, params, clock=lambda: float(next(ticks)))
    assert done.outputs == [text_of(prompt, 7 + n) for n, prompt in enumerate(prompts)]
    assert done.batches == [] and graphs.slots == {} and max(graphs.sizes) == 4
    assert done.prefill_seconds == 2, "reading prompts, and the call that took slots and began the first round"
    assert done.seconds == done.tally.num_passes, "every other call reports a round"
    traced = decode(llm, scheduler._find_method(None), prompts, params, traced=True)
    assert traced.outputs != done.outputs and len(traced.batches) == 1, "the target decodes, and the host drives its rounds"


def test_slots_come_in_powers_of_two() -> None:
    assert [num_slots(count) for count in (1, 3, 8, 9, 300)] == [1, 4, 8, 16, 512]
    assert [frame_sizes(count) for count in (1, 3, 8, 50)] == [[1], [4, 1], [8, 2], [64, 16, 4, 1]]


@pytest.mark.parametrize(("length", "num_reading_rounds"), [(2, 1), (100, 1), (129, 1), (130, 0)])
def test_a_short_prompt_that_arrives_alone_is_read_by_a_round_without_guesses(
    world: tuple[Scheduler, FakeGraphs], length: int, num_reading_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_seats, "NUM_PIECES", (0, 2, 4))
    scheduler, graphs = world
    scheduler.slots = Slots(9, 4096)
    for turn in range(2):
        prompt = [(turn + 5 * n) % VOCAB for n in range(length)]
        state = RequestState.of(Request(prompt, SamplingParams(max_tokens=9)))
        scheduler.submit(Job(turn, state))
        while not scheduler.is_idle:
            scheduler.round()
        assert state.output_ids == text_of(prompt, 9)
        assert graphs.num_reading_rounds == (1 + turn) * num_reading_rounds
    assert (graphs.played[0] == 0) == bool(num_reading_rounds)


def test_prompts_that_arrive_together_are_read_in_a_pass_of_their_own(world: tuple[Scheduler, FakeGraphs]) -> None:
    scheduler, graphs = world
    for number in range(2):
        scheduler.submit(Job(number, RequestState.of(Request([number, 3, 4], SamplingParams(max_tokens=5)))))
    while not scheduler.is_idle:
        scheduler.round()
    assert graphs.num_reading_rounds == 0


def test_the_important_get_slots_and_pieces_first_and_wait_again_last(world: tuple[Scheduler, FakeGraphs]) -> None:
    """Two slots have pages for their texts to grow. Who is sent back is the least important, not the youngest."""
    scheduler, graphs = world
    graphs.has_room = lambda size, states: sum(len(state.tokens) for state in states.values()) < 150  # type: ignore[method-assign]
    states = [RequestState.of(Request([n + 1] * 40, SamplingParams(max_tokens=40))) for n in range(4)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state, priority=int(number < 3)))
    ended = list[int]()
    while not scheduler.is_idle:
        scheduler.round()
        ended += [number for number, state in enumerate(states) if state.is_finished and number not in ended]
        assert 3 not in scheduler._waiting
        scheduler.check_integrity()
    assert scheduler.num_preempted > 0 and ended[0] == 3
    assert [state.output_ids for state in states] == [text_of([n + 1] * 40, 40) for n in range(4)]


def test_pieces_of_important_prompts_are_read_first() -> None:
    def seat(number: int, priority: int) -> Seat:
        state = RequestState.of(Request([1] * (2 * PIECE_LEN + 1), SamplingParams(max_tokens=2)))
        return Seat(number, state, rank=(priority, number))

    seats = {0: seat(0, 1), 1: seat(1, 1), 2: seat(2, 0)}
    assert device_seats.next_pieces(seats, 3) == [(2, 0), (2, PIECE_LEN), (0, 0)]
    assert device_seats.next_pieces(seats, 4) == [(0, PIECE_LEN), (1, 0), (1, PIECE_LEN)]
