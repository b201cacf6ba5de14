"""Several boards in one thread: the phases of their counters, and short windows from the start on.

The truth is the law of each counter: constant power, and the times of its moves.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

import pynvml
import pytest
from testbed.fake_nvml import FakeGpu
from testbed.metered_curve import MeteredCurve
from testbed.nvml_bench import COUNTER, STEP, Bench

from wattspan.attribution.energy_curve import CurveEnergy
from wattspan.model import MILLISECOND, SECOND
from wattspan.sources.gpu.counter_edges import EDGE_GUARD, SEARCH_CALLS

WATTS = 300
WINDOW = 120 * MILLISECOND
KNOWN = 3.0  # seconds from the start to the phases of eight boards
SAMPLES, CHECKS = 10, 7  # reads of a board in a second, without a search


class Counter(NamedTuple):
    """The times at which one counter moves."""

    edges: Sequence[int]

    @classmethod
    def of(cls, phase: int, period: int = STEP, drift: int = 0) -> Counter:
        """Each period is ``drift`` nanoseconds longer than the one before."""
        periods = accumulate(repeat(drift, 30 * SECOND // period), initial=period)
        return cls([*accumulate(periods, initial=phase - 2 * SECOND)])

    def edge(self, at: int) -> int:
        return self.edges[bisect_right(self.edges, at) - 1]


class Boards:
    """A bench of boards with counters of their own, and the energy of each by the readings."""

    def __init__(self, counters: Sequence[Counter], latency: int = 60_000, jitter: int = 0) -> None:
        """``latency`` is that of each call, ``jitter`` the mean delay of the thread."""
        self.bench = Bench(*(FakeGpu(f"GPU-{i}", watts=WATTS) for i in range(len(counters))))
        self.clock, draw = self.bench.clock, random.Random(1)
        start = self.start = self.clock.monotonic()
        self.counters = {
            gpu.uuid: Counter([start + edge for edge in counter.edges])
            for gpu, counter in zip(self.bench.gpus, counters, strict=True)
        }
        self.reads: dict[str, list[int]] = {uuid: [] for uuid in self.counters}
        for gpu in self.bench.gpus:
            gpu.latency = latency
        self.bench.nvml.answers[COUNTER] = self._energy
        self._late: Callable[[], int] = lambda: int(draw.expovariate(1 / jitter)) if jitter else 0

    def _energy(self, _nvml: object, gpu: FakeGpu) -> int:
        at = self.clock.monotonic()
        self.reads[gpu.uuid].append(at)
        return (self.counters[gpu.uuid].edge(at) - self.start + 10 * SECOND) * WATTS // MILLISECOND

    def run(self, seconds: float, interval: int = STEP) -> None:
        self.bench.live(seconds, interval, self._late)

    def known(self, uuid: str) -> float | None:
        """Seconds from the start until the phase of a counter was known."""
        times = [
            one.at.mono
            for one in self.bench.readings
            if one.domain_id == f"gpu:{uuid}" and one.stale is not None
        ]
        return (times[0] - self.start) / SECOND if times else None

    def windows(self, uuid: str, since: float, until: float, length: int) -> list[CurveEnergy]:
        """The energies of windows that begin between two times."""
        curve = MeteredCurve(self.bench.domain(uuid), 10 * SECOND)
        for reading in self.bench.readings:
            if reading.domain_id == f"gpu:{uuid}":
                curve.read(reading)
        first, last = (self.start + round(at * SECOND) for at in (since, until))
        first = max(first, curve.begun)
        return [curve.between(at, at + length) for at in range(first, last, 17 * MILLISECOND)]

    def errors(self, uuid: str, since: float, until: float) -> tuple[float, float]:
        """Of windows: the largest relative error, and the part with the truth in the stated."""
        true = WATTS * WINDOW // 1000
        found = self.windows(uuid, since, until, WINDOW)
        off = [abs(one.energy - true) for one in found]
        within = [a <= one.uncertainty for a, one in zip(off, found, strict=True)]
        return max(off) / true, sum(within) / len(within)

    def check(self, uuid: str, *, end: float, known: float = KNOWN) -> None:
        """The phase is known in time; windows are right after that, and within the stated."""
        found = self.known(uuid)
        assert found is not None
        assert found <= known
        worst, within = self.errors(uuid, 0.2, end - 0.5)
        assert within >= 0.99
        worst, _ = self.errors(uuid, known, end - 0.5)
        assert worst <= 2 * EDGE_GUARD / WINDOW


def even(count: int) -> list[Counter]:
    return [Counter.of(i * STEP // count) for i in range(count)]


def spread(count: int, seed: int, period: int = STEP, drift: int = 0) -> list[Counter]:
    draw = random.Random(seed)
    return [Counter.of(draw.randrange(STEP), period, drift) for _ in range(count)]


@pytest.mark.parametrize(("latency", "jitter"), [(60_000, 0), (60_000, 2), (500_000, 1)])
@pytest.mark.parametrize(
    "counters",
    [
        *(pytest.param(even(count), id=f"{count} even") for count in (1, 2, 4, 8, 16)),
        *(pytest.param(spread(8, seed), id=f"8 random, seed {seed}") for seed in range(4)),
        pytest.param([Counter.of(0)] * 8, id="8 equal at the sample"),
        pytest.param([Counter.of(51 * MILLISECOND)] * 8, id="8 equal inside"),
        pytest.param(spread(8, 5, 104_300_000), id="8 of a longer period"),
        pytest.param(spread(8, 6, 99_700_000, 2_000), id="8 of rising periods"),
        pytest.param(spread(8, 7, 100_400_000, -2_000), id="8 of falling periods"),
        pytest.param([*even(4), *spread(4, 8, 20 * MILLISECOND)], id="4 of 100 ms, 4 of 20 ms"),
    ],
)
def test_phases_are_known_soon_and_windows_are_within_the_stated(
    counters: list[Counter], latency: int, jitter: int
) -> None:
    boards = Boards(counters, latency, jitter * MILLISECOND)
    boards.run(9)
    for (uuid, reads), counter in zip(boards.reads.items(), counters, strict=True):
        if counter.edges[1] - counter.edges[0] > 30 * MILLISECOND:
            boards.check(uuid, end=9)
        else:
            worst, within = boards.errors(uuid, 0.2, 8.5)
            assert (worst <= 0.2, within) == (True, 1.0)
            assert boards.known(uuid) is None
        assert len(reads) <= SEARCH_CALLS + 9 * (2 * SAMPLES + CHECKS)


def test_reading_near_an_edge_is_replaced_by_one_after_it() -> None:
    """Each board has its own deadline: no sample of any board is left without a reading."""
    boards = Boards(even(8), jitter=MILLISECOND)
    boards.run(3)
    before = len(boards.bench.readings)
    boards.run(10)
    assert len(boards.bench.readings) - before >= 0.98 * 8 * 10 * SAMPLES
    for uuid, counter in boards.counters.items():
        mine = [one for one in boards.bench.readings if one.domain_id == f"gpu:{uuid}"]
        stamped = [one for one in mine if one.stale is not None]
        off = [one.at.mono - counter.edge(one.at.mono + STEP // 2) for one in stamped]
        assert max(map(abs, off)) <= 2 * EDGE_GUARD


@pytest.mark.parametrize(("slow", "known"), [(6 * MILLISECOND, KNOWN), (25 * MILLISECOND, 6.0)])
def test_slow_board_leaves_time_for_the_phases_of_others(slow: int, known: float) -> None:
    """Its calls take the time of the thread; its samples are fewer, and it is not searched."""
    boards = Boards(even(8))
    boards.bench.gpus[0].latency = slow
    boards.run(9)
    for uuid in [*boards.reads][1:]:
        boards.check(uuid, end=9, known=known)
    assert boards.known("GPU-0") is None
    assert boards.errors("GPU-0", 0.2, 8.5)[1] >= 0.99
    assert len(boards.reads["GPU-0"]) <= 9 * SAMPLES + 10


@pytest.mark.parametrize("latency", [6, 30, 100])
def test_slow_board_at_rest_is_read_at_every_sample(latency: int) -> None:
    boards = Boards(even(4), jitter=MILLISECOND)
    boards.bench.gpus[2].latency = latency * MILLISECOND
    boards.run(20, SECOND)
    times = [one.at.mono for one in boards.bench.readings if one.domain_id == "gpu:GPU-2"]
    apart = [later - before for before, later in pairwise(times[5:])]
    assert max(apart) < 3 * SECOND // 2


def test_board_that_was_slow_for_a_while_is_searched_later() -> None:
    boards = Boards(even(8))
    boards.bench.gpus[3].latency = 25 * MILLISECOND
    boards.run(5)
    boards.bench.gpus[3].latency = 0
    boards.run(4)
    boards.check("GPU-3", end=9, known=5 + KNOWN)


def test_board_that_appears_later_is_searched_then() -> None:
    boards = Boards(even(8))
    boards.bench.nvml.errors["GPU-5"] = pynvml.NVML_ERROR_GPU_IS_LOST
    boards.run(5)
    assert boards.known("GPU-5") is None
    boards.bench.nvml.errors.clear()
    boards.run(15)
    answered = (boards.reads["GPU-5"][0] - boards.start) / SECOND
    for uuid in boards.reads:
        known = boards.known(uuid)
        assert known is not None
        assert known <= (answered + KNOWN if uuid == "GPU-5" else KNOWN)
    assert boards.errors("GPU-5", answered + KNOWN, 19.5)[0] <= 2 * EDGE_GUARD / WINDOW


def test_board_that_goes_leaves_the_phases_of_others() -> None:
    boards = Boards(even(8))
    boards.run(2)
    boards.bench.nvml.errors["GPU-0"] = pynvml.NVML_ERROR_GPU_IS_LOST
    boards.run(7)
    for uuid in [*boards.reads][1:]:
        boards.check(uuid, end=9)


def test_windows_from_a_rest_on_are_within_the_stated() -> None:
    """At rest the phases are forgotten; what is known later says nothing of the readings then."""
    boards = Boards(even(8))
    boards.run(4)
    boards.run(10, SECOND)
    boards.run(4)
    for uuid in boards.reads:
        assert boards.errors(uuid, 0.2, 17.5)[1] >= 0.99
        assert boards.errors(uuid, 15.5, 17.5)[0] <= 2 * EDGE_GUARD / WINDOW


@pytest.mark.parametrize("jitter", [1, 2])
@pytest.mark.parametrize("interval", [STEP, STEP // 5])
@pytest.mark.parametrize("counters", [[Counter.of(0)] * 8, even(8)])
def test_no_window_is_without_energy_while_the_phases_are_unknown(
    counters: list[Counter], interval: int, jitter: int
) -> None:
    """Neither from the start on, nor after a rest: a value that repeats is no reading."""
    boards, short = Boards(counters, jitter=jitter * MILLISECOND), MILLISECOND // 20
    boards.run(3, interval)
    boards.run(5, SECOND)
    boards.run(3, interval)
    for uuid in boards.reads:
        for one in boards.windows(uuid, 0.2, 10.5, short):
            assert one.energy > 0
            assert abs(one.energy - WATTS * short // 1000) <= one.uncertainty


@pytest.mark.parametrize("counters", [even(1), even(8), [Counter.of(0)] * 16])
def test_reads_at_rest_are_those_of_the_samples_and_of_power(counters: list[Counter]) -> None:
    boards = Boards(counters)
    boards.run(3, SECOND)
    before = {uuid: len(reads) for uuid, reads in boards.reads.items()}
    boards.run(10, SECOND)
    # Power is read five times a second until the counter was compared with it.
    assert {len(reads) - before[uuid] for uuid, reads in boards.reads.items()} <= {50, 51}


def test_boards_of_expensive_calls_are_searched_together() -> None:
    """The thread is busy for half of the time."""
    boards = Boards(even(8), latency=MILLISECOND)
    boards.run(9)
    for uuid in boards.reads:
        boards.check(uuid, end=9)
