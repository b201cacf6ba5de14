"""``wattspan caps``: shows and restores power limits, also with an invalid configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from wattspan.api.requests import CAPS_PATH
from wattspan.capper.actuators import format_setting
from wattspan.capper.host_directory import SYSTEM_CAPPER_RUN, capper_directory, open_capper_host
from wattspan.capper.protocol import CapperAddress, CapperClient, RefusalReason, StateReply, cap_row
from wattspan.cli.capper import emulated_option, open_isolated_actuators
from wattspan.cli.formatting import duration_text, local_time
from wattspan.cli.options import (
    ConfigurationOptions,
    config_options,
    echo_error,
    echo_result,
    json_option,
)
from wattspan.clock import SystemClock
from wattspan.config import AgentSettings, Config
from wattspan.model import CapRow, Knob
from wattspan.ports import CapsError, Clock, ConfigError
from wattspan.sdk import MeasurementError
from wattspan.service.configuration import ask_agent, capper_client
from wattspan.util.text import printable

if TYPE_CHECKING:
    from wattspan.capper.devices import ConcurrentActuator
    from wattspan.capper.process import RestoreContext, RestoreReport

_NAME_STATE_DIRECTORY = (
    "Correct the configuration, or name the state directory with `--set agent.state_dir=DIR`, and"
    " run this again if a limit is still in force."
)

_NO_CAPPER = (
    "No capper runs, so none sets a limit now. `sudo wattspan caps status` starts the system's"
    " capper, if there is one, and shows the devices."
)

_SOURCES = {
    "configuration": "[caps] budget_watts",
    "fleet": "allotted by the fleet",
    "file": "[caps] budget_file",
    "socket": "set on the socket",
}


capper_option = click.option(
    "--capper",
    "socket",
    type=click.Path(path_type=Path, readable=False),
    metavar="PATH",
    help="Ask the capper on this socket, as `wattspan caps status` names it, and no other one.",
)


@click.group(name="caps")
def command() -> None:
    """Show or restore power limits."""


@command.command()
@config_options
@capper_option
@json_option
def status(configuration: ConfigurationOptions, socket: Path | None, as_json: bool) -> None:
    """Show the capper, its agent, and each limit with its holder, age and reason.

    A user whom the capper does not permit gets the same from the running agent, if a capper runs.

    Exits with 6 if no capper answers.
    """
    config = configuration.load_without_plugins(client=True)
    clock = SystemClock()
    # A capper that systemd starts for this connection takes a while to wake the driver first.
    emulated = True if configuration.published.emulated else None
    client = _client(config, clock, "wattspan caps status", socket, timeout=10.0, emulated=emulated)
    asked: AskedCapper | None
    try:
        asked = AskedCapper.ask(client)
    except CapsError as error:
        if os.geteuid() == 0 or socket is not None:
            raise
        asked = _asked_by_agent(config, error)
    if asked is None:
        nothing = msgspec.to_builtins(StateReply(rows=[], lease=0))
        echo_result(nothing, [_NO_CAPPER], as_json=as_json)
        return
    lines = [asked.line(), *state_lines(asked.state, clock)]
    echo_result(msgspec.to_builtins(asked.state), lines, as_json=as_json)


def _asked_by_agent(config: Config, error: CapsError) -> AskedCapper | None:
    """The capper, asked by the running agent; None if none runs, ``error`` if that fails."""
    try:
        found = ask_agent(config, CAPS_PATH, patience=10.0)
        if (facts := found["capper"]) is None:
            return None
        state = msgspec.convert(facts["state"], StateReply)
        return AskedCapper(CapperAddress(Path(facts["socket"])), state)
    except (MeasurementError, LookupError, TypeError, ValueError):
        raise error from None


@command.command()
@config_options
@emulated_option
@capper_option
@click.option(
    "--tuned",
    is_flag=True,
    help="Restore only limits that tuning set, after a capper has ended; limits of fixed caps and"
    " of a power budget stay in force.",
)
@json_option
def restore(
    configuration: ConfigurationOptions,
    emulated: Path | None,
    socket: Path | None,
    tuned: bool,
    as_json: bool,
) -> None:
    """Restore every original limit, whoever holds it. For root.

    A running capper restores them, and then sets no limit until it is restarted. Where none runs,
    they are restored by its journal. A limit that another program has set since is left alone. The
    capper of another agent restores its limits only with --capper, or after a question.

    Exits with 6 if a limit could not be restored, if a damaged journal leaves an original unknown,
    or if nothing was restored and the directory of the journal had to be guessed because of an
    invalid configuration.
    """
    from wattspan.capper.process import restore_limits

    config, certain, faults = load_usable(configuration)
    require_right(config, "restore")
    context = _restore_context(config, emulated, socket)
    asked = None
    if not (tuned or context.ended):
        asked = permitted_capper(context.client("wattspan caps restore"), socket, "restore")
    for sentence in faults:
        echo_error(sentence)
    report = restore_limits(context, tuned_only=tuned)
    troubles = list(report.troubles)
    if not certain and report.by == "journal":
        place = capper_directory(Path(config.agent.state_dir), emulated=emulated is not None)
        warning = f"{place} was only guessed to be the capper's directory. {_NAME_STATE_DIRECTORY}"
        echo_error(warning)
        if not report.restored:
            troubles.append(warning)
    facts = {
        "by": report.by,
        "capper": None if asked is None else asked.to_json(),
        "devices": list(report.devices),
        "restored": report.restored,
        "foreign": [row.state.key.device for row in report.foreign],
        "retained": report.retained,
        "troubles": troubles,
    }
    echo_result(facts, _restore_lines(report, asked), as_json=as_json)
    if troubles:
        raise click.exceptions.Exit(6)


def _restore_lines(report: RestoreReport, asked: AskedCapper | None) -> Iterator[str]:
    if asked is not None:
        yield asked.line()
    if report.devices:
        yield f"Devices: {', '.join(report.devices)}"
    limits = "limit was" if report.restored == 1 else "limits were"
    yield f"{report.restored} {limits} restored by the {report.by}."
    if report.retained:
        stay = "limit stays" if report.retained == 1 else "limits stay"
        yield f"{report.retained} {stay} in force: a fixed cap or the power budget."
    for row in report.foreign:
        knob, limit = row.state.key.knob, format_setting(row.state.key.knob, row.state.requested)
        yield f"Left alone: {row.state.name}; another program has set its {knob} to {limit}."


@command.command()
@config_options
@emulated_option
@capper_option
@json_option
def accept(
    configuration: ConfigurationOptions, emulated: Path | None, socket: Path | None, as_json: bool
) -> None:
    """Take limits that other programs have set as the originals from now on. For root.

    Otherwise they are left alone, until the original has been in force for a while. Nothing is
    written to a device by this; but it may be capped again.
    """
    from wattspan.capper.process import accept_foreign_limits

    config = configuration.load_without_plugins()
    require_right(config, "accept")
    context = _restore_context(config, emulated, socket)
    permitted_capper(context.client("wattspan caps accept"), socket, "accept")
    count = accept_foreign_limits(context)
    sentence = f"{count} foreign limit{'' if count == 1 else 's'} accepted."
    echo_result({"accepted": count}, [sentence], as_json=as_json)


# -------------------------------------------------------------------------- the asked capper


class AskedCapper(NamedTuple):
    """A capper that has answered: its address and state."""

    address: CapperAddress
    state: StateReply

    @classmethod
    def ask(cls, client: CapperClient) -> AskedCapper:
        """The capper of ``client``, which is closed; CapsError."""
        state = capper_state(client)
        return cls(client.address, state)

    @property
    def devices(self) -> list[str]:
        """The names of its devices, in their order."""
        return list(dict.fromkeys(printable(row.name) for row in self.state.rows))

    def line(self) -> str:
        """One line with the process, its agent and its socket."""
        return capper_line(self.state, self.address.path)

    def to_json(self) -> dict[str, Any]:
        state, path = self.state, str(self.address.path)
        return {"pid": state.pid, "agent": state.agent or None, "socket": path}


def capper_line(state: StateReply, socket: Path) -> str:
    """One line about a capper that answers on ``socket``."""
    if state.agent:
        owner = f" of the agent process {state.agent}"
    elif socket.parent == SYSTEM_CAPPER_RUN:
        owner = " of the system's service"
    else:
        owner = ", started without an agent"
    return printable(f"Capper: process {state.pid}{owner}, on {socket}")


def capper_state(client: CapperClient) -> StateReply:
    """The state of the capper, asked once; CapsError."""
    with closing(client):
        client.rows()
        assert client.state is not None  # noqa: S101 - it has just answered
        return client.state


def permitted_capper(client: CapperClient, socket: Path | None, command: str) -> AskedCapper | None:
    """The capper whose limits ``command`` may change; None if none answers.

    CapsError if it refuses, if it is the one of another agent and the user neither names its
    socket nor agrees, or if none answers on ``socket``.
    """
    try:
        asked = AskedCapper.ask(client)
    except CapsError as error:
        if socket is not None or error.refusal not in ("", RefusalReason.ENDING):
            raise
        return None
    if asked.address.shared and socket is None:
        _require_consent(asked, command)
    return asked


def _require_consent(asked: AskedCapper, command: str) -> None:
    devices = ", ".join(asked.devices) or "none"
    question = f"{asked.line()}, which belongs to another agent. Its devices: {devices}"
    if sys.stdin.isatty() and click.confirm(f"{question}. Continue?", err=True):
        return
    raise CapsError(
        f"{question}. Nothing was changed. To change its limits, run"
        f" `wattspan caps {command} --capper {printable(str(asked.address.path))}`.",
        RefusalReason.NOT_ALLOWED,
    )


def require_right(config: Config, command: str) -> None:
    """CapsError unless this user is root, or keeps the journal of a capper."""
    if os.geteuid() == 0:
        return
    for emulated in (False, True):
        with suppress(PermissionError):
            own = capper_directory(Path(config.agent.state_dir), emulated=emulated)
            existing = next(place for place in (own, *own.parents) if place.exists())
            if os.access(existing, os.W_OK, effective_ids=True):
                return
    raise CapsError(
        f"Only root, or the user of the capper, may {command} power limits; nothing was changed."
        f" Run `sudo wattspan caps {command}`.",
        RefusalReason.NOT_ALLOWED,
    )


# ----------------------------------------------------------------------- configuration, clients


class UsableConfiguration(NamedTuple):
    """A configuration with defaults for its faults, and the sentences about these.

    A fault may stand for a state directory that the file was meant to name: the directory is then
    not ``certain``.
    """

    config: Config
    certain: bool = True
    sentences: tuple[str, ...] = ()


def load_usable(configuration: ConfigurationOptions) -> UsableConfiguration:
    """The configuration, whatever its faults."""
    faults: list[str] = []
    config = configuration.load_without_plugins(faults=faults)
    if not faults:
        return UsableConfiguration(config)
    certain = config.agent.state_dir != AgentSettings().state_dir
    kind = "the state directory" if certain else "the default"
    place = f"{config.agent.state_dir}, {kind}"
    nevertheless = f"Limits are restored nevertheless, by the journal in {place}."
    return UsableConfiguration(config, certain, (*faults, nevertheless))


def _client(
    config: Config,
    clock: Clock,
    who: str,
    socket: Path | None,
    *,
    timeout: float,
    emulated: bool | None,
    shared: bool = True,
) -> CapperClient:
    """A client of the capper on ``socket``, or else of this host's or the emulated service's."""
    if socket is not None:
        return CapperClient(socket, clock, who=who, timeout=timeout)
    return capper_client(config, clock, who, timeout=timeout, emulated=emulated, shared=shared)


def _restore_context(config: Config, emulated: Path | None, socket: Path | None) -> RestoreContext:
    from wattspan.capper.process import RestoreContext

    clock = SystemClock()

    def client(who: str) -> CapperClient:
        kind = None if emulated is None else True
        return _client(config, clock, who, socket, timeout=5.0, emulated=kind, shared=False)

    # systemd sets SERVICE_RESULT for ExecStopPost=. The socket is systemd's own and still open
    # then, and a connection would start the capper again.
    return RestoreContext(
        lambda: open_capper_host(Path(config.agent.state_dir), emulated),
        client,
        config,
        # All knobs: the configuration may have changed since a cap was set.
        lambda: _all_actuators(config, emulated, clock),
        clock,
        echo_error,
        ended="SERVICE_RESULT" in os.environ,
        host_dir=None if emulated is not None else Path(config.caps.host_dir),
    )


def _all_actuators(
    config: Config, emulated: Path | None, clock: Clock
) -> Sequence[ConcurrentActuator]:
    """The actuators of all knobs; a plugin that does not load affects its own devices only."""
    try:
        return open_isolated_actuators(tuple(Knob), emulated, clock, config.caps.actuators)
    except ConfigError as error:
        echo_error(str(error))
        return open_isolated_actuators(tuple(Knob), emulated, clock)


# ------------------------------------------------------------------------------------ output


def state_lines(state: StateReply, clock: Clock) -> list[str]:
    """The state of a capper, for people."""
    if not state.rows:
        return ["This host has no device with a power limit."]
    now, lines = clock.monotonic(), []
    if state.suspended:
        lines.append("Everything was restored on request; nothing is set before a restart.")
    if state.ceiling is not None:
        lines += _ceiling_lines(state, state.ceiling, now)
    for row in map(cap_row, state.rows):
        lines.append(f"{row.state.name} ({row.state.key.device})")
        lines += (f"    {line}" for line in cap_lines(row, now))
    return lines


def _ceiling_lines(state: StateReply, lowest: int, now: int) -> Iterator[str]:
    yield f"Ceiling of all devices together: {_power(lowest)}"
    for ceiling in state.ceilings:
        owner = "" if ceiling.uid is None else f" by user {ceiling.uid}"
        left = "" if ceiling.expires is None else f", for {_left(ceiling.expires - now)}"
        why = f"; because: {ceiling.why}" if ceiling.why else ""
        source = _SOURCES.get(ceiling.source, ceiling.source)
        yield f"    {source}{owner}: {_power(ceiling.limit)}{left}{why}"
    if state.short and state.ceiling:
        yield f"    It cannot be kept: the devices' floors take {_power(state.short)} more."


def cap_lines(row: CapRow, now: int) -> Iterator[str]:
    """One cap: its limit, range, holder, time and reason."""
    state = row.state
    setting = partial(format_setting, state.key.knob)
    limits = f"{state.key.knob}: {setting(state.requested)}"
    if state.maximum is not None and state.minimum is not None:
        limits += f" of {setting(state.minimum)} to {setting(state.maximum)}"
    elif state.maximum is not None:
        limits += f", at most {setting(state.maximum)}"
    yield limits if state.default is None else f"{limits}, default {setting(state.default)}"
    if state.enforced is not None and state.enforced != state.requested:
        yield f"obeys {setting(state.enforced)}"
    if row.foreign:
        yield "set by another program, and left unchanged"
    if row.holder:
        held = f"held for {row.holder}: {setting(row.wanted)}" if row.wanted else row.holder
        yield f"{held}; the original is {setting(row.original)}"
        if row.since is not None:
            yield f"since {local_time(row.since.wall // 10**9)}"
        if row.expires is not None:
            yield f"lapses in {_left(row.expires - now)} unless renewed"
        if row.why:
            yield f"because: {row.why.removesuffix('.')}"
    if row.ceiling not in (None, row.wanted):
        yield f"its imposed limit: {setting(row.ceiling)}"
    if row.trouble:
        yield row.trouble


def _power(milliwatts: int) -> str:
    return format_setting(Knob.GPU_POWER, milliwatts)


def _left(nanoseconds: int) -> str:
    return duration_text(max(0, nanoseconds))
