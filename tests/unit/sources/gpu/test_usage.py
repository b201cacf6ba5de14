"""Usage of an AMD GPU: engine time first, the rest by occupied compute units."""

from __future__ import annotations

from collections.abc import Mapping

from wattspan.model import SECOND, Consumer, Instant, Payer, Usage
from wattspan.sources.gpu.usage import (
    REMEMBERED_SAMPLES,
    ActivityMeter,
    ProcessActivity,
)

A, B = Consumer(1, 1), Consumer(2, 1)


class Meter:
    """A meter with one record a second."""

    def __init__(self) -> None:
        self.now = 0
        self.meter = ActivityMeter("gpu:x", self.at)
        self.meter.usage(self.at, [])

    @property
    def at(self) -> Instant:
        return Instant(self.now, self.now)

    def record(self, busy: int | None, *processes: ProcessActivity | None) -> Usage:
        self.now += SECOND
        self.meter.observe_device(self.now, busy)
        usage = self.meter.usage(self.at, None if processes == (None,) else processes)
        assert usage.capacity == SECOND
        return usage


def compute(payer: Consumer | None, units: int | None, pid: int | None = None) -> ProcessActivity:
    return ProcessActivity(pid or (payer.pid if payer else 9), payer, 0, units)


def graphics(payer: Consumer, engine: int) -> ProcessActivity:
    return ProcessActivity(payer.pid, payer, engine, None)


def spent(usage: Usage) -> Mapping[Payer, int]:
    assert usage.busy <= (usage.capacity or 0)
    return usage.spent


def test_busy_time_is_divided_by_occupied_units() -> None:
    meter = Meter()
    for _ in range(3):
        usage = meter.record(60, compute(A, 200), compute(B, 100))
        assert spent(usage) == {A: 400_000_000, B: 200_000_000}
        assert usage.unclaimed == 0
        assert usage.present == {A, B}


def test_units_at_both_ends_of_the_period_count() -> None:
    meter = Meter()
    meter.record(100, compute(A, 100), compute(B, 0))
    assert spent(meter.record(100, compute(A, 100), compute(B, 200))) == {
        A: SECOND // 2,
        B: SECOND // 2,
    }


def test_busy_period_without_a_sample_of_use_is_divided_as_the_last_ones() -> None:
    meter = Meter()
    meter.record(100, compute(A, 100), compute(B, 50))
    meter.record(100, compute(A, 0), compute(B, 0))
    usage = meter.record(30, compute(A, 0), compute(B, 0))
    assert spent(usage) == {A: 200_000_000, B: 100_000_000}
    for _ in range(REMEMBERED_SAMPLES):
        usage = meter.record(30, compute(A, 0), compute(B, 0))
    assert usage.unclaimed == 300_000_000


def test_ended_process_takes_part_in_its_last_period_only() -> None:
    meter = Meter()
    meter.record(100, compute(A, 200), compute(B, 100))
    usage = meter.record(100, compute(B, 100))
    assert spent(usage) == {A: SECOND // 2, B: SECOND // 2}
    assert usage.present == {B}
    assert spent(meter.record(100, compute(B, 100))) == {B: SECOND}


def test_process_that_ended_on_the_engine_is_charged_the_rest_of_its_last_period() -> None:
    meter = Meter()
    meter.record(50, graphics(A, 500_000_000))
    assert spent(meter.record(30)) == {A: 300_000_000}
    assert meter.record(30).unclaimed == 300_000_000


def test_engine_time_is_a_processs_own_and_the_rest_is_divided() -> None:
    meter = Meter()
    meter.record(80, graphics(A, 0), compute(B, 30))
    usage = meter.record(80, graphics(A, 500_000_000), compute(B, 30))
    assert spent(usage) == {A: 500_000_000, B: 300_000_000}


def test_engine_time_of_a_new_process_counts_if_it_fits() -> None:
    meter = Meter()
    assert spent(meter.record(40, graphics(A, 400_000_000))) == {A: 400_000_000}
    old = meter.record(40, graphics(A, 400_000_000), graphics(B, 7 * SECOND))
    assert old.unclaimed == 400_000_000  # B's time is from before it was seen


def test_engine_time_that_falls_is_of_another_client_of_the_process() -> None:
    meter = Meter()
    meter.record(50, graphics(A, 500_000_000))
    assert meter.record(50, graphics(A, 100_000_000)).unclaimed == SECOND // 2


def test_late_figure_of_the_device_is_no_use_of_unknown_processes() -> None:
    meter = Meter()
    meter.record(0, graphics(A, 0))
    assert meter.record(40, graphics(A, 800_000_000)).unclaimed == 0
    assert meter.record(40, graphics(A, 800_000_000)).unclaimed == 0


def test_use_by_unknown_processes_is_unclaimed() -> None:
    meter = Meter()
    usage = meter.record(90, compute(A, 100), compute(None, 200))
    assert spent(usage) == {A: 300_000_000}
    assert usage.unclaimed == 600_000_000
    assert usage.present == {A}


def test_all_use_is_unclaimed_without_a_process_list() -> None:
    usage = Meter().record(70, None)
    assert (spent(usage), usage.unclaimed) == ({}, 700_000_000)


def test_unknown_activity_of_the_device_is_divided_as_if_it_was_busy() -> None:
    meter = Meter()
    assert spent(meter.record(None, compute(A, 10))) == {A: SECOND}
    assert spent(meter.record(50, compute(A, 10))) == {A: SECOND // 2}


def test_busy_device_without_occupied_units_is_unclaimed() -> None:
    usage = Meter().record(70, compute(A, None))
    assert usage.unclaimed == 700_000_000
    assert usage.present == {A}


def test_period_without_duration_has_no_record() -> None:
    meter = Meter()
    assert meter.meter.usage(meter.at, [compute(A, 3)]) is None
