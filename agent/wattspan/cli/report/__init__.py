"""``wattspan report``: past energy, from the store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from wattspan.api.requests import REPORT_PATH
from wattspan.cli.formatting import local_time
from wattspan.cli.options import (
    DURATION,
    FILE,
    ConfigurationOptions,
    config_options,
    echo_error,
    json_text,
)
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.model import SECOND, GroupKind, HwType
from wattspan.model.settings import Duration
from wattspan.ports import StoreError, WattspanError
from wattspan.sdk import AgentUnavailableError
from wattspan.service.configuration import ask_agent
from wattspan.storage.deltas import MODEL, PROCESS, SPAN

if TYPE_CHECKING:
    from wattspan.storage.query import HistoryExtract, NoHistory

_KINDS: dict[str, tuple[str, ...]] = {
    PROCESS: (PROCESS,),
    "group": tuple(GroupKind),
    "kind": tuple(GroupKind),
    "domain": (),
    SPAN: (SPAN,),
    MODEL: (MODEL,),
} | {kind.value: (kind,) for kind in GroupKind}

FORMATS = ("table", "json", "jsonl", "csv", "parquet")


class EnergyUnit(NamedTuple):
    microjoules: int
    digits: int
    from_total: int  # microjoules; `auto` selects it for totals from here on


UNITS: Mapping[str, EnergyUnit] = {
    "J": EnergyUnit(10**6, 2, 0),
    "kJ": EnergyUnit(10**9, 3, 10**9),
    "Wh": EnergyUnit(3600 * 10**6, 3, 10 * 3600 * 10**6),
    "kWh": EnergyUnit(3600 * 10**9, 4, 3600 * 10**9),
}
"""A table has one unit, so that its figures are comparable."""

_LINES = 20
_LEFT_OUT = (
    "Left out: rows of other users, of programs and of spans, cost and carbon; the rows are your"
    " user's and the rest. `sudo wattspan report` shows everything."
)
_READ_TIMEOUT = 30.0  # seconds; a long history takes a while
DAY = 86_400 * SECOND


def _parse_time(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """A time in Unix seconds; local time by default."""
    if text is None:
        return None
    try:
        seconds = int(datetime.fromisoformat(text).timestamp())
        local_time(seconds)  # as the report prints it
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f'{text!r} is not a time; write for example "2026-01-31", "2026-01-31 08:00"'
            ' (local time) or "2026-01-31T08:00Z"'
        ) from None
    return seconds


@click.command(name="report")
@click.option("--since", type=DURATION, help="The length of the period before --to. [default: 24h]")
@click.option("--from", "start", callback=_parse_time, metavar="TIME", help="Start time.")
@click.option("--to", "end", callback=_parse_time, metavar="TIME", help="End time. [default: now]")
@click.option(
    "--by",
    type=click.Choice(list(_KINDS)),
    default=PROCESS,
    help="Division of the energy: `group` is every kind of group, `kind` the sum of each kind, "
    "`span` the spans of instrumented applications, with joules per call and per token, `model` "
    "the requests to language models.",
)
@click.option("--hw-type", type=click.Choice([t.value for t in HwType]), help="Only this hardware.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Number of lines; 0: all. [default: {_LINES}; all in data formats]",
)
@click.option(
    "--unit",
    type=click.Choice(["auto", *UNITS]),
    default="auto",
    help="Unit of the energies in the table.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="A table for people, the whole report as JSON, or its rows as JSON Lines, CSV or "
    "Parquet. [default: the suffix of --output; table for .txt or none]",
)
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV.")
@click.option(
    "--output", "-o", type=FILE, metavar="FILE", help="Write the report to this file, atomically."
)
@click.option(
    "--split",
    is_flag=True,
    help="With --by span: the static and the dynamic part of the GPU energy.",
)
@click.option("--emulated", is_flag=True, help="Read the store of an emulated host.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, readable=False),
    help="The directory of the store, instead of the configured one.",
)
@config_options
@click.pass_context
def command(
    context: click.Context,
    since: Duration | None,
    start: int | None,
    end: int | None,
    by: str,
    hw_type: str | None,
    limit: int | None,
    unit: str,
    form: str | None,
    output: Path | None,
    split: bool,
    emulated: bool,
    state_dir: Path | None,
    configuration: ConfigurationOptions,
) -> None:
    """Report past energy by process, group, span or language model, from the store.

    Idle and unattributed energy and unmeasured time have lines of their own; every division of
    the energy adds up to the same total. With [cost] or [carbon] configured, every line has its
    cost or emissions. Works with and without a running agent.

    The store is for root and the agent's group. The running agent gives other users the totals of
    the host and of their own processes; a line tells what is left out.
    """
    from wattspan.cli.report import export, table
    from wattspan.storage.breakdown import break_down, kind_totals
    from wattspan.storage.query import NoHistory, extract_history

    form = choose_format(form, output)
    if since is not None and start is not None:
        raise click.UsageError("--since and --from: choose one.")
    if since is not None and since < SECOND:
        raise click.UsageError("--since is below a second: give 1s at least.")
    if split and by != SPAN:
        raise click.UsageError("--split divides the energy of spans: add --by span.")
    now = SystemClock().now().wall // 10**9
    last = now + 60 if end is None else end  # includes the current minute
    first = start if start is not None else min(last, now) - int(since or DAY) // SECOND
    first = max(0, first)  # there are no figures of earlier times
    if first >= last:
        raise click.UsageError("--from is not before --to, or --to is before 1970.")
    config = configuration.load(client=True).config
    by_default = context.get_parameter_source("by") is ParameterSource.DEFAULT
    shared_by = GroupKind.USER.value if by_default else by  # the rows that such a user sees
    named = state_dir is not None or emulated
    shared = None if named else _shared_history(config, first, last, _KINDS[shared_by])
    if shared is None:
        path = _store(state_dir or Path(config.agent.state_dir), emulated)
        found = extract_history(path, first, last, _KINDS[by], export.configured_valuations(config))
    else:
        (path, found), by = shared, shared_by
        echo_error(_LEFT_OUT)
    if isinstance(found, NoHistory):
        raise WattspanError(_no_data_text(found, path, first, last))
    if hw_type is not None:
        found = _of_hw_type(found, HwType(hw_type))
    shown = limit if limit is not None else _LINES if form == "table" else 0
    breakdown = break_down(found, _KINDS[by], limit=shown)
    if by == "kind":
        breakdown = kind_totals(breakdown)
    if form == "json":
        facts = export.report_facts(path, by, found, breakdown)
        report = json_text(facts).encode(errors="replace")
    elif form == "table":
        lines = table.report_lines(path, by, found, breakdown, unit, split=split)
        report = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    else:
        report = export.WRITERS[form](export.report_rows(by, found, breakdown, split=split))
    export.write_output(report, output)


def choose_format(form: str | None, output: Path | None) -> str:
    """The format of the options or of the file's suffix."""
    suffix = output.suffix.removeprefix(".").lower() if output is not None else ""
    found = form or ("table" if suffix in ("", "txt") else suffix)
    if found not in FORMATS:
        raise click.UsageError(
            f"--output {output}: .{suffix} is no format. Name one with --format "
            f"({', '.join(FORMATS)}), or use its name or .txt as the suffix."
        )
    if found == "parquet" and output is None:
        raise click.UsageError("--format parquet is not text: name a file with --output FILE.")
    return found


def _store(state_dir: Path, emulated: bool) -> Path:
    """The host's store; an emulated host's if there is no other. The report names it."""
    from wattspan.storage.database import file_exists, store_path

    true, other = store_path(state_dir), store_path(state_dir, emulated=True)
    return other if emulated or (not file_exists(true) and file_exists(other)) else true


def _of_hw_type(found: HistoryExtract, hw_type: HwType) -> HistoryExtract:
    return dataclasses.replace(
        found,
        domains=tuple(domain for domain in found.domains if domain.hw_type is hw_type),
        owners={owner: e for owner, e in found.owners.items() if owner.hw_type is hw_type},
        spans={name: use.only(hw_type) for name, use in found.spans.items()},
    )


def _no_data_text(nothing: NoHistory, path: Path, start: int, end: int) -> str:
    if nothing.reach is None:
        return (
            f"The store {path} holds no energy yet. A running agent writes its first figures within"
            " seconds."
        )
    since, until = map(local_time, nothing.reach)
    return (
        f"The store {path} holds nothing from {local_time(start)} to {local_time(end)}: it reaches"
        f" from {since} to {until}. Ask for that with --from and --to."
    )


# --------------------------------------------------------------- users who may not read the store


def _shared_history(
    config: Config, start: int, end: int, kinds: Iterable[str]
) -> tuple[Path, HistoryExtract | NoHistory] | None:
    """The store's path and its extract for this user; None if this user can read the store.

    StoreError if neither the store nor an agent can be read.
    """
    from wattspan.storage.query import extract_from_json

    state_dir = Path(config.agent.state_dir)
    if not _is_closed(state_dir):
        return None
    parameters = {"start": str(start), "end": str(end), "kinds": ",".join(kinds)}
    try:
        facts = ask_agent(config, REPORT_PATH, parameters, _READ_TIMEOUT)
        return Path(facts["store"]), extract_from_json(facts["found"])
    except AgentUnavailableError as error:
        cause = f"no agent answers that would read it for this user. {error}"
    except (KeyError, ValueError):
        cause = "the agent has another version. Use the `wattspan` that was installed with it"
    raise StoreError(
        f"Cannot read the store in {state_dir}: it is for root and the agent's group, and {cause}"
        " Or run `sudo wattspan report`."
    )


def _is_closed(state_dir: Path) -> bool:
    """True if this user may not read the store in a directory that exists."""
    from wattspan.storage.database import file_exists, store_path

    try:
        paths = [store_path(state_dir, emulated=emulated) for emulated in (False, True)]
        found = [path for path in paths if file_exists(path)]
    except StoreError:
        return True
    return bool(found) and not any(os.access(path, os.R_OK, effective_ids=True) for path in found)
