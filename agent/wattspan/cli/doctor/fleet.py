"""Checks of a host's part in a fleet: etcd, the capper's ceiling, the allotment, the budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from wattspan.capper.protocol import AllotmentRow
from wattspan.cli.doctor.findings import Finding, failure, note, ok, warning
from wattspan.cli.doctor.tuning import CapperProbe
from wattspan.cli.formatting import duration_each, duration_text
from wattspan.config import FleetSettings
from wattspan.config.fleet import EtcdEndpoint, parse_endpoint
from wattspan.fleet.allotment import (
    ENDED_AFTER,
    BudgetBelowFloorsError,
    HostReport,
    floors_by_node,
    is_acknowledged,
    nodes_of,
    place_name,
    power_bounds,
    watts,
)
from wattspan.fleet.allotment_planner import AllotmentPlan
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


class FleetView(NamedTuple):
    """The facts about one host of a fleet: its settings, and the records of the fleet."""

    name: str
    settings: FleetSettings
    keys: FleetKeys
    state: FleetState
    plan: AllotmentPlan

    @property
    def reports(self) -> Mapping[str, HostReport]:
        return self.state.present_reports()


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
    capper = probe()
    members: list[Coordination] = []
    try:
        yield from _members(settings, host, clock, connect, members)
        yield from _ceiling(settings, capper, clock)
        if members:
            yield from _records(settings, host, capper, clock, members[0])
    finally:
        for client in members:
            client.close()


# --------------------------------------------------------------------------------------- etcd


def _members(
    settings: FleetSettings,
    host: str,
    clock: Clock,
    connect: Connect,
    members: list[Coordination],
) -> Iterator[Finding]:
    """Examine each member of the cluster; appends clients of those that serve to ``members``."""
    failed: list[tuple[str, str]] = []
    for endpoint in map(parse_endpoint, settings.endpoints):
        client, what = connect(endpoint), f"etcd {endpoint}"
        try:
            yield _member(what, endpoint, client, settings, host, clock)
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


def _member(
    what: str,
    endpoint: EtcdEndpoint,
    client: Coordination,
    settings: FleetSettings,
    host: str,
    clock: Clock,
) -> Finding:
    """The finding of a member that serves; CoordinationError."""
    keys = FleetKeys(settings.prefix)
    began = clock.monotonic()
    client.read(keys.prefix)
    took = clock.monotonic() - began
    # A write whose condition never holds has no effect, and needs the permission of any write.
    write = KeyWrite(keys.report(settings.name_of(host)), b"")
    with suppress(ConflictError):
        client.commit((write,), (RevisionCondition(keys.book, _NEVER),))
    answers = f"answers within {duration_each(took, 1)}, and permits reads and writes"
    if not endpoint.tls and not Listen(Listen.written(endpoint.host, endpoint.port)).loopback:
        return warning(
            what,
            f"{answers}, without TLS: the network can read the password and change budgets",
            "Give etcd certificates, write https:// in [fleet] endpoints, and set tls_ca.",
        )
    if 2 * took > settings.call_timeout:
        limit = duration_text(settings.call_timeout)
        return warning(
            what,
            f"{answers}; {limit} is the limit",
            "Set a longer [fleet] timeout and contact, or find the cause in etcd's log.",
        )
    return ok(what, answers)


# ------------------------------------------------------------------------------------- capper


def _ceiling(settings: FleetSettings, capper: CapperProbe, clock: Clock) -> Iterator[Finding]:
    """The ceiling that the capper has from the fleet, and its age."""
    if capper.state is None:
        yield warning(
            "ceiling",
            "unknown: no capper answers to this user, and without one the host cannot join",
            "See the finding of the capper under Tuning and caps.",
        )
        return
    held = capper.state.allotment
    if held is None:
        yield failure(
            "ceiling",
            "the capper is in no fleet: its configuration has no [fleet] endpoints",
            "Give capper and agent one configuration, and restart the capper.",
        )
        return
    limit = max(held.limit, held.floor)
    left = _time_left(held, clock)
    if left is None:
        kind = "its fallback" if held.limit else "the floors of its devices"
        yield warning(
            "ceiling",
            f"{watts(limit)}, {kind}: no allotment of the fleet is in force",
            "Start the agent, and read the reason in its log and below.",
        )
    else:
        yield ok(
            "ceiling",
            f"{watts(limit)}, renewed {duration_text(max(0, settings.contact - left))} ago, for"
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


def _time_left(held: AllotmentRow, clock: Clock) -> int | None:
    """The rest of the time of an allotment, in nanoseconds; None if it has ended."""
    left = 0 if held.until is None else held.until - clock.now().since_boot
    return left if left > 0 else None


# ------------------------------------------------------------------------------------ records


def _records(
    settings: FleetSettings, host: str, capper: CapperProbe, clock: Clock, client: Coordination
) -> Iterator[Finding]:
    """The host's registration, its name, its allotment and its budgets."""
    keys = FleetKeys(settings.prefix)
    try:
        state = read_state(keys, client.read(keys.prefix))
    except (CoordinationError, RecordError) as error:
        yield _of_sentences(failure, "records", str(error))
        return
    plan = state.plan()
    view = FleetView(settings.name_of(host), settings, keys, state, plan)
    if state.leader:
        yield ok("leader", f"{state.leader} divides the budgets")
    else:
        yield warning(
            "leader",
            "no host leads, so no allotment changes",
            "Start an agent of the fleet with [fleet] lead = true.",
        )
    held = None if capper.state is None else capper.state.allotment
    if not capper.error.refusal and (held is None or _time_left(held, clock) is None):
        yield from _name(view, client)
    yield from _allotment(view)
    yield from _budgets(view)
    yield from _terms(view)
    yield from _absent(view)


def _name(view: FleetView, client: Coordination) -> Iterator[Finding]:
    """A session of this host's name that goes on, while this host enforces no allotment."""
    key = view.keys.report(view.name)
    stored, report = view.state.written.get(key), view.reports.get(view.name)
    if stored is None or report is None:
        return
    beat = view.settings.contact // BEATS_PER_CONTACT
    try:
        with closing(client.watch(key, stored.revision)) as changes:
            renewals = changes.wait(min(beat + SECOND, _LONGEST_WATCH) / SECOND)
    except CoordinationError as error:
        yield note("name", f"not examined: {error}")
        return
    entry = view.state.book.hosts.get(view.name)
    if not renewals:
        yield note("name", f"a session of {view.name} has not ended, and is not renewed")
    elif entry is not None and is_acknowledged(entry, report):
        yield failure(
            "name",
            f"another host is in contact as {view.name}, and enforces its allotment of"
            f" {watts(entry.allotment.limit)}",
            _NEW_NAME,
        )


def _allotment(view: FleetView) -> Iterator[Finding]:
    """The host's allotment in the fleet's book, or the reason for which it has none."""
    name, book = view.name, view.state.book
    entry, report = book.hosts.get(name), view.reports.get(name)
    reason = view.state.invalid.get(name) or view.plan.waiting.get(name, "")
    if name in book.drained:
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


def _budgets(view: FleetView) -> Iterator[Finding]:
    """The budgets that apply to the host, and the floors of all hosts below each."""
    book = view.state.book
    floors = floors_by_node({**book.hosts, **view.reports})
    nodes = [node for node in nodes_of(view.settings.place, view.name) if node in book.budgets]
    for node in nodes:
        what, budget, ones = (
            f"budget of {place_name(node)}",
            book.budgets[node],
            floors.get(node, []),
        )
        if sum(ones) > budget:
            yield _of_sentences(
                failure, what, str(BudgetBelowFloorsError(node, budget, sum(ones), len(ones)))
            )
        else:
            yield ok(what, f"{watts(budget)}; the floors of its hosts are {watts(sum(ones))}")
    if not nodes:
        yield warning(
            "budget",
            f"none applies to {place_name(view.settings.place)}, so this host is not limited",
            "Run `wattspan fleet budget PLACE WATTS`.",
        )


def _terms(view: FleetView) -> Iterator[Finding]:
    """The terms of the host, which the operator has written."""
    terms = view.state.terms.of(view.name)
    bounds = f"a floor of {watts(terms.floor)} and a limit of {watts(terms.ceiling)} at most"
    if view.name in view.state.terms.hosts:
        yield ok("terms", f"{bounds}, priority {terms.priority}")
    else:
        yield ok("terms", f"the default ones: {bounds}")


def _absent(view: FleetView) -> Iterator[Finding]:
    """Other hosts of the fleet without contact: they count with limits that nobody may use."""
    book = view.state.book
    absent = sorted(book.hosts.keys() - view.reports.keys() - {view.name})
    if absent:
        yield warning(
            "absent hosts",
            f"{_some(absent)} without contact, and counted with their fallback, later their floor",
            "Start their agents, or run `wattspan fleet remove HOST` once a host is off.",
        )
    ended = sorted(set(book.ended) - book.hosts.keys())
    if ended:
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
