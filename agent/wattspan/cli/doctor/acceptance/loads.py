"""A test of the attribution: a full and a half load of one CPU, run at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from wattspan.cli.doctor import failure, note, ok, warning
from wattspan.cli.doctor.acceptance.checks import LOADS, Check, Scalar
from wattspan.cli.formatting import joules_text
from wattspan.cli.measure import MeasurementClient, process_identity
from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock
from wattspan.sdk.client import Measurement

_UNIT_COST = 0.2  # of the joules per CPU-second that two equal loads may differ by
_DUTIES = (1.0, 0.5)
_SLICE = 0.02  # seconds in which a load works for its duty
_PATIENCE = 10.0  # seconds until the period has settled

_LOAD = """
import sys, time
duty, slice, end = float(sys.argv[1]), float(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while (now := time.monotonic()) < end:
    until = time.process_time() + duty * slice
    while time.process_time() < until:
        pass
    time.sleep(max(0.0, now + slice - time.monotonic()))
"""


class _Load(NamedTuple):
    duty: float
    child: subprocess.Popen[bytes]
    consumer: Consumer


class LoadResult(NamedTuple):
    """The CPU time of a load, and the energy that the attribution gives it."""

    duty: float
    cpu_seconds: float
    measured: Measurement


def run_loads(
    client: MeasurementClient, clock: Clock, advance: Callable[[int], object], duration: int
) -> list[LoadResult]:
    """Run a full and a half load at the same time for ``duration`` nanoseconds."""
    start = clock.monotonic()
    loads = [_started(duty, duration) for duty in _DUTIES]
    try:
        for one in loads:
            client.watch(one.consumer)
        while (now := clock.monotonic()) < start + duration:
            clock.sleep_until(min(start + duration, now + SECOND))
            advance(clock.monotonic() - now)
        spent = [_cpu_seconds(one.child) for one in loads]
    finally:
        for one in loads:
            one.child.kill()
            one.child.wait()
    end = clock.monotonic()
    answers = [client.read(one.consumer, start, end, _PATIENCE) for one in loads]
    return [
        LoadResult(one.duty, used, answer)
        for one, used, answer in zip(loads, spent, answers, strict=True)
    ]


def load_checks(results: Sequence[LoadResult]) -> Iterator[Check]:
    """Compare the energies of loads that do the same work.

    A CPU-second of each costs the same, and together they are a part of the host.
    """
    units: list[tuple[float, float]] = []
    for number, (duty, cpu_seconds, answer) in enumerate(results):
        name = f"load {number}"
        energy, error = answer.joules.get("cpu"), answer.joules.uncertainty.get("cpu", 0.0)
        figures: dict[str, Scalar] = {
            "duty": duty,
            "cpu_seconds": round(cpu_seconds, 3),
            "joules": energy,
            "uncertainty_joules": error,
            "certainty": answer.joules.certainty,
            "host_joules": answer.host.get("cpu"),
        }
        if energy is None or not cpu_seconds:
            yield Check(LOADS, name, note(name, "its energy is unknown: no CPU counter"), figures)
            continue
        units.append((energy / cpu_seconds, error / cpu_seconds))
        text = f"{joules_text(energy)} in {cpu_seconds:.1f} s of CPU time, ± {joules_text(error)}"
        yield Check(LOADS, name, ok(name, text), figures)
    if len(units) == len(results):
        yield _comparison(units, [one.measured for one in results])


def _comparison(units: Sequence[tuple[float, float]], answers: Sequence[Measurement]) -> Check:
    (full, full_error), (half, half_error) = units
    total = sum(one.joules["cpu"] for one in answers)
    errors = sum(one.joules.uncertainty.get("cpu", 0.0) for one in answers)
    host = max(one.host.get("cpu", 0.0) for one in answers)
    figures: dict[str, Scalar] = {
        "joules_per_cpu_second_full": round(full, 3),
        "joules_per_cpu_second_half": round(half, 3),
        "part_of_host": round(total / host, 4) if host else None,
    }
    text = (
        f"{full:.2f} and {half:.2f} J per CPU-second; together {joules_text(total)} of the"
        f" host's {joules_text(host)}"
    )
    name = "both"
    if total > host + errors:
        found = failure(name, f"{text}: more than the host", "Attach the report to an issue.")
    elif full_error + half_error > _UNIT_COST * max(full, half):
        unsure = "not judged, because the errors are larger than the difference that counts"
        found = note(name, f"{text}: {unsure}", "Repeat the test while nothing else works.")
    elif abs(full - half) > full_error + half_error + _UNIT_COST * max(full, half):
        remedy = "Repeat the test while nothing else works, and attach the report to an issue."
        found = warning(name, f"{text}: equal work has different costs", remedy)
    else:
        found = ok(name, text)
    return Check(LOADS, name, found, figures)


def _started(duty: float, duration: int) -> _Load:
    words = [sys.executable, "-S", "-c", _LOAD, str(duty), str(_SLICE), str(duration / SECOND)]
    child = subprocess.Popen(words)  # noqa: S603 - this interpreter
    return _Load(duty, child, process_identity(child.pid))


def _cpu_seconds(child: subprocess.Popen[bytes]) -> float:
    """Wait for the end of a child, and return the CPU time that it has used."""
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime
