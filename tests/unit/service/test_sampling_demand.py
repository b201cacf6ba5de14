"""The interval is fine while a living consumer needs it, and never held by the dead."""

import random
from collections.abc import Callable

import pytest

from wattspan.model import MILLISECOND, SECOND, Consumer, TickCounts
from wattspan.service.sampling_demand import (
    FINE,
    MAX_SLEEP,
    MAX_SPAN_EXPIRY,
    QUERY_TIME,
    RECENT,
    REST,
    SPAN_EXPIRY,
    START,
    WINDOW_EXPIRY,
    Intervals,
    Reason,
    RecentTicks,
    SamplingDemand,
    Ticker,
    fixed,
)
from wattspan.testing import ManualClock


class Host:
    """A demand after the start of the agent, and the processes that run."""

    def __init__(self, intervals: Intervals | None = None) -> None:
        self.clock, self.running = ManualClock(), set[Consumer]()
        self.lookups = 0
        self.demand = SamplingDemand(self.clock, intervals or Intervals(), self.has_ended)
        self.clock.advance(ns=START)

    def has_ended(self, process: Consumer) -> bool:
        self.lookups += 1
        return process not in self.running

    def start(self, pid: int) -> Consumer:
        process = Consumer(pid, 1)
        self.running.add(process)
        return process

    def register(self, process: Consumer, reason: Reason = Reason.WINDOWS, user: int = 7) -> None:
        self.demand.register(reason, process, user)

    @property
    def interval(self) -> int:
        return self.demand.interval(self.clock.monotonic())

    def fine_time(self, most: int = 2 * WINDOW_EXPIRY) -> int:
        """The time until the agent rests, to a second."""
        began = self.clock.monotonic()
        while self.interval == FINE and self.clock.monotonic() - began < most:
            self.clock.advance(1)
        return self.clock.monotonic() - began


def test_agent_rests_after_its_start_without_consumers() -> None:
    clock = ManualClock()
    demand = SamplingDemand(clock, Intervals())
    assert demand.interval(clock.monotonic()) == FINE
    assert demand.reasons()["start"] == 1
    clock.advance(ns=START)
    assert demand.interval(clock.monotonic()) == REST
    assert set(demand.reasons().values()) == {0}
    assert demand.reasons().keys() == {one.value for one in Reason}


def test_hold_lasts_for_its_duration_and_a_shorter_one_does_not_end_it() -> None:
    host = Host()
    host.demand.hold(Reason.QUERY, QUERY_TIME)
    host.demand.hold(Reason.QUERY, MILLISECOND)
    assert host.demand.reasons()["query"] == 1
    assert host.fine_time() == QUERY_TIME


def test_process_that_dies_releases_the_fine_interval_within_a_second() -> None:
    host = Host()
    process = host.start(1)
    host.register(process)
    assert host.interval == FINE
    host.clock.advance(30)
    assert host.interval == FINE
    host.running.clear()
    assert host.fine_time() <= SECOND
    assert host.demand.reasons()["windows"] == 0


def test_registration_of_a_process_that_is_dead_already_counts_for_nothing() -> None:
    host = Host()
    host.register(Consumer(1, 1))
    assert host.interval == REST


def test_registration_for_windows_expires_without_renewal() -> None:
    host = Host()
    process = host.start(1)
    host.register(process)
    assert host.fine_time() == WINDOW_EXPIRY
    host.register(process)
    assert host.interval == FINE


@pytest.mark.parametrize(
    ("period", "expected"),
    [(1, SPAN_EXPIRY), (30, 90 * SECOND), (400, MAX_SPAN_EXPIRY)],
)
def test_spans_are_expected_for_three_learned_periods(period: int, expected: int) -> None:
    host = Host()
    process = host.start(1)
    for _ in range(4):
        host.clock.advance(period)
        host.register(process, Reason.SPANS)
    assert host.fine_time() == expected


@pytest.mark.parametrize("period", [20, 60, 150, 500])
def test_sender_with_a_long_period_is_served_after_its_second_batch(period: int) -> None:
    host = Host()
    process = host.start(1)
    for batch in range(5):
        for _ in range(20):  # requests of one batch
            host.register(process, Reason.SPANS)
            host.clock.advance(0.05)
        for _ in range(period - 1):
            fine = host.interval == FINE
            assert fine or batch == 0
            host.clock.advance(1)
    host.running.clear()
    assert host.fine_time() <= SECOND


def test_memory_of_the_periods_of_senders_is_bounded_and_divided_fairly() -> None:
    host = Host()
    for pid in range(1, 3000):
        host.register(host.start(pid), Reason.SPANS)
    host.clock.advance(ns=SPAN_EXPIRY)
    assert host.fine_time() <= 20 * SECOND
    assert host.demand.reasons()["spans"] == 0
    victim = host.start(5000)
    host.register(victim, Reason.SPANS, user=8)
    assert host.fine_time() == SPAN_EXPIRY
    host.clock.advance(5)
    for pid in range(1, 3000):
        host.register(Consumer(pid, 1), Reason.SPANS)
    host.register(victim, Reason.SPANS, user=8)
    host.running = {victim}
    assert host.fine_time() == 60 * SECOND


def test_pausing_senders_take_no_place_of_another_process_of_their_user() -> None:
    host = Host()
    for pid in range(1, 1025):
        host.register(host.start(pid), Reason.SPANS)
    host.clock.advance(ns=SPAN_EXPIRY)
    assert host.fine_time() <= 20 * SECOND
    for reason, lasts in ((Reason.SPANS, SPAN_EXPIRY), (Reason.WINDOWS, WINDOW_EXPIRY)):
        host.register(host.start(lasts), reason)
        assert host.fine_time() >= lasts


def test_ended_processes_of_a_user_do_not_displace_its_living_one() -> None:
    host = Host()
    host.register(host.start(1))
    for pid in range(2, 3002):
        host.register(Consumer(pid, 1), (Reason.SPANS, Reason.WINDOWS)[pid % 2])
        host.clock.advance(0.05)
        assert host.interval == FINE
    assert host.fine_time() == WINDOW_EXPIRY - 150 * SECOND


def test_full_pool_replaces_the_longest_unseen_process_of_the_same_user() -> None:
    host = Host()
    for pid in range(1, 1026):
        host.register(host.start(pid))
    host.running = {Consumer(1025, 1)}
    assert host.fine_time() == WINDOW_EXPIRY
    assert host.demand.reasons()["windows"] == 0


def test_thousand_dead_processes_before_a_living_one_are_passed_in_bounded_steps() -> None:
    host = Host()
    for pid in range(1, 1001):
        host.register(Consumer(pid, 1))
    living = host.start(2000)
    host.register(living)
    before, checks = host.lookups, 0
    while host.demand.reasons()["windows"] > 1:
        assert host.interval == FINE
        host.clock.advance(1)
        checks += 1
    assert 10 < checks < 20
    assert host.lookups - before <= 64 * (checks + 1)
    host.running.clear()
    assert host.fine_time() <= SECOND


def test_user_with_thousands_of_processes_does_not_displace_that_of_another() -> None:
    host = Host()
    victim = host.start(1)
    host.register(victim, user=1)
    for pid in range(10, 5000):
        host.register(Consumer(pid, 1), user=2)
    assert host.demand.reasons()["windows"] == 1024
    for _ in range(20):
        assert host.interval == FINE
        host.clock.advance(1)
    host.running.remove(victim)
    assert host.fine_time() <= 20 * SECOND
    assert host.demand.reasons()["windows"] == 0


def test_fixed_interval_ignores_consumers() -> None:
    clock = ManualClock()
    demand = fixed(clock, 3 * SECOND)
    demand.hold(Reason.QUERY, QUERY_TIME)
    assert demand.interval(clock.monotonic()) == 3 * SECOND


def test_sleep_ends_at_once_when_a_consumer_comes_while_the_agent_rests() -> None:
    host = Host()
    assert host.interval == REST
    host.demand.hold(Reason.QUERY, QUERY_TIME)
    host.demand.sleep_until(host.clock.monotonic() + 3600 * SECOND)  # hangs if it does not
    assert host.interval == FINE
    host.demand.wake()
    host.demand.sleep_until(host.clock.monotonic() + 3600 * SECOND)


@pytest.mark.parametrize("seed", range(20))
def test_random_consumers_are_always_served_and_the_dead_never_for_long(seed: int) -> None:
    draw, host = random.Random(seed), Host()
    until: dict[Consumer, int] = {}
    for pid in range(1, 300):
        host.clock.advance(draw.choice([0.05, 1, 20]))
        now = host.clock.monotonic()
        match draw.randrange(4):
            case 0:
                process = host.start(pid)
                host.register(process)
                until[process] = now + WINDOW_EXPIRY
            case 1 if host.running:
                process = draw.choice(sorted(host.running))
                host.register(process)
                until[process] = now + WINDOW_EXPIRY
            case 2 if host.running:
                host.running.remove(draw.choice(sorted(host.running)))
            case _:
                pass
        if any(end > now for process, end in until.items() if process in host.running):
            assert host.interval == FINE
    host.running.clear()
    assert host.fine_time() <= 5 * SECOND


# -------------------------------------------------------------------------------------------- ticks


def constantly(interval: int) -> Callable[[int], int]:
    return lambda now: interval


def test_ticks_are_multiples_of_the_interval_for_any_work_time() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, constantly(SECOND))
    for work in (0.1, 0.7, 0.3):
        clock.advance(work)
        ticker.wait()
    assert clock.monotonic() == 3 * SECOND
    assert (ticker.ticks, ticker.missed) == (3, 0)


def test_missed_ticks_are_counted_and_not_repeated() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, constantly(SECOND))
    clock.advance(3.4)
    ticker.wait()
    assert clock.monotonic() == round(3.4 * SECOND)
    assert ticker.missed == 2
    ticker.wait()
    assert clock.monotonic() == 4 * SECOND
    assert (ticker.ticks, ticker.missed) == (2, 2)


def test_stop_interrupts_a_long_wait() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, constantly(60 * SECOND))
    ticker.wait(lambda: clock.monotonic() >= SECOND)
    assert SECOND <= clock.monotonic() <= SECOND + MAX_SLEEP


class Waking:
    """Sleeps that end early at given times, at which the interval becomes shorter."""

    def __init__(self, clock: ManualClock, *wakes: tuple[int, int]) -> None:
        self.clock, self.wakes, self.interval = clock, [*wakes], SECOND

    def sleep_until(self, mono: int) -> None:
        if self.wakes and self.wakes[0][0] < mono:
            at, self.interval = self.wakes.pop(0)
            mono = at
        self.clock.sleep_until(mono)


def test_shorter_interval_counts_at_once_and_a_longer_one_from_the_next_tick() -> None:
    clock, times = ManualClock(mono=0), list[int]()
    waking = Waking(clock, (1_050 * MILLISECOND, SECOND // 10), (2_700 * MILLISECOND, SECOND // 10))
    ticker = Ticker(clock, lambda now: waking.interval, waking.sleep_until)
    for rest in (0, 0, 0, 0, 1, 0, 0):
        ticker.wait()
        times.append(clock.monotonic() // MILLISECOND)
        waking.interval = SECOND if rest else waking.interval
    # Woken 50 ms after a tick, it waits for the rest of 100 ms; 400 ms after one, it ticks at once.
    assert times == [1000, 1100, 1200, 1300, 1400, 2400, 2700]
    assert ticker.missed == 0


def test_consumer_that_comes_during_a_slow_poll_at_rest_makes_no_missed_ticks() -> None:
    clock = ManualClock(mono=0)
    waking = Waking(clock)
    ticker = Ticker(clock, lambda now: waking.interval)
    ticker.wait()
    clock.advance(0.9)  # a poll
    waking.interval = SECOND // 10
    for expected in (1900, 2000, 2100):
        ticker.wait()
        assert (clock.monotonic() // MILLISECOND, ticker.missed) == (expected, 0)
    waking.interval = SECOND
    ticker.wait()
    clock.advance(3.4)
    waking.interval = SECOND // 10
    ticker.wait()
    assert (clock.monotonic() // MILLISECOND, ticker.missed) == (6500, 2)


def test_counts_are_those_of_the_last_minute() -> None:
    recent = RecentTicks()
    assert recent.counts(SECOND) == TickCounts(0, 0, 0)
    recent.add(1 * SECOND, 2, 300 * MILLISECOND)
    recent.add(1 * SECOND + 1, 0, 5 * MILLISECOND)
    recent.add(40 * SECOND, 1, 200 * MILLISECOND)
    assert recent.counts(41 * SECOND) == TickCounts(6, 3, 300 * MILLISECOND)
    assert recent.counts(RECENT + 2 * SECOND) == TickCounts(2, 1, 200 * MILLISECOND)
    assert recent.counts(RECENT + 41 * SECOND) == TickCounts(0, 0, 0)
