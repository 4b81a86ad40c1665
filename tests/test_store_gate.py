"""How many requests at once: the rule against simulated servers, and the gate with real threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from zarrckpt._store._gate import DISTANT, LEAST, MOST, START, Gate, Pace
from zarrckpt._store._retries import Retries


def simulate(
    seconds: Callable[[int], float],
    count: int,
    refuses: Callable[[int], bool] = lambda busy: False,
    nbytes: Callable[[int], int] = lambda number: 1 << 20,
) -> list[int]:
    """The limit after each request. ``seconds`` and ``refuses`` are told how many requests are under way."""
    rng, pace, now, number = random.Random(0), Pace(), 0.0, 0
    under_way: list[tuple[float, float, int, bool]] = []
    limits: list[int] = []
    while number < count or under_way:
        while number < count and len(under_way) < pace.limit:
            busy = len(under_way) + 1
            refused = refuses(busy)
            takes = 0.01 if refused else seconds(busy) * rng.uniform(0.9, 1.1)
            heapq.heappush(under_way, (now + takes, now, nbytes(number), refused))
            number += 1
        full = len(under_way) >= pace.limit
        now, began, size, refused = heapq.heappop(under_way)
        pace.done(now, now - began, size, not refused, full)
        limits.append(pace.limit)
    return limits


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


class TestPace:
    def test_waiting_for_the_network_raises_the_limit_within_a_few_rounds(self) -> None:
        limits = simulate(lambda busy: 0.2, 300)
        assert limits[1] == DISTANT
        assert limits[5 * DISTANT] == MOST
        assert limits[-1] == MOST

    def test_one_slow_answer_does_not_make_a_server_distant(self) -> None:
        # The first one waits for a connection, and on a busy machine for its thread.
        pace = Pace()
        for number, seconds in enumerate((0.05, 0.001, 0.02, 0.001)):
            pace.done(number * 0.1, seconds, 100, ok=True, full=False)
            pace.idle(number * 0.1)
            assert pace.limit == START

    def test_a_server_nearby_gets_few_requests(self) -> None:
        limits = simulate(lambda busy: 0.001 * busy, 2000)
        assert limits[0] == START
        assert mean(limits) < 1.5 * START

    def test_a_server_nearby_that_only_waits_gets_more(self) -> None:
        assert mean(simulate(lambda busy: 0.004, 2000)[500:]) > 40

    def test_a_machine_that_is_busy_is_left_as_it_is(self) -> None:
        assert mean(simulate(lambda busy: 0.01 * busy, 2000)) < 1.2 * DISTANT

    def test_a_line_that_is_full_ends_the_rise(self) -> None:
        limits = simulate(lambda busy: 0.2 * max(1.0, busy / 40), 2000)
        assert 44 <= mean(limits[200:]) <= 52

    def test_refusals_above_what_a_server_bears(self) -> None:
        limits = simulate(lambda busy: 0.2, 3000, lambda busy: busy > 24)
        assert 14 <= mean(limits[500:]) <= 26

    def test_a_server_that_refuses_most_gets_few_requests_but_some(self) -> None:
        rng = random.Random(1)
        limits = simulate(lambda busy: 0.05, 1000, lambda busy: rng.random() < 0.5)
        assert mean(limits[200:]) < 16
        assert min(limits) >= LEAST

    def test_accidents_do_not_slow_it_down(self) -> None:
        rng = random.Random(2)
        limits = simulate(lambda busy: 0.1, 3000, lambda busy: rng.random() < 0.01)
        assert mean(limits[500:]) > DISTANT

    def test_it_recovers_when_the_trouble_is_over(self) -> None:
        seen = iter(range(10**9))
        limits = simulate(lambda busy: 0.1, 3000, lambda busy: next(seen) < 300)
        assert min(limits[:300]) == LEAST
        assert limits[-1] == MOST

    def test_large_requests_after_small_ones_are_no_loss(self) -> None:
        def nbytes(number: int) -> int:
            return 600 if number < 200 else 16 << 20

        limits = simulate(lambda busy: 0.1, 600, nbytes=nbytes)
        assert min(limits[150:]) == MOST

    def test_nothing_is_learnt_where_fewer_requests_come_than_may_go(self) -> None:
        pace = Pace()
        for number in range(500):
            pace.done(number * 0.1, 0.1, 1 << 20, True, False)
        assert pace.limit == DISTANT


class _Busy:
    """Counts who is inside."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()

    def enter(self, count: int = 1) -> None:
        with self.lock:
            self.now += count
            self.most = max(self.most, self.now)

    def leave(self, count: int = 1) -> None:
        with self.lock:
            self.now -= count


class TestGate:
    @pytest.mark.parametrize("fixed", [1, 3, 64])
    def test_a_fixed_number_is_reached_and_never_exceeded(self, fixed: int) -> None:
        gate, busy, reached = Gate(fixed), _Busy(), threading.Event()

        def work(number: int) -> None:
            with gate.slot(100, at_most=4 if number % 3 == 0 else 1) as slot:
                busy.enter(slot.count)
                if busy.most >= fixed:
                    reached.set()
                # Nobody leaves before so many are inside, however slowly the machine starts threads.
                reached.wait(20)
                reached.set()
                time.sleep(0.002)
                slot.failed = number % 5 == 0
                busy.leave(slot.count)

        with ThreadPoolExecutor(80) as pool:
            list(pool.map(work, range(400)))
        assert busy.most == fixed == gate.limit

    def test_it_opens_for_requests_that_wait(self) -> None:
        gate, busy = Gate(), _Busy()

        def work(_: int) -> None:
            with gate.slot(100):
                busy.enter()
                time.sleep(0.03)
                busy.leave()

        with ThreadPoolExecutor(MOST) as pool:
            list(pool.map(work, range(400)))
        assert START < busy.most <= MOST

    def test_it_closes_on_failures(self) -> None:
        gate = Gate()

        def work(_: int) -> None:
            with gate.slot(100) as slot:
                time.sleep(0.001)
                slot.failed = True

        with ThreadPoolExecutor(MOST) as pool:
            list(pool.map(work, range(300)))
        assert gate.limit == LEAST

    def test_who_is_interrupted_when_woken_wakes_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, calls, interrupted, through = Gate(1), itertools.count(), threading.Event(), threading.Event()
        wait = gate._changed.wait

        def woken(timeout: float | None = None) -> bool:
            first = next(calls) == 0
            found = wait(timeout)
            if first:
                interrupted.set()
                raise KeyboardInterrupt
            return found

        def work() -> None:
            with contextlib.suppress(KeyboardInterrupt), gate.slot(1):
                through.set()

        monkeypatch.setattr(gate._changed, "wait", woken)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        with gate.slot(1):
            for count, thread in enumerate(threads, 1):
                thread.start()
                while gate._waiting < count:
                    time.sleep(0.001)
        # The first of them was told that the slot is free, and did not take it.
        assert interrupted.wait(60) and through.wait(60)

    def test_an_error_inside_gives_the_slot_back(self) -> None:
        gate = Gate(1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError), gate.slot(1):
                raise ZeroDivisionError
        with gate.slot(1, at_most=4) as slot:
            assert slot.count == 1


class TestRetries:
    @staticmethod
    def rules(most: int, timeout: float = 300.0) -> Retries:
        return Retries(most, timeout, first_pause=0.1, longest_pause=1.0, base=2.0)

    @pytest.mark.parametrize("most", range(12))
    def test_all_attempts_together_are_as_many_as_configured(self, most: int) -> None:
        rules = self.rules(most)
        own, last = rules.quick, rules.left + 1 if rules.left >= 0 else 0
        assert own + last == most + 1
        assert len([*rules.pauses()]) == (own if last else own - 1)

    def test_pauses_grow_up_to_the_longest_with_full_jitter(self) -> None:
        rules = Retries(50, 300.0, first_pause=0.1, longest_pause=0.2, base=2.0)
        rounds = [[*rules.pauses()] for _ in range(400)]
        for place, longest in enumerate((0.1, 0.2, 0.2)):
            seen = [pauses[place] for pauses in rounds]
            assert 0 <= min(seen) < 0.2 * longest
            assert 0.8 * longest < max(seen) <= longest

    def test_no_attempt_begins_after_the_timeout(self) -> None:
        pauses = self.rules(8, timeout=0.01).pauses()
        next(pauses)
        time.sleep(0.02)
        assert next(pauses, None) is None
