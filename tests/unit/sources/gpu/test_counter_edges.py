"""Finding out when a counter moves, from few looks at awkward times."""

from __future__ import annotations

import random

import pytest

from wattspan.model import MILLISECOND, SECOND
from wattspan.sources.gpu.counter_edges import EDGE_GUARD, SEARCH_RETRY_INTERVAL, EdgeDetector

TURN = 100 * MILLISECOND


class Bench:
    """A counter with a step and a phase, and its reading loop, on a manual clock."""

    def __init__(self, period: int, phase: int, *, jitter: int = 0, busy: bool = True) -> None:
        self.finder = EdgeDetector()
        self.period, self.phase, self.busy = period, phase, busy
        self.now = 10 * SECOND
        self.looks = 0
        self.errors: list[int] = []
        self.unclear = 0
        self._draw = random.Random(1)
        self._jitter = jitter
        self._due = self.now

    def edge(self) -> int:
        return self.now - (self.now - self.phase) % self.period

    def run(self, seconds: float) -> None:
        end = self.now + round(seconds * SECOND)
        while self.now < end:
            value = self.edge() // self.period if self.busy else 0
            look = self.finder.next_read(self.now)
            if self.now >= self._due or (look is not None and look <= self.now):
                self.finder.observe(self.now, value)
            if self.now >= self._due:
                self._due += TURN
                made = self.finder.moved_at(self.now)
                if made is not None:
                    self.errors.append(made - self.edge())
                elif self.finder.period is not None:
                    self.unclear += 1
                    self._due += 13 * MILLISECOND
            else:
                self.looks += 1
            look = self.finder.next_read(self.now)
            to = self._due if look is None else min(self._due, look)
            self.now = max(self.now + 1000, to) + self._draw.randint(0, self._jitter)


@pytest.mark.parametrize("phase", [0, 31, 50, 97])
@pytest.mark.parametrize("period", [100 * MILLISECOND, 104_300_000, 99_870_000])
@pytest.mark.parametrize("jitter", [0, 1_500_000])
def test_readings_have_the_timestamp_of_their_value(period: int, phase: int, jitter: int) -> None:
    bench = Bench(period, phase * MILLISECOND, jitter=jitter)
    bench.run(60)
    assert bench.finder.period == pytest.approx(period, rel=0.005)
    assert len(bench.errors) > 300
    # A value is never taken for the one before or after it, and hardly off.
    assert max(map(abs, bench.errors)) <= 2 * EDGE_GUARD
    assert bench.looks < 150 + 8 * 60
    assert bench.unclear < 200


@pytest.mark.parametrize("jitter", [0, 1_500_000])
@pytest.mark.parametrize(
    ("period", "later", "most"),
    [(100, 100, 60), (104.3, 104.3, 60), (100, 150, 170), (150, 75, 170)],
)
def test_forgotten_phase_is_searched_again_and_the_step_stays(
    period: float, later: float, most: int, jitter: int
) -> None:
    """A quarter of the reads find the phase of a step that is the same."""
    bench = Bench(round(period * MILLISECOND), 31 * MILLISECOND, jitter=jitter)
    bench.run(5)
    bench.finder.forget()
    assert bench.finder.period is None
    assert bench.finder.step == pytest.approx(bench.period, rel=0.02)
    assert bench.finder.next_read(bench.now) == bench.now
    bench.period, bench.looks = round(later * MILLISECOND), 0
    bench.phase += 47 * MILLISECOND
    bench.run(1)
    assert bench.looks <= most
    bench.run(1)
    bench.errors.clear()
    bench.run(10)
    assert bench.errors
    assert max(map(abs, bench.errors)) <= 2 * EDGE_GUARD


def test_counter_phase_jump_is_recovered() -> None:
    bench = Bench(100 * MILLISECOND, 0)
    bench.run(10)
    bench.phase += 47 * MILLISECOND
    bench.run(10)
    bench.errors.clear()
    bench.run(10)
    assert len(bench.errors) > 50
    assert max(map(abs, bench.errors)) <= 2 * EDGE_GUARD


def test_continuously_updating_counter_is_read_directly() -> None:
    bench = Bench(20 * MILLISECOND, 0)
    bench.run(10)
    assert bench.finder.period is None
    assert bench.finder.step == pytest.approx(20 * MILLISECOND, rel=0.1)
    assert bench.errors == []


def test_constant_counter_is_not_read_more_often() -> None:
    bench = Bench(100 * MILLISECOND, 0, busy=False)
    bench.run(29)
    assert bench.looks <= 151
    assert bench.finder.step is None
    bench.busy = True
    bench.run(SEARCH_RETRY_INTERVAL / SECOND)
    assert bench.finder.period == pytest.approx(100 * MILLISECOND, rel=0.01)
