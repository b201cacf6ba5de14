"""Allotments of the power budgets of rows and racks to hosts: values and their rules. Pure.

The leader of the fleet keeps one value, the `AllotmentBook`, under one key, and replaces it by
compare-and-swap only. It holds, for each registered host, the newest allotment and the highest
limit that the host may still enforce. Every decision follows from the book and the hosts' reports,
so any successor continues in the middle of a transition. An allotment under a host's own key is a
copy for its delivery: old copies do no harm, because hosts ignore sequences that are not newer.

Limits shrink before others grow. A host's limit counts with its highest value that may be in force:
the former until the host acknowledges the new one, or until its session ends. A host without
contact lowers its limit to its safe allotment, and never raises a limit by itself. At every node,
the limits that may be in force therefore add up to the budget at most, in any partition.

Power is in milliwatts. A place names the groups of a host from the outermost on, as
``row-1/rack-3``; a budget applies to a place, to ``PLACE/HOST``, or to ``""``, the whole fleet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from wattspan.sharing.power_budget import DEFAULT_PRIORITY

MAX_POWER: Final = 10**12
"""The highest power of a host or a budget, in milliwatts."""
Power = Annotated[int, msgspec.Meta(ge=0, le=MAX_POWER)]
"""Milliwatts in a record."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""A number in a record that any JSON reader keeps exactly."""
RETREATED_AFTER: Final = 9_000
"""Seconds without a host's session after which its capper has certainly retreated to the floor.

The sum of `wattspan.capper.ceilings.RETREAT`, the longest ramp, and the drift of clocks.
"""
ENDED_AFTER: Final = 86_400
"""Seconds without a host's session after which its registration ends."""
_MAX_ENDED: Final = 1_000
_PLACE = re.compile(r"(?:[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*)?")


class BudgetBelowFloorsError(ValueError):
    """The floors of the hosts at ``place`` exceed its budget; both in milliwatts."""

    def __init__(self, place: str, budget: int, floors: int, hosts: int) -> None:
        super().__init__(
            f"The budget of {place_name(place)}, {watts(budget)}, is {watts(floors - budget)} below"
            f" the floors of its {hosts} host{'s' * (hosts != 1)}, which are {watts(floors)}"
            " together. Set a higher budget, or remove hosts first."
        )
        self.place, self.budget, self.floors, self.hosts = place, budget, floors, hosts


class HostInUseError(ValueError):
    """A host cannot be removed, because it may still use its allotment."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a host publishes under its lease, which ends with its ``session``.

    ``floor`` is the lowest power to which its devices can be limited, ``ceiling`` the sum of their
    original limits, ``demand`` the limit that it asks for (None: its ceiling). ``limit`` is the
    limit that it enforces, and ``acknowledged`` the sequence of the newest allotment that is in
    force and recorded on the host. A host that is not registered lowers its limit to its floor.
    """

    session: str
    place: str
    floor: Power
    ceiling: Power
    limit: Power
    demand: Power | None = None
    priority: Count = DEFAULT_PRIORITY
    acknowledged: Count = 0


class Allotment(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of a host in one session, and its limit once that session has ended.

    A host holds one, too: the limit that it enforces now, and its limit without contact. It records
    both on disk before it raises a limit and before it acknowledges one. It has to call `lost`
    early enough that its limit is lowered before its lease can end at the server.
    """

    session: str
    sequence: Count
    limit: Power
    safe: Power

    @classmethod
    def initial(cls, limit: int, safe: int, session: str = "") -> Allotment:
        """The limits that a host holds before the first allotment of a session."""
        return cls(session=session, sequence=0, limit=limit, safe=safe)

    def adopt(self, other: Allotment) -> Allotment:
        """The allotment that a host holds with another one: a newer one of its session only."""
        is_newer = other.session == self.session and other.sequence > self.sequence
        return other if self.session and is_newer else self

    def lost(self) -> Allotment:
        """The limits without contact: the lower one of the limit and the safe allotment."""
        limit = min(self.limit, self.safe)
        return Allotment.initial(limit, limit)

    def begin(self, session: str) -> Allotment:
        """The limits in a new session, unchanged until a new allotment arrives."""
        return replace(self.lost(), session=session)


class BookEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A registered host in the book: its newest allotment, and the highest values of those before.

    ``limit_bound`` and ``safe_bound`` are at least ``limit`` and ``safe``, and include every
    allotment of the session that the host may have adopted and not replaced. ``absent`` are the
    seconds that leaders have seen the host without a session.
    """

    place: str
    floor: Power
    ceiling: Power
    priority: Count
    allotment: Allotment
    limit_bound: Power
    safe_bound: Power
    absent: Count = 0


class AllotmentBook(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state of the allotment: budgets by place, and the registered hosts by name.

    A host that is ``drained`` is allotted its floor, and is not admitted again. ``ended`` are the
    hosts whose registration has ended because they were absent for too long.
    """

    revision: Count = 0
    budgets: dict[str, Power] = {}
    hosts: dict[str, BookEntry] = {}
    drained: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class PowerBounds(NamedTuple):
    """The highest limit that a host may enforce, now and after it loses contact."""

    limit: int
    safe: int


# ------------------------------------------------------------------------------- operator's changes


def accept_budgets(book: AllotmentBook, budgets: Mapping[str, int]) -> AllotmentBook:
    """The book with other budgets.

    ValueError if a place or a power is invalid, BudgetBelowFloorsError if the hosts' floors exceed
    a budget. Lower budgets apply as fast as the hosts acknowledge lower limits.
    """
    for place, budget in budgets.items():
        if not _PLACE.fullmatch(place):
            raise ValueError(f"{place!r} is not a place: name groups as row-1/rack-3.")
        if not 0 < budget <= MAX_POWER:
            raise ValueError(
                f"The budget of {place_name(place)} must be above 0 and at most {watts(MAX_POWER)}."
            )
    floors = floors_by_node(book.hosts)
    for place in sorted(budgets):
        ones = floors.get(place, [])
        if sum(ones) > budgets[place]:
            raise BudgetBelowFloorsError(place, budgets[place], sum(ones), len(ones))
    return replace(book, revision=book.revision + 1, budgets=dict(budgets))


def floors_by_node(hosts: Mapping[str, BookEntry | HostReport]) -> dict[str, list[int]]:
    """The floors of ``hosts``, by name, at every node that has one; in milliwatts."""
    floors: dict[str, list[int]] = {}
    for name, host in hosts.items():
        for node in nodes_of(host.place, name):
            floors.setdefault(node, []).append(host.floor)
    return floors


def drain_host(book: AllotmentBook, name: str, *, drained: bool = True) -> AllotmentBook:
    """The book in which a host is drained, or not any more."""
    names = {*book.drained, name} if drained else {*book.drained} - {name}
    return replace(book, revision=book.revision + 1, drained=tuple(sorted(names)))


def remove_host(book: AllotmentBook, name: str, report: HostReport | None) -> AllotmentBook:
    """The book without a host, whose power does not count from then on.

    ``report`` is its present report, None if its session has ended: then the operator knows that
    it is off. KeyError if it is not registered, HostInUseError if it is in contact. A drained host
    stays drained.
    """
    if name in book.ended and name not in book.hosts:
        ended = tuple(other for other in book.ended if other != name)
        return replace(book, revision=book.revision + 1, ended=ended)
    entry = book.hosts[name]
    if report is not None:
        raise HostInUseError(
            f"{name} is in contact and may use {watts(power_bounds(entry, report).limit)}. Switch"
            " it off, or stop its agent, first."
        )
    hosts = {other: one for other, one in book.hosts.items() if other != name}
    return replace(book, revision=book.revision + 1, hosts=hosts)


def note_absence(book: AllotmentBook, seconds: Mapping[str, int]) -> AllotmentBook:
    """The book after registered hosts were seen without a session for some more ``seconds``.

    A host counts with its floor once its capper has certainly retreated to it, and no longer at all
    after ENDED_AFTER. Unchanged without such hosts.
    """
    hosts, ended = dict(book.hosts), [name for name in book.ended if name not in book.hosts]
    for name, more in seconds.items():
        entry = replace(hosts[name], absent=hosts[name].absent + more)
        if entry.absent >= ENDED_AFTER:
            del hosts[name]
            ended.append(name)
            continue
        if entry.absent >= RETREATED_AFTER:
            limit, safe = min(entry.limit_bound, entry.floor), min(entry.safe_bound, entry.floor)
            entry = replace(entry, limit_bound=limit, safe_bound=safe)
        hosts[name] = entry
    kept = tuple(ended[-_MAX_ENDED:])
    if hosts == book.hosts and kept == book.ended:
        return book
    return replace(book, revision=book.revision + 1, hosts=hosts, ended=kept)


# ------------------------------------------------------------------------------- limits in force


def power_bounds(entry: BookEntry, report: HostReport | None) -> PowerBounds:
    """The highest limits that a registered host may enforce, by its present report if any."""
    if report is None or report.session != entry.allotment.session:
        lost = min(entry.limit_bound, entry.safe_bound)
        return PowerBounds(lost, lost)
    if is_acknowledged(entry, report):
        bounds = PowerBounds(entry.allotment.limit, entry.allotment.safe)
    else:
        bounds = PowerBounds(entry.limit_bound, entry.safe_bound)
    return PowerBounds(max(bounds.limit, report.floor), max(bounds.safe, report.floor))


def report_problem(report: HostReport) -> str | None:
    """The reason if a report is invalid, else None."""
    if not _PLACE.fullmatch(report.place):
        return f"{report.place!r} is not a place such as row-1/rack-3"
    if not 0 <= report.floor <= report.ceiling <= MAX_POWER:
        return (
            f"its floor of {watts(report.floor)} and its ceiling of {watts(report.ceiling)} are"
            " no range of power"
        )
    if not 0 <= report.limit <= MAX_POWER:
        return f"its limit of {watts(report.limit)} is no power"
    return None


def is_acknowledged(entry: BookEntry, report: HostReport) -> bool:
    newest = entry.allotment
    return report.session == newest.session and report.acknowledged == newest.sequence


# ---------------------------------------------------------------------------------------- places


def node_of(place: str, name: str) -> str:
    """The node of a host itself."""
    return f"{place}/{name}" if place else name


def groups_of(place: str) -> Iterator[str]:
    """The groups of a place, the outermost first."""
    yield ""
    if place:
        parts = place.split("/")
        yield from ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def nodes_of(place: str, name: str) -> list[str]:
    """Every node to which a host belongs, its own last."""
    return [*groups_of(place), node_of(place, name)]


def place_name(place: str) -> str:
    return place or "the fleet"


def watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:.12g} W"


# ---------------------------------------------------------------------------------- terms of hosts


MAX_PRIORITY: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


class HostTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The highest floor that a host may report, its highest limit in milliwatts, its priority."""

    floor: Power
    ceiling: Power
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = DEFAULT_PRIORITY


DEFAULT_TERMS: Final = HostTerms(floor=2_000_000, ceiling=20_000_000)
"""The terms of a host for which the operator has written neither terms nor default ones."""


class FleetTerms(NamedTuple):
    """The terms of the named hosts, and those of all others."""

    hosts: Mapping[str, HostTerms] = {}
    default: HostTerms = DEFAULT_TERMS

    def of(self, host: str) -> HostTerms:
        return self.hosts.get(host, self.default)

    def bounded(self, host: str, report: HostReport) -> HostReport:
        """The report within the terms; without terms of its own, a host may lower its priority."""
        terms = self.of(host)
        priority = terms.priority
        if host not in self.hosts:
            priority = min(max(report.priority, 0), priority)
        return replace(
            report,
            floor=min(report.floor, terms.floor),
            ceiling=min(report.ceiling, terms.ceiling),
            priority=priority,
        )

    def violation(self, host: str, report: HostReport) -> str:
        """The reason if the report of a host violates its terms; "" if it does not."""
        terms = self.of(host)
        for allowed, name in ((terms.floor, "floor"), (terms.ceiling, "ceiling")):
            if report.floor > allowed:
                return (
                    f"it reports a floor of {watts(report.floor)}, and its terms permit a {name} of"
                    f" {watts(allowed)}. Correct [caps] reserve_watts there, or run `wattspan fleet"
                    f" terms set {host}`"
                )
        return ""


def is_host_name(name: str) -> bool:
    """True for 1 to 100 letters, digits, dots, underscores and dashes, but not "." and ".."."""
    return bool(_NAME.fullmatch(name)) and name not in (".", "..")


def terms_problem(terms: HostTerms) -> str:
    """The reason if terms contradict themselves; "" if they do not."""
    if not 0 < terms.floor <= terms.ceiling:
        return (
            f"A floor of {watts(terms.floor)} and a ceiling of {watts(terms.ceiling)} are no range"
            " of power. Name a floor above 0 and a ceiling that is not below it."
        )
    return ""


# ------------------------------------------------------------------------------------------ demand


_LIMITED: Final = 0.9
"""Fraction of the limit from which on a host may be held back by it."""
_HEADROOM: Final = 1.15
_GROWTH: Final = 1.25
"""Factor by which a limited host asks for more, each time."""
_DECAY: Final = 0.98
"""Factor by which the demand falls at most, each time: a short pause releases little power."""
_HELD_BACK: Final = 0.75
"""Fraction of a tuned limit from which on it holds its device back: phases of work draw less."""


def held_power(held: Mapping[str, tuple[int, int]], powers: Mapping[str, int]) -> int:
    """The milliwatts that devices would draw besides without their tuners.

    ``held`` has the limit of each tuned device and the power by which it is lower for its tuner. A
    device whose work pauses or has ended would draw no more. One without a known power may.
    """
    return sum(
        lowered
        for device, (limit, lowered) in held.items()
        if powers.get(device, limit) >= _HELD_BACK * limit
    )


def next_demand(
    previous: int | None, power: int | None, limit: int, floor: int, original: int, tuned: int = 0
) -> int | None:
    """The next demand of a host that draws ``power`` under ``limit``, all in milliwatts.

    A limited host does not show the power that it wants, so its demand grows until the limit holds
    it back no more. None, which asks for everything, while the power is unknown. ``tuned``,
    which tuners hold back, counts as drawn: their tries must not change their reference.
    """
    if power is None:
        return None
    power, limit = power + tuned, limit + tuned
    is_limited = power >= _LIMITED * limit
    wanted = round(max(power, limit) * _GROWTH if is_limited else power * _HEADROOM)
    if previous is not None:
        wanted = max(wanted, round(previous * _DECAY))
    return min(max(wanted, floor), original)
