"""``wattspan doctor``: readable counters, problems and their remedies."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from wattspan import __version__
from wattspan.cli.doctor.findings import Diagnosis, Finding, render
from wattspan.cli.formatting import text_lines
from wattspan.cli.options import (
    ConfigurationOptions,
    config_options,
    echo_json,
    emulate_option,
    json_option,
)
from wattspan.clock import SystemClock
from wattspan.ports import ConfigError, SourceContext, SourceError
from wattspan.service.configuration import LoadedConfiguration, host_name, selected_emulated_host
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost


@click.command(name="doctor")
@config_options
@json_option
@emulate_option
@click.pass_context
def command(context: click.Context, configuration: ConfigurationOptions, as_json: bool) -> None:
    """Examine this host: readable counters, problems and remedies.

    Reads every counter twice, one second apart, with the rights of the calling user: run it as
    the user that runs the agent. A faulty configuration is a finding, and the default replaces
    each value at fault; the exit code is then 2. It is 3 if no counter can be read.
    """
    faults: list[str] = []
    loaded = configuration.load(faults=faults, client=True)
    with selected_emulated_host(loaded.config.emulation) as host:
        diagnosis = diagnose(loaded, host=host, faults=faults)
    if as_json:
        echo_json({"version": __version__, "host": platform.node(), **diagnosis.plain()})
    else:
        _print(diagnosis)
    if faults:
        context.exit(ConfigError.exit_code)
    if not diagnosis.readable:
        context.exit(SourceError.exit_code)


def diagnose(
    loaded: LoadedConfiguration,
    root: Path = Path("/"),
    host: EmulatedHost | None = None,
    faults: Iterable[str] = (),
) -> Diagnosis:
    """The findings of all checks; each readable source takes a second."""
    from wattspan.cli.doctor import host as local
    from wattspan.cli.doctor import network
    from wattspan.cli.doctor.fleet import etcd_members, examine_fleet
    from wattspan.cli.doctor.gpus import examine_gpus
    from wattspan.cli.doctor.sources import EmptyProcessDirectory, examine_sources
    from wattspan.cli.doctor.tuning import CapperProbe, examine_tuning

    config, plugins = loaded.config, loaded.plugins
    clock = SystemClock()
    context = SourceContext(
        clock,
        EmptyProcessDirectory(),
        emulated=host is not None,
        nvml=None if host is None else host.nvml(),
        sysfs=None if host is None else host.sysfs,
        amdsmi=None if host is None else host.amdsmi(),
    )
    sources = examine_sources(plugins, config, context)
    pods = () if context.emulated else local.examine_pods(config)
    name, members = host_name(host), etcd_members(config.fleet, clock)
    capper = partial(CapperProbe.configured, config, context)
    checks: dict[str, Iterable[Finding]] = {
        "Host": local.examine_host(root),
        "GPUs": examine_gpus(root, sources.domains, emulated=context.emulated),
        **sources.sections,
        "Processes": chain(local.examine_processes(config, clock), pods),
        "Agent": local.examine_agent(config),
        "Configuration": local.examine_configuration(config, plugins, faults=faults),
        "Directories": local.examine_directories(config),
        "Ports": network.examine_ports(config),
        "Security": network.examine_security(config),
        "Spans and API": network.examine_spans(config),
        "Exporters": network.examine_exporters(config),
        "Tuning and caps": examine_tuning(config, context, sources.domains, root),
        "Fleet": examine_fleet(config.fleet, name, clock, members, capper),
        "Cost and carbon": local.examine_footprint(config, clock),
    }
    return replace(sources, sections={title: list(found) for title, found in checks.items()})


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    click.echo(f"wattspan {__version__} on {printable(platform.node())}\n")
    if console.is_terminal:
        width = min(110, console.width)
        console.print(render(diagnosis, name_width=width // 3), width=width)
    else:
        click.echo("\n".join(text_lines(render(diagnosis))))
