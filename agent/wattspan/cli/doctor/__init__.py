"""``wattspan doctor``: its findings, as values, as JSON and as text, and the command."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from wattspan import __version__
from wattspan.cli.formatting import text_lines
from wattspan.cli.options import (
    ConfigurationOptions,
    config_options,
    echo_json,
    emulate_option,
    json_option,
    json_text,
)
from wattspan.clock import SystemClock
from wattspan.model import SECOND, Domain
from wattspan.ports import Clock, ConfigError, SourceContext, SourceError
from wattspan.service.configuration import LoadedConfiguration, host_name, selected_emulated_host
from wattspan.util.text import printable

if TYPE_CHECKING:
    from rich.console import Group

    from wattspan.emulation.host import EmulatedHost


class Severity(StrEnum):
    """The mark of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "bright_black",
    Severity.WARN: "yellow",
    Severity.FAIL: "red",
}


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """One examined thing: its name, its state and, if needed, a remedy."""

    mark: Severity
    what: str
    detail: str = ""
    remedy: str = ""


@cache
def catalogue() -> dict[str, Finding]:
    """The findings of ``findings.toml`` by code, with the names of facts in their texts."""
    declarations = Path(__file__).with_name("findings.toml").read_bytes()
    return msgspec.toml.decode(declarations, type=dict[str, Finding])


def declared(code: str, **facts: object) -> Finding:
    """The finding of the catalogue with ``code`` and the ``facts`` that its texts name."""
    entry = catalogue()[code]
    texts = (entry.what, entry.detail, entry.remedy)
    return Finding(entry.mark, *(text.format_map(facts) for text in texts))


ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
warning = partial(Finding, Severity.WARN)
failure = partial(Finding, Severity.FAIL)


class Diagnosis(Struct, frozen=True):
    """All findings by section, and the measured domains.

    ``readable`` is the number of counters that could be read.
    """

    sections: dict[str, list[Finding]]
    readable: int
    emulated: bool = False
    domains: tuple[Domain, ...] = ()

    @property
    def marks(self) -> list[Severity]:
        return [finding.mark for findings in self.sections.values() for finding in findings]

    def plain(self) -> dict[str, Any]:
        """The JSON output."""
        return {
            "readable_counters": self.readable,
            "worst": max(self.marks, key=list(Severity).index, default=Severity.OK),
            "sections": [
                {"title": title, "findings": msgspec.to_builtins(findings)}
                for title, findings in self.sections.items()
            ],
        }

    def summary(self) -> str:
        counters = "1 counter" if self.readable == 1 else f"{self.readable} counters"
        kind = " of an emulated host" if self.emulated else ""
        counts = {"failed": Severity.FAIL, "to look at": Severity.WARN}
        problems = [f"{n} {word}" for word, mark in counts.items() if (n := self.marks.count(mark))]
        text = f"{counters}{kind} can be read; {', '.join(problems) or 'nothing to do'}."
        return text if self.readable else f"{text} {NO_COUNTER_ADVICE}"


NO_COUNTER_ADVICE = (
    "No energy counter can be read here. `wattspan demo` shows all functions on an emulated host; "
    "[sources.estimate] with enabled = true and tdp_watts estimates energy from load."
)


def render(diagnosis: Diagnosis, name_width: int | None = None) -> Group:
    """The report; names longer than ``name_width`` are folded."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def rows() -> Iterator[Table | Text]:
        for title, findings in diagnosis.sections.items():
            yield Text(title, style="bold")
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(min_width=6)
            table.add_column(max_width=name_width, overflow="fold")
            table.add_column(overflow="fold")
            for finding in findings:
                mark = "FAIL" if finding.mark is Severity.FAIL else finding.mark
                remedy = f"\n-> {printable(finding.remedy)}" if finding.remedy else ""
                table.add_row(
                    Text(f"  {mark}", style=_STYLES[finding.mark]),
                    Text(printable(finding.what)),
                    Text(printable(finding.detail) + remedy),
                )
            yield table
            yield Text()
        yield Text(diagnosis.summary())

    return Group(*rows())


# -------------------------------------------------------------------------------------- the command


@click.command(name="doctor")
@click.option(
    "--acceptance",
    is_flag=True,
    help="Test the counters, the attribution and the limits of this host, for three minutes.",
)
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8", lazy=False),
    help="Write the report of --acceptance to this file, for an issue.",
)
@config_options
@json_option
@emulate_option
@click.pass_context
def command(
    context: click.Context,
    configuration: ConfigurationOptions,
    acceptance: bool,
    output: IO[str] | None,
    as_json: bool,
) -> None:
    """Examine this host: readable counters, problems and remedies.

    Reads every counter twice, one second apart, with the rights of the calling user: run it as
    the user that runs the agent. A faulty configuration is a finding, and the default replaces
    each value at fault; the exit code is then 2. It is 3 if no counter can be read.

    With --acceptance it tests a host whose hardware is new to you or to wattspan: idle power
    before and after the counters are opened, steps of the counters, sensors against counters, the
    energy of two loads of its own, and the limits that would be restored. It changes no setting.
    Run it while nothing else works; the exit code is 1 if a test fails.
    """
    if output is not None and not acceptance:
        raise click.UsageError("--output has no effect without --acceptance. Add it.")
    if acceptance:
        _accept(context, configuration.load(client=True), output, as_json=as_json)
        return
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


def _accept(
    context: click.Context, loaded: LoadedConfiguration, output: IO[str] | None, *, as_json: bool
) -> None:
    from wattspan.cli.doctor.acceptance import accept
    from wattspan.cli.doctor.acceptance.checks import diagnosis
    from wattspan.cli.doctor.acceptance.counters import WHOLE

    length = WHOLE.total(len(loaded.plugins.sources)) // SECOND
    with click.progressbar(length=length, label="Testing this host", file=sys.stderr) as bar:
        passed = 0

        def advance(duration: int) -> None:
            nonlocal passed
            before, passed = passed // SECOND, passed + duration
            bar.update(passed // SECOND - before)

        checks, document, emulated = accept(loaded, SystemClock(), advance)
    if output is not None:
        output.write(json_text(document))
    if as_json:
        echo_json(document)
    else:
        _print(diagnosis(checks, emulated=emulated))
    if any(one.finding.mark is Severity.FAIL for one in checks):
        context.exit(1)


def source_context(clock: Clock, host: EmulatedHost | None) -> SourceContext:
    """The context in which the sources of this host, or of an emulated one, are opened."""
    from wattspan.cli.doctor.sources import EmptyProcessDirectory

    return SourceContext(
        clock,
        EmptyProcessDirectory(),
        emulated=host is not None,
        nvml=None if host is None else host.nvml(),
        sysfs=None if host is None else host.sysfs,
        amdsmi=None if host is None else host.amdsmi(),
    )


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
    from wattspan.cli.doctor.sources import examine_gpus, examine_sources
    from wattspan.cli.doctor.tuning import CapperProbe, examine_tuning

    config, plugins = loaded.config, loaded.plugins
    clock = SystemClock()
    context = source_context(clock, host)
    sources = examine_sources(plugins, config, context)
    pods = () if context.emulated else local.examine_pods(config)
    name, members = host_name(host), etcd_members(config.fleet, clock)
    capper = partial(CapperProbe.configured, config, context)
    checks: dict[str, Iterable[Finding]] = {
        "Host": local.examine_host(root),
        "GPUs": examine_gpus(root, sources.domains, emulated=context.emulated),
        **sources.sections,
        "Processes": chain(
            local.examine_processes(config, clock), local.examine_counters(config, clock), pods
        ),
        "Agent": local.examine_agent(config),
        "Configuration": local.examine_configuration(config, plugins, faults=faults),
        "Directories": local.examine_directories(config),
        "Ports": network.examine_ports(config),
        "Security": network.examine_security(config),
        "Spans and API": chain(network.examine_spans(config), network.examine_engines(config)),
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
