"""``wattspan measure -- CMD``: the energy of a command, as ``perf stat`` shows its counters."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wattspan.cli.options import (
    DurationType,
    config_options,
    emulate_option,
    emulation_flags,
    json_option,
    load_configuration,
)
from wattspan.model.settings import Duration
from wattspan.ports import SourceError, WattspanError
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.cli.measure.runs import MeasurementClient
    from wattspan.clock import SystemClock
    from wattspan.config import FlagValue
    from wattspan.service.configuration import LoadedConfiguration


@click.command(
    name="measure",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="The exit code is the command's: 128 and the signal's number if a signal ended it, 127 "
    "if there is no such command, 126 if it cannot be executed. Of several runs it is the first "
    "that is not 0.",
)
@click.option(
    "-r", "--repeat", type=click.IntRange(min=1), default=1, help="Run it this number of times."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures to this file instead of standard error.",
)
@click.option(
    "--interval",
    type=DurationType(),
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
    output: Path | None,
    interval: Duration | None,
    alone: bool,
    config_file: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
    emulate: str | None,
) -> None:
    """Run a command and print its energy.

    A second figure is the energy of all devices of the host during the run.

    Any user may measure own commands with a running agent. Without one, this reads the counters
    itself, which needs the rights for it: see `wattspan doctor`.
    """
    from wattspan.cli.measure.results import result_lines
    from wattspan.cli.measure.runs import measure
    from wattspan.clock import SystemClock

    clock = SystemClock()
    if output is not None:
        _require_writable(output)
    loaded = load_configuration(config_file, settings, _flags(interval, emulate))
    alone = alone or interval is not None or bool(loaded.config.emulation.profile)
    with _exit_on_sigterm(), _measurement_client(loaded, clock, alone=alone) as client:
        result = measure(words, repeat, client, clock)
    text = (
        json.dumps(result.plain(), indent=2, ensure_ascii=False)
        if as_json
        else "\n".join(result_lines(result))
    )
    if output is None:
        click.echo(text, err=True)
    else:
        output.write_text(text + "\n", encoding="utf-8")
    context.exit(next((run.code for run in result.runs if run.code), 0))


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Clean up at SIGTERM as at Ctrl-C. While the command runs, it receives the signals."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _measurement_client(
    loaded: LoadedConfiguration, clock: SystemClock, *, alone: bool
) -> Iterator[MeasurementClient]:
    """The running agent; a standalone one if there is none."""
    from wattspan.cli.measure.runs import RunningAgentClient
    from wattspan.sdk.agent import AgentUnavailableError, MeasurementError
    from wattspan.service.configuration import agent_directories
    from wattspan.service.standalone import standalone_agent

    unavailable = ""
    if not alone:
        try:
            client = RunningAgentClient(agent_directories(loaded.config))
        except AgentUnavailableError as error:
            unavailable = f"{error} Nor can it be measured without an agent. "
        except MeasurementError as error:
            raise WattspanError(str(error)) from None
        else:
            yield client
            return
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(standalone_agent(loaded, clock, _print_warning))
        except SourceError as error:
            raise SourceError(f"{unavailable}{error}") from None
        yield own


def _print_warning(sentence: str) -> None:
    click.echo(f"wattspan: {printable(sentence)}", err=True)


def _flags(interval: Duration | None, emulate: str | None) -> dict[str, FlagValue]:
    """The settings of a standalone agent."""
    from wattspan.config import FlagValue

    flags = {
        key: FlagValue("measure", False) for key in ("store.enabled", "spans.enabled", "agent.api")
    }
    if interval is not None:
        flags["agent.interval"] = FlagValue("--interval", str(interval))
    return flags | emulation_flags(emulate)


def _require_writable(output: Path) -> None:
    """WattspanError, before the command runs, if the figures cannot be written."""
    try:
        output.open("a", encoding="utf-8").close()
    except OSError as error:
        raise WattspanError(
            f"Cannot write {output}: {(error.strerror or str(error)).lower()}. "
            "Give another file with --output."
        ) from None
