"""``wattspan measure -- CMD``: what a command spends, as ``perf stat`` tells what it does."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.model import SECOND, Consumer
from wattspan.model.settings import Duration
from wattspan.ports import WattspanError
from wattspan.service.configuration import (
    DurationType,
    config_options,
    emulate_option,
    emulation_flags,
    json_option,
    load_configuration,
)
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.cli.measure.meter import MeasurementClient
    from wattspan.cli.measure.results import CommandRun, MeasurementResult
    from wattspan.clock import SystemClock
    from wattspan.config import FlagValue
    from wattspan.ports import Clock
    from wattspan.service.configuration import LoadedConfiguration

READ_INTERVAL = 10 * SECOND
"""A long run is asked about piece by piece, while who belongs to whom is fresh in memory."""

SETTLEMENT_LAG = 4 * SECOND
"""How far behind a piece stays, so that it has settled when it is asked about."""

READ_TIMEOUT = 10.0
"""Seconds that the last figures are waited for."""


@click.command(
    name="measure",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="The exit code is the command's: 128 and the signal's number if a signal ended it, 127 "
    "if there is no such command, 126 if it cannot be executed. Of several runs it is the first "
    "that is not 0.",
)
@click.option("-r", "--repeat", type=click.IntRange(min=1), default=1, help="Run it so many times.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures to this file instead of standard error.",
)
@click.option(
    "--interval",
    type=DurationType(),
    help="Measure without the running agent, and read the counters this often.",
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
    output: Path | None,
    interval: Duration | None,
    alone: bool,
    config_file: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
    emulate: str | None,
) -> None:
    """Run a command and say what it spends: its processes, and the host's devices meanwhile.

    A running agent is asked, which any user may do for commands of their own. Without one the
    counters are read for the time, which needs the rights for it: `wattspan doctor` tells.
    """
    from wattspan.clock import SystemClock

    clock = SystemClock()
    if output is not None:
        _require_writable(output)
    loaded = load_configuration(config_file, settings, _flags(interval, emulate))
    alone = alone or interval is not None or bool(loaded.config.emulation.profile)
    with _exit_on_sigterm(), _meter(loaded, clock, alone=alone) as meter:
        result = measure(words, repeat, meter, clock)
    text = _result_text(result, as_json=as_json)
    if output is None:
        click.echo(text, err=True)
    else:
        output.write_text(text + "\n", encoding="utf-8")
    context.exit(next((run.code for run in result.runs if run.code), 0))


def measure(
    words: Sequence[str], repeat: int, meter: MeasurementClient, clock: Clock
) -> MeasurementResult:
    """Run ``words`` so many times, or until somebody interrupts it."""
    from wattspan.cli.measure.results import MeasurementResult

    runs: list[CommandRun] = []
    while len(runs) < repeat and not (runs and runs[-1].interrupted):
        runs.append(_measure_run(words, meter, clock))
    notes = (meter.note, *(run.trouble for run in runs))
    return MeasurementResult(words, runs, meter.about, [*dict.fromkeys(filter(None, notes))])


def _measure_run(words: Sequence[str], meter: MeasurementClient, clock: Clock) -> CommandRun:
    from wattspan.cli.measure.child import run_child
    from wattspan.cli.measure.results import CommandRun
    from wattspan.sdk.agent import MeasurementError

    told, since = CommandRun(), 0

    def meanwhile(whom: Consumer, start: int) -> None:
        nonlocal since
        begin, end = max(since, start), clock.monotonic() - SETTLEMENT_LAG
        if end > begin:
            with contextlib.suppress(MeasurementError):
                piece = meter.read(whom, begin, end, 0.0)
                if piece.complete:  # else it is asked about with the next
                    told.add(piece)
                    since = end

    ended = run_child(words, clock, begun=meter.watch, meanwhile=meanwhile, every=READ_INTERVAL)
    told.seconds = (ended.end - ended.start) / 1e9
    told.cpu_seconds, told.code = ended.cpu_seconds, ended.code
    told.interrupted = ended.interrupted
    rest = max(since, ended.start), ended.end
    try:
        try:
            told.add(meter.read(ended.whom, *rest, READ_TIMEOUT))
        except KeyboardInterrupt:  # somebody does not want to wait
            told.interrupted = True
            told.add(meter.read(ended.whom, *rest, 0.0))
    except MeasurementError as error:
        told.miss(rest[1] - rest[0], str(error))
    return told


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Be told to end by SIGTERM as by Ctrl-C, so that nothing of ours is left behind.

    While the command runs, signals are the command's.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _meter(
    loaded: LoadedConfiguration, clock: SystemClock, *, alone: bool
) -> Iterator[MeasurementClient]:
    """The running agent, or one of our own."""
    from wattspan.cli.measure.meter import RunningAgentClient, in_process_agent
    from wattspan.sdk.agent import AgentUnavailableError, MeasurementError
    from wattspan.service.configuration import agent_directories

    why = ""
    if not alone:
        try:
            meter = RunningAgentClient(agent_directories(loaded.config))
        except AgentUnavailableError as error:
            why = f"{error} Nor can it be measured without an agent. "
        except MeasurementError as error:
            raise WattspanError(str(error)) from None
        else:
            yield meter
            return
    with in_process_agent(loaded, clock, _print_notice, why) as own:
        yield own


def _print_notice(sentence: str) -> None:
    click.echo(f"wattspan: {printable(sentence)}", err=True)


def _flags(interval: Duration | None, emulate: str | None) -> dict[str, FlagValue]:
    """What an agent of our own is set to: it keeps nothing and serves nobody."""
    from wattspan.config import FlagValue

    flags = {
        "store.enabled": FlagValue("measure", False),
        "spans.enabled": FlagValue("measure", False),
        "agent.api": FlagValue("measure", False),
        **emulation_flags(emulate),
    }
    return (
        flags
        if interval is None
        else flags | {"agent.interval": FlagValue("--interval", str(interval))}
    )


def _result_text(result: MeasurementResult, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(result.plain(), indent=2, ensure_ascii=False)
    from wattspan.cli.measure.results import result_lines

    return "\n".join(result_lines(result))


def _require_writable(output: Path) -> None:
    """WattspanError if the figures could not be written: told before the command runs."""
    try:
        output.open("a", encoding="utf-8").close()
    except OSError as error:
        raise WattspanError(
            f"Cannot write {output}: {(error.strerror or str(error)).lower()}. "
            "Give another file with --output."
        ) from None
