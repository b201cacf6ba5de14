"""``wattspan doctor``: what can be read here, what cannot, why, and the remedy."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from wattspan import __version__
from wattspan.cli.diagnosis import COLOURS, Diagnosis, Line, lines
from wattspan.cli.emulated import emulate_option, emulated_host, emulation_flags
from wattspan.cli.examine_agent import (
    examine_configuration,
    examine_directories,
    examine_ports,
)
from wattspan.cli.examine_exporters import examine_exporters
from wattspan.cli.examine_footprint import examine_footprint
from wattspan.cli.examine_host import examine_host
from wattspan.cli.examine_processes import examine_processes
from wattspan.cli.examine_security import examine_security
from wattspan.cli.examine_sources import Nobody, examine_sources
from wattspan.cli.examine_spans import examine_spans
from wattspan.cli.examine_tuning import examine_tuning
from wattspan.cli.options import (
    Loaded,
    config_options,
    echo_json,
    json_option,
    load_configuration,
)
from wattspan.clock import SystemClock
from wattspan.ports import ConfigError, SourceContext, SourceError

if TYPE_CHECKING:
    from wattspan.config.access import AccessSettings
    from wattspan.emulation.host import EmulatedHost
    from wattspan.model.settings import Listen, Table

NOTHING = SourceError.exit_code


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
    """Say what can be read here, what cannot, why, and the remedy.

    Reads every counter twice, a second apart, with the rights of whoever calls it: call it as
    the user that runs the agent. A broken configuration is a finding; the rest is examined with
    the default in place of each value at fault. The exit code is then 2. It is 3 if no counter can
    be read.
    """
    flags, faults = emulation_flags(emulate), list[str]()
    loaded = load_configuration(config_file, settings, flags, quiet=True, faults=faults)
    with emulated_host(loaded.config.emulation) as host:
        diagnosis = diagnose(loaded, host=host, faults=faults)
    if as_json:
        echo_json({"version": __version__, "host": platform.node(), **diagnosis.plain()})
    else:
        _print(diagnosis)
    if faults:
        context.exit(ConfigError.exit_code)
    if not diagnosis.readable:
        context.exit(NOTHING)


def diagnose(
    loaded: Loaded,
    root: Path = Path("/"),
    host: EmulatedHost | None = None,
    faults: Iterable[str] = (),
) -> Diagnosis:
    """Look at everything; takes a second for each source that can be read."""
    config, plugins = loaded.config, loaded.plugins
    clock = SystemClock()
    context = SourceContext(clock, Nobody())
    if host is not None:
        context = SourceContext(clock, Nobody(), True, host.nvml(), host.sysfs)
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
    from wattspan.cli.own_agent import is_there

    return hasattr(table, "token_file") and is_there(listen, cast("AccessSettings", table))


def _print(diagnosis: Diagnosis) -> None:
    colour = False if os.environ.get("NO_COLOR") else None  # None: if it is a terminal
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    click.echo(f"wattspan {__version__} on {platform.node()}\n")
    for line in lines(diagnosis, width):
        click.echo(_styled(line), color=colour)


def _styled(line: Line) -> str:
    if line.heading:
        return click.style(line.text, bold=True)
    if line.mark is None:
        return line.text
    before, mark, after = line.text.partition(line.mark)
    return before + click.style(mark, fg=COLOURS[line.mark]) + after
