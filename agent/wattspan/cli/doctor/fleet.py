"""Checks of a host's part in a fleet: etcd, the capper's ceiling, the allotment, the budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from wattspan.capper.protocol import AllotmentRow
from wattspan.cli.doctor.findings import Finding, failure, note, ok, warning
from wattspan.cli.doctor.tuning import CapperProbe
from wattspan.cli.formatting import duration_each, duration_text
from wattspan.config import FleetSettings
from wattspan.config.fleet import EtcdEndpoint, parse_endpoint
from wattspan.fleet.allotment import (
    ENDED_AFTER,
    AllotmentBook,
    BudgetBelowFloorsError,
    HostReport,
    floors_by_node,
    is_acknowledged,
    nodes_of,
    place_name,
    power_bounds,
    watts,
)
from wattspan.fleet.coordination import (
    ConflictError,
    Coordination,
    CoordinationError,
    KeyWrite,
    PermissionDeniedError,
    RevisionCondition,
    UnreachableError,
)
from wattspan.fleet.participant import BEATS_PER_CONTACT
from wattspan.fleet.records import FleetKeys, FleetState, RecordError, read_state
from wattspan.model import SECOND
from wattspan.model.settings import Listen
from wattspan.ports import Clock

if TYPE_CHECKING:
    from wattspan.fleet.etcd import EtcdCoordination

Connect = Callable[[EtcdEndpoint], Coordination]
"""Opens a client of one member of the cluster."""

_NEVER: Final = 2**63 - 1
"""A revision that no key has."""
_LONGEST_WATCH: Final = 10 * SECOND
_SHOWN: Final = 5
_START_ETCD: Final = (
    "Start etcd there, open its port in the firewalls, or correct [fleet] endpoints and the TLS"
    " files named there."
)
_NEW_NAME: Final = "Give each host its own [fleet] name, and restart its capper and agent."


@dataclass(frozen=True, slots=True)
class _FleetHost:
    """One host of a fleet: its settings, its name there, and its capper."""

    settings: FleetSettings
    name: str
    capper: CapperProbe
    clock: Clock

    @property
    def keys(self) -> FleetKeys:
        return FleetKeys(self.settings.prefix)

    def time_left(self, held: AllotmentRow) -> int | None:
        """The rest of the time of an allotment, in nanoseconds; None if it has ended."""
        left = 0 if held.until is None else held.until - self.clock.now().since_boot
        return left if left > 0 else None


def etcd_members(settings: FleetSettings, clock: Clock) -> Connect:
    """Opens clients of the members of the configured cluster, each for one member."""

    def connect(endpoint: EtcdEndpoint) -> EtcdCoordination:
        from wattspan.fleet.etcd import EtcdCoordination

        return EtcdCoordination(replace(settings, endpoints=(str(endpoint),)), clock)

    return connect


def examine_fleet(
    settings: FleetSettings,
    host: str,
    clock: Clock,
    connect: Connect,
    probe: Callable[[], CapperProbe],
) -> Iterator[Finding]:
    """The part of this host in the configured fleet. Nothing is written.

    ``host`` is its name unless [fleet] has one; ``probe`` asks its capper.
    """
    if not settings.is_enabled:
        yield note("fleet", "this host is in none: [fleet] endpoints is empty")
        return
    own = _FleetHost(settings, settings.name_of(host), probe(), clock)
    members: list[Coordination] = []
    try:
        yield from _members(own, connect, members)
        yield from _ceiling(own)
        if members:
            yield from _records(own, members[0])
    finally:
        for client in members:
            client.close()


# --------------------------------------------------------------------------------------- etcd


def _members(host: _FleetHost, connect: Connect, members: list[Coordination]) -> Iterator[Finding]:
    """Examine each member of the cluster; appends clients of those that serve to ``members``."""
    failed: list[tuple[str, str]] = []
    for endpoint in map(parse_endpoint, host.settings.endpoints):
        client, what = connect(endpoint), f"etcd {endpoint}"
        try:
            yield _member(host, what, endpoint, client)
        except UnreachableError as error:
            failed.append((what, "; ".join(error.causes) or str(error)))
        except CoordinationError as error:
            yield _of_sentences(failure, what, str(error))
            if isinstance(error, PermissionDeniedError):  # by all members
                client.close()
                break
        else:
            members.append(client)
            continue
        client.close()
    mark = warning if members else failure
    yield from (mark(what, cause, _START_ETCD) for what, cause in failed)


def _member(host: _FleetHost, what: str, endpoint: EtcdEndpoint, client: Coordination) -> Finding:
    """The finding of a member that serves; CoordinationError."""
    keys, timeout = host.keys, host.settings.call_timeout
    began = host.clock.monotonic()
    client.read(keys.prefix)
    took = host.clock.monotonic() - began
    # A write whose condition never holds has no effect, and needs the permission of any write.
    write = KeyWrite(keys.report(host.name), b"")
    with suppress(ConflictError):
        client.commit((write,), (RevisionCondition(keys.book, _NEVER),))
    answers = f"answers within {duration_each(took, 1)}, and permits reads and writes"
    if not endpoint.tls and not Listen(Listen.written(endpoint.host, endpoint.port)).loopback:
        return warning(
            what,
            f"{answers}, without TLS: the network can read the password and change budgets",
            "Give etcd certificates, write https:// in [fleet] endpoints, and set tls_ca.",
        )
    if 2 * took > timeout:
        return warning(
            what,
            f"{answers}; {duration_text(timeout)} is the limit",
            "Set a longer [fleet] timeout and contact, or find the cause in etcd's log.",
        )
    return ok(what, answers)


# ------------------------------------------------------------------------------------- capper


def _ceiling(host: _FleetHost) -> Iterator[Finding]:
    """The ceiling that the capper has from the fleet, and its age."""
    state = host.capper.state
    if state is None:
        yield warning(
            "ceiling",
            "unknown: no capper answers to this user, and without one the host cannot join",
            "See the finding of the capper under Tuning and caps.",
        )
        return
    held = state.allotment
    if held is None:
        yield failure(
            "ceiling",
            "the capper is in no fleet: its configuration has no [fleet] endpoints",
            "Give capper and agent one configuration, and restart the capper.",
        )
        return
    limit = max(held.limit, held.floor)
    left = host.time_left(held)
    if left is None:
        kind = "its fallback" if held.limit else "the floors of its devices"
        yield warning(
            "ceiling",
            f"{watts(limit)}, {kind}: no allotment of the fleet is in force",
            "Start the agent, and read the reason in its log and below.",
        )
    else:
        age = max(0, host.settings.contact - left)
        yield ok(
            "ceiling",
            f"{watts(limit)}, renewed {duration_text(age)} ago, for"
            f" {duration_text(left)} more; {watts(max(held.safe, held.floor))} without contact,"
            " at most",
        )
    if held.enforced is None:
        yield warning("limits", "the limit of a device is unknown", _SEE_LIMITS)
    elif held.enforced > limit:
        yield warning(
            "limits",
            f"the devices are limited to {watts(held.enforced)} together, which is more",
            f"Wait while they follow [caps] ramp_watts_per_second. {_SEE_LIMITS}",
        )


_SEE_LIMITS: Final = "Run `wattspan caps status`: it names the device and the cause."


# ------------------------------------------------------------------------------------ records


def _records(host: _FleetHost, client: Coordination) -> Iterator[Finding]:
    """The host's registration, its name, its allotment and its budgets."""
    try:
        state = read_state(host.keys, client.read(host.keys.prefix))
    except (CoordinationError, RecordError) as error:
        yield _of_sentences(failure, "records", str(error))
        return
    if state.leader:
        yield ok("leader", f"{state.leader} divides the budgets")
    else:
        yield warning(
            "leader",
            "no host leads, so no allotment changes",
            "Start an agent of the fleet with [fleet] lead = true.",
        )
    reports, capper = state.present_reports(), host.capper
    held = None if capper.state is None else capper.state.allotment
    if not capper.error.refusal and (held is None or host.time_left(held) is None):
        yield from _name(host, state, reports.get(host.name), client)
    yield from _allotment(host.name, state, reports.get(host.name))
    yield from _budgets(host, state.book, reports)
    yield _terms(host.name, state)
    yield from _absent(state.book, reports.keys() | {host.name})


def _name(
    host: _FleetHost, state: FleetState, report: HostReport | None, client: Coordination
) -> Iterator[Finding]:
    """A session of this host's name that goes on, while this host enforces no allotment."""
    name, key = host.name, host.keys.report(host.name)
    stored = state.written.get(key)
    if stored is None or report is None:
        return
    beat = host.settings.contact // BEATS_PER_CONTACT
    try:
        with closing(client.watch(key, stored.revision)) as changes:
            renewals = changes.wait(min(beat + SECOND, _LONGEST_WATCH) / SECOND)
    except CoordinationError as error:
        yield note("name", f"not examined: {error}")
        return
    entry = state.book.hosts.get(name)
    if not renewals:
        yield note("name", f"a session of {name} has not ended, and is not renewed")
    elif entry is not None and is_acknowledged(entry, report):
        yield failure(
            "name",
            f"another host is in contact as {name}, and enforces its allotment of"
            f" {watts(entry.allotment.limit)}",
            _NEW_NAME,
        )


def _allotment(name: str, state: FleetState, report: HostReport | None) -> Iterator[Finding]:
    """The host's allotment in the fleet's book, or the reason for which it has none."""
    entry = state.book.hosts.get(name)
    reason = state.invalid.get(name) or state.plan().waiting.get(name, "")
    if name in state.book.drained:
        yield note(
            "drained",
            f"{name} is limited to its floor by an operator",
            f"Run `wattspan fleet drain {name} --undo` to give it its share again.",
        )
    if reason:
        yield _of_sentences(warning, "waiting", reason)
    if entry is None:
        if report is None and not reason:
            yield warning(
                "allotment",
                f"{name} has never joined this fleet, or was removed",
                "Start its agent; `wattspan fleet status` shows it within seconds.",
            )
        return
    bounds = power_bounds(entry, report)
    where = f"at {entry.place}" if entry.place else "at no place"
    counted = f"{name} {where} counts with {watts(bounds.limit)}"
    if report is None:
        yield warning(
            "allotment",
            f"{counted}, without contact",
            f"Start its agent, or run `wattspan fleet remove {name}` once the host is off.",
        )
    elif is_acknowledged(entry, report):
        yield ok("allotment", f"{counted}, and with {watts(bounds.safe)} without contact")
    else:
        newest = watts(entry.allotment.limit)
        yield note("allotment", f"{counted} until it has put its newest, {newest}, in force")


def _budgets(
    host: _FleetHost, book: AllotmentBook, reports: Mapping[str, HostReport]
) -> Iterator[Finding]:
    """The budgets that apply to the host, and the floors of all hosts below each."""
    floors = floors_by_node({**book.hosts, **reports})
    place = host.settings.place
    nodes = [node for node in nodes_of(place, host.name) if node in book.budgets]
    for node in nodes:
        what, budget = f"budget of {place_name(node)}", book.budgets[node]
        ones = floors.get(node, [])
        if sum(ones) > budget:
            error = BudgetBelowFloorsError(node, budget, sum(ones), len(ones))
            yield _of_sentences(failure, what, str(error))
        else:
            yield ok(what, f"{watts(budget)}; the floors of its hosts are {watts(sum(ones))}")
    if not nodes:
        yield warning(
            "budget",
            f"none applies to {place_name(place)}, so this host is not limited",
            "Run `wattspan fleet budget PLACE WATTS`.",
        )


def _terms(name: str, state: FleetState) -> Finding:
    """The terms of the host, which the operator has written."""
    terms = state.terms.of(name)
    bounds = f"a floor of {watts(terms.floor)} and a limit of {watts(terms.ceiling)} at most"
    own = name in state.terms.hosts
    return ok(
        "terms", f"{bounds}, priority {terms.priority}" if own else f"the default ones: {bounds}"
    )


def _absent(book: AllotmentBook, present: Collection[str]) -> Iterator[Finding]:
    """Other hosts of the fleet without contact: they count with limits that nobody may use."""
    absent = sorted(book.hosts.keys() - present)
    if absent:
        yield warning(
            "absent hosts",
            f"{_some(absent)} without contact, and counted with their fallback, later their floor",
            "Start their agents, or run `wattspan fleet remove HOST` once a host is off.",
        )
    if ended := sorted(set(book.ended) - book.hosts.keys()):
        yield warning(
            "ended hosts",
            f"{_some(ended)} absent for {ENDED_AFTER // 3600} h, and not counted any more",
            "Check that each is off, or start its agent; `wattspan fleet remove HOST` ends this.",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _of_sentences(mark: Callable[[str, str, str], Finding], what: str, text: str) -> Finding:
    """A finding of a message whose first sentence is the cause, and whose others are the remedy."""
    cause, _, remedy = text.partition(". ")
    return mark(what, cause.rstrip("."), remedy)
