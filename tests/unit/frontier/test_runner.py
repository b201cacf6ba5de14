"""One trial with a real command, and fakes for the devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from testbed.waiting import eventually

from wattspan.cli.measure import process_identity
from wattspan.clock import SystemClock
from wattspan.frontier.runner import Durations, HeldLimits, TrialRunner, WindowEnergy
from wattspan.frontier.schedule import Planned
from wattspan.frontier.span_units import SpanReceiver
from wattspan.frontier.trials import PowerLimit, Setting, Trial
from wattspan.frontier.work import OutputPattern, SteadyWindow, UnitSpan
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.ports import CapsError, Clock
from wattspan.sdk import MeasurementError
from wattspan.testing import ManualClock

STEPS = "i=0; while :; do i=$((i+1)); echo step $i of {size}; done"
"""A shell that completes steps as fast as it can."""


@dataclass
class ConstantMeter:
    """A device of 100 W."""

    taint: str = ""
    failure: MeasurementError | None = None
    watts: float = 100.0
    commands: list[Consumer] = field(default_factory=list)

    def begin(self, command: Consumer) -> None:
        self.commands.append(command)

    def read(self, command: Consumer, window: SteadyWindow) -> WindowEnergy:
        assert command == self.commands[-1]
        if self.failure is not None:
            raise self.failure
        joules = self.watts * window.seconds
        return WindowEnergy(joules, {"gpu:0": 55.0}, self.taint, {"gpu:0": joules})


@dataclass
class Limits:
    """Remembers the held settings."""

    lost: str = ""
    held: list[Setting] = field(default_factory=list)
    released: int = 0
    refusal: CapsError | None = None

    def watts(self) -> Mapping[str, float]:
        return {"gpu:0": 240.0}

    @contextmanager
    def hold(self, setting: Setting) -> Iterator[HeldLimits]:
        if self.refusal is not None:
            raise self.refusal
        self.held.append(setting)
        yield self
        self.released += 1


SETTING = Setting(PowerLimit(0.8), parameters=(("size", "8"),))
DURATIONS = Durations(warm_up=20 * MILLISECOND, window=100 * MILLISECOND, longest=20 * SECOND)


def trial(
    *command: str,
    meter: ConstantMeter | None = None,
    limits: Limits | None = None,
    durations: Durations = DURATIONS,
    clock: Clock | None = None,
    shown: Callable[[str], object] = lambda line: None,
    units: OutputPattern | SpanReceiver | None = None,
) -> Trial:
    runner = TrialRunner(
        command,
        units or OutputPattern("stdout:step"),
        durations,
        meter or ConstantMeter(),
        (limits or Limits()).hold,
        clock or SystemClock(),
        process_identity,
        shown,
    )
    return runner.run(Planned(SETTING, 2))


def shell(script: str) -> tuple[str, ...]:
    return "sh", "-c", script + " # {size}"


def test_trial_has_time_and_energy_of_whole_units() -> None:
    limits, shown = Limits(), list[str]()
    found = trial("sh", "-c", STEPS, limits=limits, shown=shown.append)
    assert (found.setting, found.block, found.failure, found.taint) == (SETTING, 2, "", "")
    assert 0.1 <= found.seconds < 20
    assert found.elapsed_seconds > found.seconds  # with the warm-up
    assert found.units > 10
    assert found.joules == pytest.approx(100 * found.seconds)
    assert found.unit_seconds == pytest.approx(found.seconds / found.units)
    assert (found.limits, found.temperatures) == ({"gpu:0": 240.0}, {"gpu:0": 55.0})
    assert found.device_watts == pytest.approx({"gpu:0": 100.0})
    assert shown[0] == "step 1 of 8"
    assert (limits.held, limits.released) == ([SETTING], 1)


@pytest.mark.slow
def test_command_and_its_workers_end_with_the_trial(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"(echo $$ > {pids}; trap '' TERM; while :; do :; done) & {STEPS}"
    trial("sh", "-c", script)
    worker = int(pids.read_text())
    eventually(lambda: not _runs(worker), "the worker has ended")


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_failing_command_is_a_failed_trial() -> None:
    found = trial(*shell("echo no memory; exit 3"))
    assert "exit code 3" in found.failure
    assert "no memory" in found.failure
    assert not found.usable


def test_missing_command_is_a_failed_trial() -> None:
    found = trial("no-such-program", "{size}")
    assert (
        found.failure
        == "The command 'no-such-program' cannot be started: no such file or directory."
    )


def test_command_that_ends_too_early_is_a_failed_trial() -> None:
    found = trial(*shell("echo step; echo step"))
    assert "with 2 units of work" in found.failure
    assert "Let it run longer" in found.failure


def test_command_without_units_is_stopped_at_the_limit() -> None:
    quick = Durations(0, 100 * MILLISECOND, 300 * MILLISECOND)
    found = trial(*shell("while :; do echo epoch; done"), durations=quick)
    assert "was stopped" in found.failure
    assert "check --unit" in found.failure
    assert found.elapsed_seconds >= 0.3


def test_unknown_energy_is_a_failed_trial() -> None:
    found = trial("sh", "-c", STEPS, meter=ConstantMeter(failure=MeasurementError("No agent.")))
    assert found.failure == "No agent."


def test_window_without_energy_is_a_failed_trial() -> None:
    found = trial("sh", "-c", STEPS, meter=ConstantMeter(watts=0.0))
    assert found.failure.endswith("no energy in the window.")


def test_tainted_trial_keeps_its_figures() -> None:
    found = trial("sh", "-c", STEPS, meter=ConstantMeter("Others used 40%."))
    assert found.taint == "Others used 40%."
    assert found.units > 0
    assert not found.usable


def test_window_that_becomes_slower_is_marked_and_used() -> None:
    clock, lines = ManualClock(), list[str]()

    def work(line: str) -> None:
        lines.append(line)
        clock.advance(0.05 if len(lines) < 100 else 0.1)

    slow = Durations(warm_up=0, window=10 * SECOND, longest=10**6 * SECOND)
    found = trial("sh", "-c", STEPS, durations=slow, clock=clock, shown=work)
    assert found.seconds == pytest.approx(10, abs=0.2)
    assert "second half of the window" in found.unsteady
    assert found.usable


def test_lost_limit_taints_the_trial() -> None:
    found = trial("sh", "-c", STEPS, limits=Limits("The limit is not held any more."))
    assert found.taint == "The limit is not held any more."


def test_refused_limit_ends_the_study() -> None:
    limits = Limits(refusal=CapsError("GPU 0 is held.", "held"))
    with pytest.raises(CapsError, match="GPU 0 is held"):
        trial("sh", "-c", STEPS, limits=limits)


def test_output_of_python_is_not_buffered() -> None:
    found = trial(
        sys.executable, "-S", "-c", "import time\nwhile {size}: print('step'); time.sleep(.005)"
    )
    assert found.failure == ""


# --------------------------------------------------------------------------------------- spans

SPANS = """
import sys, time
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
size, count = int(sys.argv[1]), int(sys.argv[2])
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("test")
for number in range(count):
    with tracer.start_as_current_span("train_step") as span:
        span.set_attribute("samples", size)
        with tracer.start_as_current_span("forward"):
            time.sleep(0.02)
provider.shutdown()
"""
"""Steps of samples, by OpenTelemetry's SDK and its exporter."""


def of_spans(name: str, attribute: str = "") -> SpanReceiver:
    return SpanReceiver(UnitSpan(name, attribute), SystemClock())


@pytest.mark.slow
def test_work_is_counted_by_the_spans_of_a_running_command() -> None:
    units = of_spans("train_step", "samples")
    found = trial(sys.executable, "-c", SPANS, "{size}", "100000", units=units)
    assert found.failure == ""
    assert 0.1 <= found.seconds < 20
    assert found.units >= 3 * 8
    assert found.units % 8 == 0
    assert found.unit_seconds * 8 >= 0.02  # each step sleeps for that long


RANKS = """
import os, sys, time
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
class Told(OTLPSpanExporter):
    def export(self, spans):
        result = super().export(spans)
        os.write(sent, b".")
        return result
received, sent = os.pipe()
rank = 0 if os.fork() else 1
delay = 3000 if rank else 300
if not rank:
    os.read(received, 1)
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(Told(), schedule_delay_millis=delay))
tracer = provider.get_tracer("test")
with open(sys.argv[1] + "." + str(rank), "w", buffering=1) as ends:
    while True:
        span = tracer.start_span("train_step")
        time.sleep(0.02)
        span.end()
        print(time.monotonic_ns(), file=ends)
"""
"""Two processes: one exports late, the other soon, and begins after the first export.

Each writes the times of its spans' ends.
"""


@dataclass
class WindowMeter(ConstantMeter):
    """Remembers the windows."""

    windows: list[SteadyWindow] = field(default_factory=list)

    def read(self, command: Consumer, window: SteadyWindow) -> WindowEnergy:
        self.windows.append(window)
        return super().read(command, window)


@pytest.mark.exhaustive
def test_spans_of_a_process_that_sends_late_count(tmp_path: Path) -> None:
    meter, times = WindowMeter(), Durations(5 * SECOND, SECOND // 2, 60 * SECOND)
    ranks = (sys.executable, "-c", RANKS, str(tmp_path / "ends"), "{size}")
    found = trial(*ranks, meter=meter, durations=times, units=of_spans("train_step"))
    assert found.failure == ""
    (window,) = meter.windows
    counts = []
    for rank in range(2):
        ends = map(int, (tmp_path / f"ends.{rank}").read_text().splitlines())
        counts.append(sum(window.start < end <= window.end for end in ends))
    assert sum(counts) > 2
    # A line is written just after the end of its span, so each edge may differ by one line.
    assert abs(found.units - sum(counts)) <= 4


@pytest.mark.slow
def test_command_that_closes_its_output_is_measured_by_its_spans() -> None:
    silent = ("sh", "-c", 'exec "$0" "$@" > /dev/null 2>&1')
    steps = (sys.executable, "-c", SPANS, "{size}", "9999")
    found = trial(*silent, *steps, units=of_spans("train_step"))
    assert found.failure == ""
    assert found.units >= 3


def test_command_with_spans_of_another_name_is_a_failed_trial() -> None:
    found = trial(sys.executable, "-c", SPANS, "{size}", "3", units=of_spans("step"))
    assert "It sent no span 'step', but spans such as 'forward', 'train_step'." in found.failure


def test_command_without_spans_is_a_failed_trial_with_the_address() -> None:
    found = trial(*shell("echo step; echo step; echo step; echo step"), units=of_spans("step"))
    assert "It sent no spans." in found.failure
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in found.failure


def test_failing_command_with_spans_names_its_exit_code() -> None:
    assert "exit code 3" in trial(*shell("exit 3"), units=of_spans("step")).failure
