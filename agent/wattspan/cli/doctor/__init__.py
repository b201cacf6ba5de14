"""``wattspan doctor``: readable counters, problems and their remedies."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from wattspan import __version__
from wattspan.cli.doctor.configuration import (
    examine_configuration,
    examine_directories,
    examine_footprint,
    examine_ports,
    examine_security,
)
from wattspan.cli.doctor.findings import COLOURS, Diagnosis, DiagnosisLine, diagnosis_lines
from wattspan.cli.doctor.host import examine_host, examine_processes
from wattspan.cli.doctor.sources import EmptyProcessDirectory, examine_sources
from wattspan.cli.doctor.telemetry import examine_exporters, examine_spans
from wattspan.cli.doctor.tuning import examine_tuning
from wattspan.cli.options import (
    config_options,
    echo_json,
    emulate_option,
    emulation_flags,
    json_option,
    load_configuration,
)
from wattspan.clock import SystemClock
from wattspan.ports import ConfigError, SourceContext, SourceError
from wattspan.service.configuration import LoadedConfiguration, selected_emulated_host

if TYPE_CHECKING:
    from wattspan.config.access import AccessSettings
    from wattspan.emulation.host import EmulatedHost
    from wattspan.model.settings import Listen, Table

NO_COUNTER_EXIT_CODE = SourceError.exit_code


@click.command(name="doctor")
@config_options
@json_option
@emulate_option
@click.pass_context
def command(
    context: click.Context,
    config_file: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
    emulate: str | None,
) -> None:
    """Examine this host: readable counters, problems and remedies.

    Reads every counter twice, one second apart, with the rights of the calling user: run it as
    the user that runs the agent. A faulty configuration is a finding, and the default replaces
    each value at fault; the exit code is then 2. It is 3 if no counter can be read.
    """
    flags, faults = emulation_flags(emulate), list[str]()
    loaded = load_configuration(config_file, settings, flags, faults=faults)
    with selected_emulated_host(loaded.config.emulation) as host:
        diagnosis = diagnose(loaded, host=host, faults=faults)
    if as_json:
        echo_json({"version": __version__, "host": platform.node(), **diagnosis.plain()})
    else:
        _print(diagnosis)
    if faults:
        context.exit(ConfigError.exit_code)
    if not diagnosis.readable:
        context.exit(NO_COUNTER_EXIT_CODE)


def diagnose(
    loaded: LoadedConfiguration,
    root: Path = Path("/"),
    host: EmulatedHost | None = None,
    faults: Iterable[str] = (),
) -> Diagnosis:
    """Look at everything; takes a second for each source that can be read."""
    config, plugins = loaded.config, loaded.plugins
    clock = SystemClock()
    context = SourceContext(clock, EmptyProcessDirectory())
    if host is not None:
        context = SourceContext(clock, EmptyProcessDirectory(), True, host.nvml(), host.sysfs)
    sources = examine_sources(plugins, config, context)
    return Diagnosis(
        sections=(
            examine_host(root),
            *sources.sections,
            examine_processes(config, clock),
            examine_configuration(config, plugins, faults=faults),
            examine_directories(config),
            examine_ports(config, _answers),
            examine_security(config),
            examine_spans(config),
            examine_exporters(config),
            examine_tuning(config, context, sources.domains, root),
            examine_footprint(config, clock),
        ),
        readable=sources.readable,
        emulated=sources.emulated,
    )


def _answers(table: Table, listen: Listen) -> bool:
    from wattspan.cli.agent_client import is_local_agent

    return hasattr(table, "token_file") and is_local_agent(listen, cast("AccessSettings", table))


def _print(diagnosis: Diagnosis) -> None:
    colour = False if os.environ.get("NO_COLOR") else None  # None: if it is a terminal
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    click.echo(f"wattspan {__version__} on {platform.node()}\n")
    for line in diagnosis_lines(diagnosis, width):
        click.echo(_styled(line), color=colour)


def _styled(line: DiagnosisLine) -> str:
    if line.heading:
        return click.style(line.text, bold=True)
    if line.mark is None:
        return line.text
    before, mark, after = line.text.partition(line.mark)
    return before + click.style(mark, fg=COLOURS[line.mark]) + after
