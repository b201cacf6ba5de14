"""``wattspan tune``: the state of tuning jobs, its reasons, and past decisions."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from wattspan.api.requests import TIME_FORMATS, parse_time
from wattspan.api.snapshot_document import SNAPSHOT_PATH
from wattspan.cli.options import (
    ConfigurationOptions,
    config_options,
    echo_error,
    echo_json,
    echo_lines,
    json_option,
    with_options,
)
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.model import Instant, TuningAccounts, TuningRow
from wattspan.model.settings import Duration
from wattspan.ports import WattspanError
from wattspan.sdk import AgentUnavailableError
from wattspan.service.configuration import ask_agent
from wattspan.tuning.serialization import (
    TuningDocument,
    recorded_decision_from_json,
    recorded_decision_to_json,
    row_to_json,
    tuning_accounts,
)

DEFAULT_LIMIT = 20


class TuningOffError(WattspanError):
    """Tuning is off in the agent."""

    exit_code = 7


_options = with_options(
    click.argument("job", default="", required=False), config_options, json_option
)


@click.group(name="tune")
def command() -> None:
    """Show the state of tuning jobs, its reasons, and past decisions.

    Reads from the running agent, and changes nothing. The exit code is 7 if tuning is off in the
    agent, and 1 if no agent answers. JOB is the name of a job, or a part of one.
    """


@command.command()
@_options
def status(job: str, configuration: ConfigurationOptions, as_json: bool) -> None:
    """Show one line for each job.

    SLOWER and BOUND are the slowdown of the whole run, exploration included, and its upper bound
    (99 %). SAVING is of the energy per unit of work at the held setting.
    """
    from wattspan.cli.tune.text import status_lines

    _show(configuration, job, as_json, lambda row, *_: row_to_json(row), status_lines)


@command.command()
@_options
def explain(job: str, configuration: ConfigurationOptions, as_json: bool) -> None:
    """Explain a job: its units, tried settings, lost time, setting and reasons.

    Also shows why no lower or higher setting was chosen, the next step, a remedy, and the caps of
    its devices with their holders.
    """
    from wattspan.cli.tune.explanation import explain_all, explain_facts

    _show(configuration, job, as_json, explain_facts, explain_all)


@command.command()
@click.option(
    "--instances",
    type=click.IntRange(min=1, max=10_000),
    default=1,
    help="Present number of instances of the server, each with the load of the one on this host.",
)
@_options
def recommend(job: str, instances: int, configuration: ConfigurationOptions, as_json: bool) -> None:
    """Compare numbers of instances of a server by their energy within its latency limits.

    For jobs whose load is tracked. The figures are those of one instance at the load that each of
    them would have, at the setting that is chosen for this load; only loads that were met have
    figures. LIMITS tells if the latency limits are kept there. ENERGY is relative to the present
    number of instances. Nothing is changed: another program sets the number of instances.
    """
    from wattspan.cli.tune.text import recommendation_facts, recommendation_lines

    _show(
        configuration,
        job,
        as_json,
        lambda row, *_: recommendation_facts(row, instances),
        lambda accounts, *_: recommendation_lines(accounts, instances),
    )


@command.command()
@click.option(
    "--since",
    default="",
    show_default=False,
    metavar="TIME",
    help='Earliest time: "1h" ago, or a time such as "2026-01-31T08:00Z".',
)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=10_000),
    default=DEFAULT_LIMIT,
    help="Maximum number of decisions; the last ones are shown.",
)
@_options
def history(
    job: str, since: str, limit: int, configuration: ConfigurationOptions, as_json: bool
) -> None:
    """Show past decisions, newest last.

    A decision is listed once, however long it holds; a setting in brackets was not applied.
    Without an agent, the history is read from its state directory.
    """
    from wattspan.cli.tune.text import history_lines

    config = configuration.load(client=True).config
    parameters = {"limit": str(limit)}
    if since:
        parameters["since"] = f"-{since}" if _is_duration(since) else since
    try:
        if job:
            _, accounts = _tuning(config)
            parameters["job"] = _unambiguous(job, [row.job for row in accounts.rows])
        answer = ask_agent(config, "/v1/tuning/history", parameters)
    except AgentUnavailableError as error:
        answer = _stored_history(config, error, parameters, job)
    if as_json:
        echo_json(answer)
        return
    with _known_version():
        decisions = [recorded_decision_from_json(one) for one in answer["decisions"]]
    if not decisions:
        click.echo(f"No decision{f' about {job!r}' if job else ''} in that time.")
        return
    _echo(answer, history_lines(decisions, _width()))


# ----------------------------------------------------------------------------------- requests


def _tuning(config: Config) -> tuple[dict[str, Any], TuningAccounts]:
    """The tuning of the agent's snapshot, with the fields of GET /v1/tuning."""
    snapshot = ask_agent(config, SNAPSHOT_PATH)
    with _known_version():
        answer = {
            "host_name": snapshot["host_name"],
            "now_mono_ns": snapshot["at_mono_ns"],
            "emulated": snapshot["emulated"],
            **snapshot["tuning"],
        }
        return answer, tuning_accounts(msgspec.convert(answer, TuningDocument))


@contextmanager
def _known_version() -> Iterator[None]:
    """WattspanError if the block does not understand the agent's answer."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError):
        raise WattspanError(_OTHER_VERSION) from None


_OTHER_VERSION = (
    "This program does not understand the agent's state of tuning: the agent has another version."
    " Use the `wattspan` that was installed with it, or --json."
)


def _show(
    configuration: ConfigurationOptions,
    job: str,
    as_json: bool,
    facts: Callable[[TuningRow, TuningAccounts, Instant], dict[str, Any] | None],
    lines: Callable[[TuningAccounts, Instant, int | None], Iterable[str]],
) -> None:
    """Print the matching jobs; then, so that programs have the JSON, refuse if tuning is off."""
    answer, accounts = _tuning(configuration.load(client=True).config)
    off = accounts.mode == "off"
    names = {row.job for row in accounts.rows}
    matching = _matching(job, names)
    if job and not matching and not off:
        near = difflib.get_close_matches(job, names, n=1)
        known = ", ".join(sorted(names)) or "none yet"
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {known}."
        raise click.UsageError(f"There is no job {job!r}. {hint}")
    accounts = replace(accounts, rows=tuple(row for row in accounts.rows if row.job in matching))
    now = SystemClock().now()
    if as_json:
        found = [facts(row, accounts, now) for row in accounts.rows]
        echo_json(answer | {"jobs": [one for one in found if one is not None]})
    elif not off:
        _echo(answer, lines(accounts, now, _width()))
    if off:
        raise TuningOffError(
            f"Tuning is off in the agent of {answer['host_name']}. Set"
            ' mode = "advise" in [autotune] and restart it to get advice;'
            ' "apply" applies it.'
        )


def _matching(job: str, names: Iterable[str]) -> list[str]:
    """The job of that name; else those with that part of a name."""
    known = sorted(set(names))
    return [job] if job in known else [one for one in known if job.casefold() in one.casefold()]


def _unambiguous(job: str, names: Iterable[str]) -> str:
    """The only matching name, or ``job`` if there is none; a usage error for several."""
    found = _matching(job, names)
    if len(found) > 1:
        raise click.UsageError(f"{job!r} matches {', '.join(found)}. Write more of the name.")
    return found[0] if found else job


# ---------------------------------------------------------------------------- without an agent


def _stored_history(
    config: Config, why: AgentUnavailableError, parameters: Mapping[str, str], job: str
) -> dict[str, Any]:
    """The history on disk; raises ``why`` if it cannot be read."""
    from wattspan.storage.database import file_exists
    from wattspan.storage.tuning import decisions_path, read_decisions, select_decisions

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
    echo_error(f"No agent answers; these decisions are from {path}.")
    if job:
        job = _unambiguous(job, [one.job for one in known])
    decisions = select_decisions(known, job, int(parameters["limit"]), since)
    return {
        "emulated": emulated,
        "decisions": [recorded_decision_to_json(one) for one in decisions],
    }


# ------------------------------------------------------------------------------------ output


def _echo(answer: Mapping[str, Any], lines: Iterable[str]) -> None:
    if answer["emulated"]:
        click.echo("EMULATED: these are figures of an emulated host and true of no machine.")
    echo_lines(lines)


def _width() -> int | None:
    """Columns of the terminal; None without one."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else None


def _is_duration(text: str) -> bool:
    try:
        Duration.parse(text)
    except ValueError:
        return False
    return True
