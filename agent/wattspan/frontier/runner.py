"""One trial: runs the command at a setting until its steady window is complete."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from wattspan.frontier.schedule import Planned
from wattspan.frontier.span_units import SpanReceiver, SpanUnits
from wattspan.frontier.statistics import change_of_speed
from wattspan.frontier.trials import Setting, Trial, substituted
from wattspan.frontier.work import (
    Completion,
    Completions,
    OutputPattern,
    SteadyWindow,
    last_window,
    steady_window,
)
from wattspan.model import SECOND, Consumer
from wattspan.ports import CapsError, Clock, WattspanError
from wattspan.sdk import AgentUnavailableError, MeasurementError

_END_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL
_LAST_LINES = 5  # of the output, in the message of a failure
_LINE_BYTES = 64 * 1024
_CHECK_INTERVAL = SECOND // 10


class WindowEnergy(NamedTuple):
    """The energy of the measured devices in a window.

    ``taint`` is the reason why it does not tell the energy of the command, such as another
    program on the same device. ``device_joules`` is the part of each device.
    """

    joules: float
    temperatures: Mapping[str, float]
    taint: str = ""
    device_joules: Mapping[str, float] = MappingProxyType({})


class TrialMeter(Protocol):
    """Measures the devices of a trial."""

    def begin(self, command: Consumer) -> None:
        """The command has started."""

    def read(self, command: Consumer, window: SteadyWindow) -> WindowEnergy:
        """The energy of the window. MeasurementError."""


class HeldLimits(Protocol):
    """Limits in force during a trial; ``lost`` tells why they are not any more."""

    @property
    def lost(self) -> str: ...

    def watts(self) -> Mapping[str, float]:
        """The enforced power limit of each device."""


HoldSetting = Callable[[Setting], AbstractContextManager[HeldLimits]]
"""Holds the limits of a setting. CapsError."""


class Durations(NamedTuple):
    """Nanoseconds: the warm-up, the window, and the longest time of one trial."""

    warm_up: int
    window: int
    longest: int


class _Output:
    """The lines of the command, and the work they report. Written by a thread of its own."""

    def __init__(
        self, pattern: OutputPattern | None, clock: Clock, echo: Callable[[str], object]
    ) -> None:
        self._pattern, self._clock, self._echo = pattern, clock, echo
        self.changed = threading.Condition()
        self.completions = Completions()
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.ended = False

    def read(self, pipe: int) -> None:
        """Read the output until its end."""
        try:
            self._read_lines(pipe)
        finally:  # an error would otherwise hold the trial for its longest time
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def _read_lines(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb") as file:
            while line := file.readline(_LINE_BYTES):
                now = self._clock.monotonic()
                text = line.decode("utf-8", "replace").rstrip("\n")
                work = 0.0 if self._pattern is None else self._pattern.work(text)
                with self.changed:
                    self.last.append(text)
                    if work > 0:
                        self.completions.add(now, work)
                self._echo(text)


@dataclass(frozen=True, slots=True)
class _Progress:
    """The completed work of a running command, from its spans or else from its output."""

    process: subprocess.Popen[bytes]
    output: _Output
    spans: SpanUnits | None

    @property
    def ended(self) -> bool:
        """True if no more work is reported."""
        # Spans do not end with the output: a command may close it.
        return self.output.ended and (self.spans is None or self.process.poll() is not None)

    def completions(self, now: int) -> Sequence[Completion]:
        """In the order of time: the first ones, up to a time whose work is known at ``now``."""
        if self.spans is None:
            return self.output.completions.found
        return self.spans.completions(None if self.ended else now - self.spans.delay)


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """Runs trials one at a time."""

    command: Sequence[str]
    units: OutputPattern | SpanReceiver
    durations: Durations
    meter: TrialMeter
    hold: HoldSetting
    clock: Clock
    identify: Callable[[int], Consumer]
    echo: Callable[[str], object] = lambda line: None

    def run(self, planned: Planned) -> Trial:
        """The trial. A failure of the command or of the measurement is part of it.

        CapsError if the limits are refused, AgentUnavailableError without an agent, ListenError
        if spans cannot be received: every trial would fail.
        """
        trial = Trial(
            setting=planned.setting,
            block=planned.block,
            started_unix=self.clock.now().wall / SECOND,
        )
        units, begin = self.units, self.clock.monotonic()
        receiving = units.open() if isinstance(units, SpanReceiver) else nullcontext()
        with receiving as spans, self.hold(planned.setting) as held:
            trial = self._measure(trial, held, spans)
        elapsed = (self.clock.monotonic() - begin) / SECOND
        return msgspec.structs.replace(trial, elapsed_seconds=elapsed)

    # --------------------------------------------------------------------------- inner workings

    def _measure(self, trial: Trial, held: HeldLimits, spans: SpanUnits | None) -> Trial:
        words = substituted(self.command, dict(trial.setting.parameters))
        pattern = self.units if isinstance(self.units, OutputPattern) else None
        output = _Output(pattern, self.clock, self.echo)
        begin = self.clock.monotonic()
        try:
            process = _spawn(words, {} if spans is None else spans.environ)
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            return _failed(trial, f"The command {words[0]!r} cannot be started: {cause}.")
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        reader = threading.Thread(
            target=output.read, args=(os.dup(process.stdout.fileno()),), daemon=True
        )
        reader.start()
        progress = _Progress(process, output, spans)
        try:
            command = self.identify(process.pid)
            self.meter.begin(command)
            window = self._await_window(progress, begin)
            limits = dict(held.watts())
            if window is None:
                return _failed(trial, self._no_window(progress, begin))
            spent = self.meter.read(command, window)
            if spent.joules <= 0:  # as of a suspended GPU alone; estimates are of logarithms
                return _failed(trial, "The measured devices used no energy in the window.")
        except (CapsError, AgentUnavailableError):
            raise
        except (WattspanError, MeasurementError) as error:
            return _failed(trial, str(error))
        finally:
            _end(process)
            reader.join(_END_TIMEOUT)
            process.stdout.close()
        completions = progress.completions(self.clock.monotonic())
        seconds, parts = window.seconds, spent.device_joules.items()
        return msgspec.structs.replace(
            trial,
            seconds=seconds,
            units=window.work,
            joules=spent.joules,
            watts=spent.joules / seconds,
            limits=limits,
            device_watts={device: joules / seconds for device, joules in parts},
            temperatures=dict(spent.temperatures),
            taint=held.lost or spent.taint,
            unsteady=change_of_speed(completions, window.start, window.end),
        )

    def _await_window(self, progress: _Progress, begin: int) -> SteadyWindow | None:
        warm_up, length, longest = self.durations
        output = progress.output
        with output.changed:
            while True:
                now = self.clock.monotonic()
                over = progress.ended or now >= begin + longest
                completions = progress.completions(now)
                window = steady_window(completions, begin, warm_up, length)
                if window is not None:
                    return window
                if over:
                    return last_window(completions, begin, warm_up)
                wait = min(begin + longest - now, _CHECK_INTERVAL)
                output.changed.wait(wait / SECOND)

    def _no_window(self, progress: _Progress, begin: int) -> str:
        process, output = progress.process, progress.output
        now = self.clock.monotonic()
        seconds = (now - begin) / SECOND
        units = sum(one.work for one in progress.completions(now))
        last = " | ".join(output.last)
        tail = f" Its last lines: {last}" if last else ""
        code = None
        if output.ended:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_END_TIMEOUT)
        if code:
            return f"The command failed with exit code {code} after {seconds:.1f} s.{tail}"
        need = (self.durations.warm_up + self.durations.window) / SECOND
        verb = "ended" if progress.ended else "was stopped"
        if progress.spans is not None and (trouble := progress.spans.trouble):
            return f"The command {verb} after {seconds:.1f} s. {trouble}{tail}"
        return (
            f"The command {verb} after {seconds:.1f} s with {units:g} units of work, and the"
            f" warm-up and the window need {need:g} s. Let it run longer, or check --unit.{tail}"
        )


def _failed(trial: Trial, sentence: str) -> Trial:
    return msgspec.structs.replace(trial, failure=sentence)


def _spawn(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: the command may start workers, which end with it.
    return subprocess.Popen(  # noqa: S603 - the user's command
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={"PYTHONUNBUFFERED": "1", **os.environ, **environ},
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT)
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that ignore SIGTERM
