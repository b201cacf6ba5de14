"""``wattspan tune``: the state of tuning jobs, its reasons, and past decisions."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from wattspan.cli.options import (
    config_options,
    echo_json,
    json_option,
    load_configuration,
)
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.model import RecordedDecision, TuningAccounts, TuningRow
from wattspan.ports import WattspanError
from wattspan.sdk.agent import AgentUnavailableError, MeasurementError
from wattspan.util.text import printable

DEFAULT_LIMIT = 20
F = TypeVar("F", bound=Callable[..., Any])


class TuningOffError(WattspanError):
    """Tuning is off in the agent."""

    exit_code = 7


def _options(function: F) -> F:
    return click.argument("job", default="", required=False)(config_options(json_option(function)))


@click.group(name="tune")
def command() -> None:
    """Show the state of tuning jobs, its reasons, and past decisions.

    Reads from the running agent, and changes nothing. The exit code is 7 if tuning is off in the
    agent, and 1 if no agent answers. JOB is the name of a job, or a part of one.
    """


@command.command()
@_options
def status(job: str, config_file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Show one line for each job.

    SLOWER and BOUND are the slowdown of the whole run, exploration included, and its upper bound
    at the configured confidence. SAVING is of the energy per unit of work at the held setting.
    """
    from wattspan.cli.tune.text import EMULATED_NOTICE, status_lines

    answer = _tuning(_config(config_file, settings))
    accounts = _select(_accounts(answer), job)
    if as_json:
        wanted = {row.job for row in accounts.rows}
        echo_json(answer | {"jobs": [one for one in answer["jobs"] if one["job"] in wanted]})
    elif accounts.mode != "off":
        _echo([EMULATED_NOTICE] if answer["emulated"] else [])
        _echo(status_lines(accounts, SystemClock().now(), _width()))
    _refuse_off(accounts, answer)


@command.command()
@_options
def explain(job: str, config_file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Explain a job: its units, tried settings, lost time, setting and reasons.

    Also shows why no lower or higher setting was chosen, the next step, a remedy, and the caps of
    its devices with their holders.
    """
    from wattspan.cli.tune.explanation import explain_facts, explain_lines
    from wattspan.cli.tune.text import EMULATED_NOTICE, sort_rows, summary_lines

    answer = _tuning(_config(config_file, settings))
    accounts = _select(_accounts(answer), job)
    if as_json:
        facts = [explain_facts(row, accounts) for row in accounts.rows]
        echo_json(answer | {"jobs": facts})
    elif accounts.mode != "off":
        _echo([EMULATED_NOTICE] if answer["emulated"] else [])
        _echo(summary_lines(accounts))
        for row in sort_rows(accounts.rows):
            click.echo()
            _echo(explain_lines(row, accounts, SystemClock().now(), _width()))
        if not accounts.rows:
            click.echo("No job yet: see `wattspan tune status`.")
    _refuse_off(accounts, answer)


@command.command()
@click.option(
    "--since",
    default="",
    metavar="TIME",
    help='Earliest time: "1h" ago, or a time such as "2026-01-31T08:00Z".',
)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=10_000),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Maximum number of decisions; the last ones are shown.",
)
@_options
def history(
    job: str,
    since: str,
    limit: int,
    config_file: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show past decisions, newest last.

    A decision is listed once, however long it holds; a setting in brackets was not applied.
    Without an agent, the history is read from its state directory.
    """
    from wattspan.cli.tune.text import EMULATED_NOTICE, history_lines

    config = _config(config_file, settings)
    parameters = {"limit": str(limit)}
    if since:
        parameters["since"] = f"-{since}" if _is_duration(since) else since
    try:
        if job:
            accounts = _accounts(_tuning(config))
            parameters["job"] = _unambiguous(
                job, [row.job for row in _matching_rows(job, accounts.rows)]
            )
        answer = _ask("/v1/tuning/history", config, parameters)
    except _NoAgentError as error:
        answer = _stored_history(config, error, parameters, job)
    if as_json:
        echo_json(answer)
        return
    decisions = _decisions(answer)
    if not decisions:
        click.echo(f"No decision{f' about {job!r}' if job else ''} in that time.")
        return
    _echo([EMULATED_NOTICE] if answer["emulated"] else [])
    _echo(history_lines(decisions, _width()))


# ----------------------------------------------------------------------------------- requests


class _NoAgentError(WattspanError):
    """No agent answers."""


def _config(config_file: Path | None, settings: tuple[str, ...]) -> Config:
    return load_configuration(config_file, settings).config


def _ask(path: str, config: Config, parameters: Mapping[str, str] | None = None) -> dict[str, Any]:
    from wattspan.sdk.client import request_json
    from wattspan.service.configuration import agent_directories

    try:
        return request_json(path, parameters or {}, directories=agent_directories(config))
    except AgentUnavailableError as error:
        raise _NoAgentError(str(error)) from None
    except MeasurementError as error:
        raise WattspanError(str(error)) from None


def _tuning(config: Config) -> dict[str, Any]:
    """The tuning of the agent's snapshot, with the fields of GET /v1/tuning."""
    from wattspan.api.snapshot import SNAPSHOT_PATH

    snapshot = _ask(SNAPSHOT_PATH, config)
    try:
        return {
            "host_name": snapshot["host_name"],
            "now_mono_ns": snapshot["at_mono_ns"],
            "emulated": snapshot["emulated"],
            **snapshot["tuning"],
        }
    except (KeyError, TypeError):
        raise WattspanError(_OTHER_VERSION) from None


def _accounts(answer: Mapping[str, Any]) -> TuningAccounts:
    from wattspan.tuning.serialization import accounts_from_json

    try:
        return accounts_from_json(answer)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise WattspanError(_OTHER_VERSION) from None


def _decisions(answer: Mapping[str, Any]) -> list[RecordedDecision]:
    from wattspan.tuning.serialization import recorded_decision_from_json

    try:
        return [recorded_decision_from_json(one) for one in answer["decisions"]]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise WattspanError(_OTHER_VERSION) from None


_OTHER_VERSION = (
    "This program does not understand the agent's state of tuning: the agent has another version."
    " Use the `wattspan` that was installed with it, or --json."
)


def _refuse_off(accounts: TuningAccounts, answer: Mapping[str, Any]) -> None:
    """TuningOffError if tuning is off; called last, so that programs have the JSON."""
    if accounts.mode == "off":
        raise TuningOffError(
            f"Tuning is off in the agent of {answer.get('host_name', 'this host')}. Set"
            ' mode = "advise" in [autotune] and restart it to get advice;'
            ' "apply" applies it.'
        )


# ------------------------------------------------------------------------------------ choosing


def _select(accounts: TuningAccounts, job: str) -> TuningAccounts:
    """The accounts with the rows that match ``job``; a usage error if there is none."""
    from dataclasses import replace

    rows = _matching_rows(job, accounts.rows)
    if job and not rows and accounts.mode != "off":
        known = sorted({row.job for row in accounts.rows})
        near = difflib.get_close_matches(job, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known) or 'none yet'}."
        raise click.UsageError(f"There is no job {job!r}. {hint}")
    return replace(accounts, rows=tuple(rows))


def _matching_rows(job: str, rows: Sequence[TuningRow]) -> list[TuningRow]:
    """The rows of that name; else of that service or span; else with that part of a name."""
    wanted = job.casefold()
    tests: tuple[Callable[[TuningRow], bool], ...] = (
        lambda row: job in ("", row.job),
        lambda row: job in (row.service, row.span),
        lambda row: wanted in row.job.casefold(),
    )
    return next((found for test in tests if (found := [*filter(test, rows)])), [])


def _unambiguous(job: str, found: Iterable[str]) -> str:
    """The only one of ``found``, or ``job`` if there is none; a usage error for several."""
    names = sorted(set(found))
    if len(names) > 1:
        raise click.UsageError(f"{job!r} matches {', '.join(names)}. Write more of the name.")
    return names[0] if names else job


# ---------------------------------------------------------------------------- without an agent


def _stored_history(
    config: Config, why: WattspanError, parameters: Mapping[str, str], job: str
) -> dict[str, Any]:
    """The history on disk; raises ``why`` if it cannot be read."""
    from wattspan.api.requests import TIME_FORMATS, parse_time
    from wattspan.storage.database import file_exists
    from wattspan.storage.decisions import decisions_path, read_decisions, select_decisions
    from wattspan.tuning.serialization import recorded_decision_to_json

    state_dir = Path(config.agent.state_dir)
    true, other = decisions_path(state_dir), decisions_path(state_dir, emulated=True)
    emulated = not file_exists(true) and file_exists(other)
    path = other if emulated else true
    now, since = SystemClock().now(), None
    if "since" in parameters:
        try:
            since = now.wall - (now.mono - parse_time(parameters["since"], now))
        except ValueError as error:
            raise click.BadParameter(f"{error}. {TIME_FORMATS}", param_hint="--since") from None
    known = read_decisions(path)
    if not known:
        raise why
    note = f"No agent answers; these decisions are from {path}."
    click.echo(f"wattspan: {printable(note)}", err=True)
    if job and job not in (names := {one.job for one in known}):
        job = _unambiguous(job, [name for name in names if job.casefold() in name.casefold()])
    decisions = select_decisions(known, job, int(parameters["limit"]), since)
    return {
        "emulated": emulated,
        "decisions": [recorded_decision_to_json(one) for one in decisions],
    }


# ------------------------------------------------------------------------------------ output


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(printable(line))


def _width() -> int | None:
    """Columns of the terminal; None without one."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else None


def _is_duration(text: str) -> bool:
    from wattspan.model.settings import Duration

    try:
        Duration.parse(text)
    except ValueError:
        return False
    return True
