"""``wattspan fleet``: shows and changes the power budgets of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from wattspan.cli.formatting import UNKNOWN, TableColumn, table_lines
from wattspan.cli.options import ConfigurationOptions, config_options, echo_result, json_option
from wattspan.clock import SystemClock
from wattspan.fleet.allotment import (
    AllotmentBook,
    HostTerms,
    accept_budgets,
    drain_host,
    is_acknowledged,
    is_host_name,
    nodes_of,
    place_name,
    power_bounds,
    remove_host,
    terms_problem,
)
from wattspan.fleet.coordination import ConflictError, KeyWrite
from wattspan.fleet.records import FleetKeys, FleetState, encode, read_state
from wattspan.ports import ConfigError, WattspanError

if TYPE_CHECKING:
    from wattspan.fleet.etcd import EtcdCoordination

_ATTEMPTS = 10
_MILLIWATTS_PER_WATT = 1_000


class RefusedChangeError(WattspanError):
    """A change of the fleet that would be wrong; the message has the figures."""

    exit_code = 9


@click.group(name="fleet")
def command() -> None:
    """Show or change the power budgets of a fleet."""


@command.command()
@config_options
@json_option
def status(configuration: ConfigurationOptions, as_json: bool) -> None:
    """Show the budgets, and the demand and the allotment of each host.

    Exits with 8 if etcd does not answer.
    """
    with _Fleet(configuration) as fleet:
        facts = fleet_facts(fleet.read())
    echo_result(facts, fleet_lines(facts), as_json=as_json)


@command.command()
@click.argument("place")
@click.argument("watts", type=click.IntRange(1, 10**9), required=False)
@click.option("--remove", is_flag=True, help="Remove the budget of this place.")
@config_options
def budget(
    configuration: ConfigurationOptions, place: str, watts: int | None, remove: bool
) -> None:
    """Set the budget of PLACE to WATTS.

    PLACE is "fleet" for all hosts, a row or rack such as row-1/rack-3, or a host of one, such as
    row-1/rack-3/host-7. A lower budget is in force once all hosts have lowered their limits.

    Exits with 9 if the floors of the hosts exceed the budget, with 8 if etcd does not answer.
    """
    if (watts is None) is not remove:
        raise click.UsageError("Name either WATTS or --remove.")
    node = "" if place == "fleet" else place.strip("/")

    def change(state: FleetState) -> AllotmentBook:
        budgets = {**state.book.budgets}
        if watts is None:
            if budgets.pop(node, None) is None:
                raise RefusedChangeError(f"{place_name(node)} has no budget.")
        else:
            budgets[node] = watts * _MILLIWATTS_PER_WATT
        return accept_budgets(state.book, budgets)

    with _Fleet(configuration) as fleet:
        state = fleet.change(change)
    amount = "no budget" if watts is None else f"a budget of {watts} W"
    click.echo(f"{place_name(node)} has {amount} now; `wattspan fleet status` shows its limits.")
    if watts is not None and (note := without_hosts(state, node)):
        click.echo(note)


@command.command()
@click.argument("host")
@click.option("--undo", is_flag=True, help="Let the host have its share again.")
@config_options
def drain(configuration: ConfigurationOptions, host: str, undo: bool) -> None:
    """Limit HOST to its floor, for instance before it is switched off.

    Exits with 8 if etcd does not answer, with 9 for an unknown host.
    """

    def change(state: FleetState) -> AllotmentBook:
        book = state.book
        if host not in book.hosts and host not in book.drained:
            raise _unknown_host(book, host)
        return drain_host(book, host, drained=not undo)

    with _Fleet(configuration) as fleet:
        fleet.change(change)
    outcome = "gets its share again" if undo else "is limited to its floor"
    click.echo(f"{host} {outcome}; `wattspan fleet status` shows when its limit is in force.")


@command.command()
@click.argument("host")
@config_options
def remove(configuration: ConfigurationOptions, host: str) -> None:
    """Remove HOST, whose power does not count from then on.

    The host must be off, or drained and stopped: nobody else can know that it draws nothing.

    Exits with 8 if etcd does not answer, with 9 if the host is in contact or unknown.
    """
    with _Fleet(configuration) as fleet:
        fleet.change(lambda state: book_without(state, host), ended=fleet.keys.allotment(host))
    click.echo(f"{host} is removed.")


@command.group()
def terms() -> None:
    """Show or change the bounds within which the fleet follows the reports of hosts."""


_WATTS = click.IntRange(1, 10**9)


@terms.command(name="set")
@click.argument("host", required=False)
@click.option("--default", "is_default", is_flag=True, help="Set the terms of all other hosts.")
@click.option("--floor", type=_WATTS, required=True, help="Highest floor that it may report.")
@click.option("--ceiling", type=_WATTS, required=True, help="Highest limit that it gets.")
@click.option(
    "--priority", type=click.IntRange(0, 1000), default=100,
    help="Hosts with a lower one are limited first.",
)  # fmt: skip
@config_options
def set_terms(
    configuration: ConfigurationOptions,
    host: str | None,
    is_default: bool,
    floor: int,
    ceiling: int,
    priority: int,
) -> None:
    """Set the terms of HOST, in watts. Replaces all three of its terms.

    Exits with 9 if the floor exceeds the ceiling, with 8 if etcd does not answer or refuses.
    """
    written = HostTerms(
        floor=floor * _MILLIWATTS_PER_WATT, ceiling=ceiling * _MILLIWATTS_PER_WATT,
        priority=priority,
    )  # fmt: skip
    if problem := terms_problem(written):
        raise RefusedChangeError(problem)
    sentence = (
        f"{host or 'Each other host'} may report a floor of {floor} W, gets {ceiling} W at most,"
        f" and has the priority {priority}."
    )
    _write_terms(configuration, host, is_default, encode(written), sentence)


@terms.command(name="remove")
@click.argument("host", required=False)
@click.option("--default", "is_default", is_flag=True, help="Remove the terms of all other hosts.")
@config_options
def remove_terms(configuration: ConfigurationOptions, host: str | None, is_default: bool) -> None:
    """Remove the terms of HOST, which then has the default ones. Idempotent.

    Exits with 8 if etcd does not answer or refuses.
    """
    sentence = f"{host or 'Each other host'} has the default terms."
    _write_terms(configuration, host, is_default, None, sentence)


@terms.command(name="list")
@config_options
@json_option
def list_terms(configuration: ConfigurationOptions, as_json: bool) -> None:
    """List the terms of each host, and the default ones.

    Exits with 8 if etcd does not answer.
    """
    with _Fleet(configuration) as fleet:
        state = fleet.read()
    rows = [
        {
            "host": name,
            "floor": _watts(one.floor),
            "ceiling": _watts(one.ceiling),
            "priority": one.priority,
        }
        for name, one in (("", state.terms.default), *sorted(state.terms.hosts.items()))
    ]
    columns = (
        TableColumn("host", lambda one: one["host"] or "default", left=True),
        *(TableColumn(key, _power(key)) for key in ("floor", "ceiling")),
        TableColumn("priority", itemgetter("priority")),
    )
    echo_result(rows, table_lines(columns, rows), as_json=as_json)


def _write_terms(
    configuration: ConfigurationOptions,
    host: str | None,
    is_default: bool,
    value: bytes | None,
    sentence: str,
) -> None:
    """Write terms and print ``sentence``, and one about a host that is not in the fleet."""
    if (host is None) is not is_default:
        raise click.UsageError("Name either HOST or --default.")
    if host is not None and not is_host_name(host):
        raise RefusedChangeError(
            f"{host!r} is no name of a host: use 1 to 100 letters, digits, dots and dashes."
        )
    with _Fleet(configuration) as fleet:
        key = fleet.keys.default_terms if host is None else fleet.keys.terms(host)
        fleet.write(KeyWrite(key, value))
        click.echo(sentence)
        with suppress(WattspanError):  # the terms are written, whatever the other records are
            if host is not None and (note := without_host(fleet.read(), host)):
                click.echo(note)


def _places(state: FleetState) -> dict[str, str]:
    """The places of the registered and present hosts, by name."""
    registered = {name: one.place for name, one in state.book.hosts.items()}
    return registered | {name: one.place for name, one in state.present_reports().items()}


def without_hosts(state: FleetState, node: str) -> str:
    """A sentence if no host of the fleet is at ``node``, which may be misspelt; "" otherwise."""
    places = _places(state)
    if not node or any(node in nodes_of(place, name) for name, place in places.items()):
        return ""
    known = ", ".join(sorted({*places.values()} - {""})) or "none"
    return f"No host is at {node} at present. Places with hosts: {known}."


def without_host(state: FleetState, host: str) -> str:
    """A sentence if ``host`` is not in the fleet, and may be misspelt; "" otherwise."""
    known = _places(state)
    hosts = ", ".join(sorted(known)) or "none"
    return "" if host in known else f"{host} is not in the fleet at present. Its hosts: {hosts}."


def book_without(state: FleetState, host: str) -> AllotmentBook:
    """The book without ``host``; RefusedChangeError, or HostInUseError."""
    if host not in state.book.hosts and host not in state.book.ended:
        raise _unknown_host(state.book, host)
    return remove_host(state.book, host, state.present_reports().get(host))


def _unknown_host(book: AllotmentBook, host: str) -> RefusedChangeError:
    known = ", ".join(sorted(book.hosts)) or "none"
    return RefusedChangeError(f"The fleet has no host {host}. Its hosts: {known}.")


# ------------------------------------------------------------------------------------- facts

_SUMS = ("demand", "allotted", "enforceable", "safe")
"""Milliwatts of all hosts at a place."""


def fleet_facts(state: FleetState) -> dict[str, Any]:
    """The state of a fleet in watts."""
    book = state.book
    reports = state.present_reports()
    plan = state.plan()
    hosts = []
    for name in sorted({*book.hosts, *reports}):
        entry, report = book.hosts.get(name), reports.get(name)
        newest = report or book.hosts[name]
        bounds = None if entry is None else power_bounds(entry, report)
        hosts.append(
            {
                "name": name,
                "place": (entry or newest).place,
                "in_contact": report is not None,
                "drained": name in book.drained,
                "priority": newest.priority,
                "floor": _watts(newest.floor),
                "demand": None if report is None else _watts(report.demand),
                "allotment": None if entry is None else _watts(entry.allotment.limit),
                "enforceable": _watts(bounds and bounds.limit),
                "safe": _watts(bounds and bounds.safe),
                "acknowledged": bool(entry and report and is_acknowledged(entry, report)),
                "waiting": plan.waiting.get(name) or state.invalid.get(name, ""),
            }
        )
    places = [
        {
            "place": place,
            "budget": _watts(node.budget),
            "hosts": node.hosts,
            **{key: _watts(getattr(node, key)) for key in _SUMS},
        }
        for place, node in sorted(plan.nodes.items())
    ]
    ended = sorted(set(book.ended) - book.hosts.keys())
    return {"leader": state.leader, "places": places, "hosts": hosts, "ended": ended}


def fleet_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The state of a fleet for people."""
    yield f"Leader: {facts['leader'] or 'none; no allotment changes'}"
    yield from table_lines(_PLACE_COLUMNS, facts["places"])
    yield from table_lines(_HOST_COLUMNS, facts["hosts"])
    if facts.get("ended"):
        yield f"Absent for too long, and not counted any more: {', '.join(facts['ended'])}"


def _power(key: str) -> Callable[[dict[str, Any]], str]:
    """A cell in tenths of a watt, and whole watts from 1,000 W on."""

    def cell(one: dict[str, Any]) -> str:
        value: float | None = one[key]
        if value is None:
            return UNKNOWN
        return f"{round(value) if value >= 1000 else round(value, 1)} W".replace(".0 ", " ")

    return cell


def _demand(host: dict[str, Any]) -> str:
    unlimited = host["in_contact"] and host["demand"] is None
    return "all" if unlimited else _power("demand")(host)


def _host_notes(host: dict[str, Any]) -> str:
    notes = [
        "" if host["in_contact"] else "no contact",
        "drained" if host["drained"] else "",
        host["waiting"],
    ]
    return "; ".join(filter(None, notes))


_PLACE_COLUMNS = (
    TableColumn("place", lambda one: place_name(one["place"]), left=True),
    TableColumn("budget", _power("budget")),
    TableColumn("demand", _power("demand")),
    TableColumn("allotted", _power("enforceable")),
    TableColumn("safe", _power("safe")),
    TableColumn("hosts", itemgetter("hosts")),
)
_HOST_COLUMNS = (
    TableColumn("host", itemgetter("name"), left=True),
    TableColumn("floor", _power("floor")),
    TableColumn("demand", _demand),
    TableColumn("allotted", _power("enforceable")),
    TableColumn("safe", _power("safe")),
    TableColumn("", _host_notes, left=True),
)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / _MILLIWATTS_PER_WATT


class _Fleet:
    """The records of the configured fleet; ends its connections with the context."""

    def __init__(self, configuration: ConfigurationOptions) -> None:
        from wattspan.fleet.etcd import EtcdCoordination

        config = configuration.load_without_plugins()
        if not config.fleet.is_enabled:
            raise ConfigError("This host is in no fleet: set [fleet] endpoints.")
        self.keys: FleetKeys = FleetKeys(config.fleet.prefix)
        self._etcd: EtcdCoordination = EtcdCoordination(config.fleet, SystemClock())

    def read(self) -> FleetState:
        return read_state(self.keys, self._etcd.read(self.keys.prefix))

    def change(self, change: Callable[[FleetState], AllotmentBook], ended: str = "") -> FleetState:
        """Replace the book, again after each change by others; RefusedChangeError.

        ``ended`` is a key that is deleted with it. Returns the state before the change.
        """
        for _ in range(_ATTEMPTS):
            state = self.read()
            try:
                book = change(state)
            except ValueError as error:
                raise RefusedChangeError(str(error)) from None
            try:
                writes = [KeyWrite(self.keys.book, encode(book))]
                writes += [KeyWrite(ended, None)] if ended else []
                self._etcd.commit(writes, (state.condition(self.keys.book),))
            except ConflictError:
                continue
            return state
        raise RefusedChangeError("The fleet changes too often at present. Try again.")

    def write(self, write: KeyWrite) -> None:
        """Write one key, whatever its value was; CoordinationError."""
        self._etcd.commit((write,))

    def __enter__(self) -> _Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._etcd.close()
