"""Checks of a host's part in a fleet: etcd, the capper's ceiling, the allotment, the budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from wattspan.capper.protocol import AllotmentRow
from wattspan.cli.doctor import Finding, declared, failure, ok, warning
from wattspan.cli.doctor.tuning import CapperProbe
from wattspan.cli.formatting import duration_each, duration_text
from wattspan.config import FleetSettings
from wattspan.config.tables import EtcdEndpoint, parse_endpoint
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
        yield declared("fleet-none")
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
    code = "etcd-member-unreached" if members else "etcd-unreached"
    yield from (declared(code, what=what, cause=cause) for what, cause in failed)


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
        return declared("etcd-without-tls", what=what, answers=answers)
    if 2 * took > timeout:
        return declared("etcd-slow", what=what, answers=answers, limit=duration_text(timeout))
    return ok(what, answers)


# ------------------------------------------------------------------------------------- capper


def _ceiling(host: _FleetHost) -> Iterator[Finding]:
    """The ceiling that the capper has from the fleet, and its age."""
    state = host.capper.state
    if state is None:
        yield declared("ceiling-unknown")
        return
    held = state.allotment
    if held is None:
        yield declared("ceiling-without-fleet")
        return
    limit = max(held.limit, held.floor)
    left = host.time_left(held)
    if left is None:
        kind = "its fallback" if held.limit else "the floors of its devices"
        yield declared("ceiling-fallback", limit=watts(limit), kind=kind)
    else:
        age = max(0, host.settings.contact - left)
        yield ok(
            "ceiling",
            f"{watts(limit)}, renewed {duration_text(age)} ago, for"
            f" {duration_text(left)} more; {watts(max(held.safe, held.floor))} without contact,"
            " at most",
        )
    if held.enforced is None:
        yield declared("limits-unknown")
    elif held.enforced > limit:
        yield declared("limits-above-ceiling", enforced=watts(held.enforced))


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
        yield declared("leader-none")
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
        yield declared("name-not-examined", error=error)
        return
    entry = state.book.hosts.get(name)
    if not renewals:
        yield declared("name-silent", name=name)
    elif entry is not None and is_acknowledged(entry, report):
        yield declared("name-taken", name=name, limit=watts(entry.allotment.limit))


def _allotment(name: str, state: FleetState, report: HostReport | None) -> Iterator[Finding]:
    """The host's allotment in the fleet's book, or the reason for which it has none."""
    entry = state.book.hosts.get(name)
    reason = state.invalid.get(name) or state.plan().waiting.get(name, "")
    if name in state.book.drained:
        yield declared("host-drained", name=name)
    if reason:
        yield _of_sentences(warning, "waiting", reason)
    if entry is None:
        if report is None and not reason:
            yield declared("allotment-none", name=name)
        return
    bounds = power_bounds(entry, report)
    where = f"at {entry.place}" if entry.place else "at no place"
    counted = f"{name} {where} counts with {watts(bounds.limit)}"
    if report is None:
        yield declared("allotment-without-contact", counted=counted, name=name)
    elif is_acknowledged(entry, report):
        yield ok("allotment", f"{counted}, and with {watts(bounds.safe)} without contact")
    else:
        newest = watts(entry.allotment.limit)
        yield declared("allotment-not-in-force", counted=counted, newest=newest)


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
        yield declared("budget-none", place=place_name(place))


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
        yield declared("hosts-absent", hosts=_some(absent))
    if ended := sorted(set(book.ended) - book.hosts.keys()):
        yield declared("hosts-ended", hosts=_some(ended), hours=ENDED_AFTER // 3600)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _of_sentences(mark: Callable[[str, str, str], Finding], what: str, text: str) -> Finding:
    """A finding of a message whose first sentence is the cause, and whose others are the remedy."""
    cause, _, remedy = text.partition(". ")
    return mark(what, cause.rstrip("."), remedy)
