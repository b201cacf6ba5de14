"""``wattspan measure -- CMD``: the energy of a command, as ``perf stat`` shows its counters."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

import click
import msgspec

from wattspan.cli.options import (
    DURATION,
    ConfigurationOptions,
    config_options,
    echo_error,
    emulate_option,
    json_option,
    json_text,
)
from wattspan.clock import SystemClock
from wattspan.config import FlagValue
from wattspan.model import SECOND, Consumer
from wattspan.model.settings import Duration
from wattspan.ports import Clock, SourceError, WattspanError
from wattspan.sdk import AgentUnavailableError, MeasurementError
from wattspan.sdk.client import Measurement, read_measurement, request_json
from wattspan.service.configuration import LoadedConfiguration, agent_directories
from wattspan.service.systemd import signal_descriptor, signal_handlers, terminal

if TYPE_CHECKING:
    from wattspan.cli.measure.results import CommandRun, MeasurementResult


READ_INTERVAL = 10 * SECOND
"""A long run is read in periods, while the agent still remembers which processes belong to it."""

SETTLEMENT_LAG = 4 * SECOND
"""The delay after which a period has settled."""

_INTERVAL = "agent.interval"
READ_TIMEOUT = 10.0  # seconds to wait for the last period


@click.command(
    name="measure",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="The exit code is the command's: 128 and the signal's number if a signal ended it, 127 "
    "if there is no such command, 126 if it cannot be executed. Of several runs it is the first "
    "that is not 0.",
)
@click.option(
    "-r",
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=False,
    help="Run it this number of times.",
)
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8", lazy=False),
    help="Write the figures to this file instead of standard error.",
)
@click.option(
    "--interval",
    type=DURATION,
    help="Measure without the running agent, and read the counters at this interval.",
)
@click.option("--alone", is_flag=True, help="Measure without the running agent.")
@config_options
@json_option
@emulate_option
@click.argument("words", metavar="CMD [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    repeat: int,
    output: IO[str] | None,
    interval: Duration | None,
    alone: bool,
    configuration: ConfigurationOptions,
    as_json: bool,
) -> None:
    """Run a command and print its energy.

    A second figure is the energy of all devices of the host during the run.

    Any user may measure own commands with a running agent. Without one, this reads the counters
    itself, which needs the rights for it: see `wattspan doctor`.
    """
    from wattspan.cli.measure.results import result_lines

    clock = SystemClock()
    flags = {} if interval is None else {_INTERVAL: FlagValue("--interval", str(interval))}
    loaded = configuration.load(flags, client=True)
    alone = alone or interval is not None or bool(loaded.config.emulation.profile)
    ending = signal_handlers({signal.SIGTERM: _end})
    with ending, _measurement_client(loaded, clock, alone=alone) as client:
        result = measure(words, repeat, client, clock)
    text = json_text(result.plain()) if as_json else "\n".join((*result_lines(result), ""))
    click.echo(text, output, nl=False, err=output is None)
    context.exit(next((run.code for run in result.runs if run.code), 0))


class MeasurementClient(Protocol):
    """Measures consumers. ``about`` names the agent; ``note`` is for the reader of the figures."""

    about: str
    note: str

    def watch(self, consumer: Consumer) -> None:
        """Sample ``consumer`` and its descendants from now on."""
        ...

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        """The energy from ``start`` to ``end``, after at most ``wait`` seconds."""
        ...


class RunningAgentClient:
    """The agent of this host, on its Unix socket."""

    def __init__(self, directories: tuple[str, ...]) -> None:
        """AgentUnavailableError if no agent answers in the run ``directories``."""
        self._directories = directories
        watched = self._request("/v1/watch", {"pid": "self", "family": "1"})
        # In a container the agent may see other process ids. It is then asked about this process,
        # which the kernel names to it, and so about all of its children.
        self._same_pids = (watched["pid"], watched["started"]) == process_identity(os.getpid())
        self.about = "the running agent"
        self.note = (
            ""
            if self._same_pids
            else "The agent sees other process ids than this container, so the command's "
            "processes include `wattspan measure` itself."
        )

    def watch(self, consumer: Consumer) -> None:
        if self._same_pids:
            with contextlib.suppress(MeasurementError):  # `read` reports the error
                self._request("/v1/watch", self._process(consumer))

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        period = {"start": f"mono:{start}", "end": f"mono:{end}"}
        return read_measurement(self._process(consumer) | period, wait, self._directories)

    def _process(self, consumer: Consumer) -> dict[str, str]:
        if not self._same_pids:
            return {"pid": "self", "family": "1"}
        return {"pid": str(consumer.pid), "started": str(consumer.started), "family": "1"}

    def _request(self, path: str, parameters: Mapping[str, str]) -> dict[str, object]:
        return request_json(path, parameters, directories=self._directories)


def measure(
    words: Sequence[str], repeat: int, client: MeasurementClient, clock: Clock
) -> MeasurementResult:
    """Run ``words`` ``repeat`` times, or until it is interrupted."""
    from wattspan.cli.measure.results import MeasurementResult

    runs: list[CommandRun] = []
    while len(runs) < repeat and not (runs and runs[-1].interrupted):
        runs.append(_measure_run(words, client, clock))
    notes = (client.note, *(run.trouble for run in runs))
    return MeasurementResult(words, runs, client.about, [*dict.fromkeys(filter(None, notes))])


def _measure_run(words: Sequence[str], client: MeasurementClient, clock: Clock) -> CommandRun:
    from wattspan.cli.measure.results import CommandRun

    run, since = CommandRun(), 0

    def read_period(consumer: Consumer, start: int) -> None:
        nonlocal since
        begin, end = max(since, start), clock.monotonic() - SETTLEMENT_LAG
        if end > begin:
            with contextlib.suppress(MeasurementError):
                period = client.read(consumer, begin, end, 0.0)
                if period.complete:  # an incomplete one is read again with the next
                    run.add(period)
                    since = end

    ended = run_child(
        words, clock, on_start=client.watch, on_period=read_period, period=READ_INTERVAL
    )
    run.seconds = (ended.end - ended.start) / 1e9
    run.cpu_seconds, run.code = ended.cpu_seconds, ended.code
    run.interrupted = ended.interrupted
    last = max(since, ended.start), ended.end
    try:
        try:
            run.add(client.read(ended.consumer, *last, READ_TIMEOUT))
        except KeyboardInterrupt:  # the user does not wait for the last period to settle
            run.interrupted = True
            run.add(client.read(ended.consumer, *last, 0.0))
    except MeasurementError as error:
        run.miss(last[1] - last[0], str(error))
    return run


def _end(number: int, frame: object) -> None:
    """Clean up at SIGTERM as at Ctrl-C. While the command runs, it receives the signals."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _measurement_client(
    loaded: LoadedConfiguration, clock: SystemClock, *, alone: bool
) -> Iterator[MeasurementClient]:
    """The running agent; a standalone one if there is none."""
    unavailable = ""
    if not alone:
        try:
            client = RunningAgentClient(agent_directories(loaded.config))
        except AgentUnavailableError as error:
            unavailable = f"{error} Nor can it be measured without an agent. "
        else:
            yield client
            return
    from wattspan.service.assembly import standalone_agent

    try:
        with standalone_agent(standalone_configuration(loaded), clock, echo_error) as own:
            yield own
    except SourceError as error:
        raise SourceError(f"{unavailable}{error}") from None


def standalone_configuration(loaded: LoadedConfiguration) -> LoadedConfiguration:
    """The settings of a standalone agent, which serves and stores nothing."""
    config = loaded.config
    changed = replace(
        config,
        agent=msgspec.structs.replace(config.agent, api=False),
        spans=msgspec.structs.replace(config.spans, enabled=False),
        store=msgspec.structs.replace(config.store, enabled=False),
    )
    return replace(loaded, config=changed)


# -------------------------------------------------------------------------------------- the command


_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTING_SIGNALS = (*_TERMINAL_SIGNALS, signal.SIGTERM, signal.SIGHUP)


class CommandNotFoundError(WattspanError):
    """The command does not exist."""

    exit_code = 127


class CommandNotExecutableError(WattspanError):
    """The command exists and cannot be executed."""

    exit_code = 126


class ChildExit(NamedTuple):
    """One run of a command: monotonic times, and the CPU time of it and its children."""

    consumer: Consumer
    start: int
    end: int
    code: int  # 128 and the number of the signal that ended it, as in a shell
    cpu_seconds: float
    interrupted: bool  # by Ctrl-C or a signal


def run_child(
    command: Sequence[str],
    clock: Clock,
    *,
    on_start: Callable[[Consumer], object],
    on_period: Callable[[Consumer, int], object],
    period: int,
) -> ChildExit:
    """Run ``command`` to its end; signals reach it instead of this process.

    ``on_start`` is called with its identity in a thread, so that a slow call does not lengthen the
    run. ``on_period`` is called every ``period`` nanoseconds with its identity and start time.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    with signal_descriptor() as signalled, _forward_signals() as signals:
        start = clock.monotonic()
        child = _spawn(command)
        signals.forward_to(child.pid)
        with ThreadPoolExecutor(1) as executor:
            consumer = process_identity(child.pid)
            registration = executor.submit(on_start, consumer)
            faults = _wait(child.pid, signalled, clock, period, lambda: on_period(consumer, start))
            end = clock.monotonic()
            signals.forward_to(None)
            wait([registration])
            # Reaped only now: until then, /proc has its identity.
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = code = os.waitstatus_to_exitcode(status)
    registration.result()
    if faults:
        raise faults[0]
    return ChildExit(
        consumer,
        start,
        end,
        code if code >= 0 else 128 - code,
        used.ru_utime + used.ru_stime,
        signals.interrupted or -code in _INTERRUPTING_SIGNALS,
    )


def process_identity(pid: int) -> Consumer:
    """A process of this program by pid and start time; works for a child until it is reaped."""
    from wattspan.processes.procfs import ProcFs

    found = ProcFs().identify(pid)
    if found is None:
        raise WattspanError(
            "Cannot tell one process from another: /proc is not mounted here, or hides it. "
            "Mount it for the user that calls wattspan."
        )
    return found


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        # The command inherits open descriptors, such as those of make.
        return subprocess.Popen(command, close_fds=False)  # noqa: S603 - the user's command
    except FileNotFoundError as error:
        raise CommandNotFoundError(
            f"Cannot run {command[0]!r}: {_cause(error)}. Check its name, or give its path."
        ) from None
    except (OSError, ValueError) as error:
        raise CommandNotExecutableError(
            f"Cannot run {command[0]!r}: {_cause(error)}. Give an executable program."
        ) from None


def _cause(error: Exception) -> str:
    return ((isinstance(error, OSError) and error.strerror) or str(error)).lower()


def _wait(
    pid: int, signalled: int, clock: Clock, period: int, on_period: Callable[[], object]
) -> list[Exception]:
    """Wait until the process has ended, without reaping it; returns the errors of ``on_period``.

    The command continues whatever these errors are. ``signalled`` is readable after a signal, so
    that its handler need not wait for the end of the period.
    """
    faults: list[Exception] = []
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        for one in (descriptor, signalled):
            poll.register(one, select.POLLIN)
        due = clock.monotonic() + period
        while True:
            ready = {one for one, _ in poll.poll(max(0, due - clock.monotonic()) / 1e6)}
            if descriptor in ready:
                return faults
            if ready:
                os.read(signalled, 64)
                continue
            try:
                on_period()
            except Exception as error:  # noqa: BLE001 - raised when the command has ended
                faults.append(error)
            due = clock.monotonic() + period
    finally:
        os.close(descriptor)


class _SignalForwarder:
    """Forwards signals, except those that a terminal sends to its whole process group."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._early: list[int] = []
        self.interrupted = False

    def forward_to(self, child: int | None) -> None:
        """Forward signals to ``child`` from now on, including earlier ones."""
        self._child = child
        while child is not None and self._early:
            with contextlib.suppress(PermissionError):  # of a setuid command, such as sudo
                os.kill(child, self._early.pop(0))

    def handle(self, number: int, frame: object) -> None:
        self.interrupted |= number in _INTERRUPTING_SIGNALS
        if self._child is None:
            self._early.append(number)
        elif not (number in _TERMINAL_SIGNALS and _is_foreground()):
            with contextlib.suppress(PermissionError):
                os.kill(self._child, number)  # not reaped yet, so the pid is its own


@contextlib.contextmanager
def _forward_signals() -> Iterator[_SignalForwarder]:
    """Forward signals during the block."""
    signals = _SignalForwarder()
    handlers = {
        number: signals.handle
        for number in (*_TERMINAL_SIGNALS, *_FORWARDED_SIGNALS)
        if signal.getsignal(number) is not signal.SIG_IGN  # by nohup: the command ignores it too
    }
    with signal_handlers(handlers):
        yield signals


def _is_foreground() -> bool:
    """True if this process group has the terminal, whose keys reach the whole group."""
    with terminal() as descriptor:
        return descriptor is not None and os.tcgetpgrp(descriptor) == os.getpgrp()
