"""Plans the changes of all hosts' allotments, shrinking before growing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from wattspan.fleet.allotment import (
    Allotment,
    AllotmentBook,
    BookEntry,
    HostReport,
    PowerBounds,
    groups_of,
    node_of,
    nodes_of,
    place_name,
    power_bounds,
    report_problem,
    watts,
)
from wattspan.model.snapshot import FleetPlace
from wattspan.sharing.power_budget import BudgetClaim, BudgetGroup, share_nested_budget

_UNLIMITED: Final = 10**18
_FIXED_PRIORITY: Final = 1_000_000


class AllotmentPlan(NamedTuple):
    """The next book, or None without a change, and the changed allotments by host.

    Allotments may be delivered once the book has been replaced. ``waiting`` has one sentence for
    each host that is not admitted or not followed; ``nodes`` are the sums before the change.
    """

    book: AllotmentBook | None
    changed: Mapping[str, Allotment]
    waiting: Mapping[str, str]
    nodes: Mapping[str, FleetPlace]


def plan_allotments(
    book: AllotmentBook,
    reports: Mapping[str, HostReport],
    *,
    refused: Mapping[str, str] | None = None,
    least_change: int = 0,
) -> AllotmentPlan:
    """The changes that may be made now, towards the share of each host.

    Read ``book`` first and ``reports`` after it: a host without a report counts as a host whose
    session has ended. ``refused`` has the reason for each host whose report is not followed, as by
    its terms. Changes of less than ``least_change`` milliwatts are left out unless another
    host, or a lowered budget, needs the power.
    """
    return _Planning(book, reports, refused or {}, least_change).plan()


class _Host(NamedTuple):
    """A host in one planning.

    A ``fixed`` one cannot be changed now. ``entry`` is None for one that joins; its ``bounds`` are
    those that it will have once it is admitted.
    """

    place: str
    floor: int
    ceiling: int
    priority: int
    demand: int
    bounds: PowerBounds
    entry: BookEntry | None
    report: HostReport | None
    fixed: bool = False


class _Planning:
    """One planning of all hosts, from one book and one set of reports."""

    def __init__(
        self,
        book: AllotmentBook,
        reports: Mapping[str, HostReport],
        refused: Mapping[str, str],
        least_change: int,
    ) -> None:
        self._book, self._reports, self._least = book, reports, least_change
        self._refused = refused
        self._waiting: dict[str, str] = {}
        self._hosts = {
            name: self._registered(name, entry) for name, entry in sorted(book.hosts.items())
        }

    def plan(self) -> AllotmentPlan:
        nodes = self._sums()
        joining = self._candidates()
        everyone = {**self._hosts, **joining}
        limits = self._targets(everyone, safe=False)
        safes = self._targets(everyone, safe=True)
        admitted = self._admitted(joining, nodes)
        present = {**self._hosts, **admitted}
        new_limits = self._step(present, limits, safe=False)
        new_safes = self._step(present, safes, safe=True)
        needed = (
            len(admitted) < len(joining)
            or any((node.headroom or 0) < 0 for node in nodes.values())
            or any(new_limits[name] + self._least < limits[name] for name in present)
            or any(new_safes[name] + self._least < safes[name] for name in present)
        )
        least = 0 if needed else self._least
        revision = self._book.revision + 1
        entries, changed = {}, {}
        for name, host in present.items():
            entry = _next_entry(host, new_limits[name], new_safes[name], revision, least)
            entries[name] = entry
            if host.entry is None or entry.allotment != host.entry.allotment:
                changed[name] = entry.allotment
        book = None
        if entries != self._book.hosts:
            book = replace(self._book, revision=revision, hosts=entries)
        return AllotmentPlan(book, changed, self._waiting, nodes)

    # -------------------------------------------------------------------------------- the hosts

    def _registered(self, name: str, entry: BookEntry) -> _Host:
        report = self._reports.get(name)
        problem = None if report is None else self._problem(name, report)
        if problem is None and report is not None and report.place != entry.place:
            problem = f"it reports the place {report.place!r}, and is registered at {entry.place!r}"
        if problem is not None:
            self._waiting[name] = f"{name} keeps its allotment: {problem}."
        if report is None or problem is not None:
            known = None if report is None else replace(report, floor=entry.floor)
            bounds = power_bounds(entry, known)
            range_ = entry.place, entry.floor, entry.ceiling, entry.priority
            return _Host(*range_, bounds.limit, bounds, entry, None, fixed=True)
        return self._live(name, report, power_bounds(entry, report), entry)

    def _problem(self, name: str, report: HostReport) -> str | None:
        return report_problem(report) or self._refused.get(name)

    def _live(
        self, name: str, report: HostReport, bounds: PowerBounds, entry: BookEntry | None
    ) -> _Host:
        ceiling = self._book.budgets.get(node_of(report.place, name), report.ceiling)
        ceiling = max(report.floor, min(report.ceiling, ceiling))
        if name in self._book.drained:
            ceiling = report.floor
        wanted = ceiling if report.demand is None else report.demand
        demand = min(max(wanted, report.floor), ceiling)
        return _Host(
            report.place, report.floor, ceiling, report.priority, demand, bounds, entry, report
        )

    def _candidates(self) -> dict[str, _Host]:
        """The hosts that are not registered, and whose floors fit beside those of all others."""
        found: dict[str, _Host] = {}
        lowest: dict[str, int] = {}
        for name, host in self._hosts.items():
            for node in nodes_of(host.place, name):
                lowest[node] = lowest.get(node, 0) + (
                    host.bounds.limit if host.fixed else host.floor
                )
        new = [(-r.priority, name) for name, r in self._reports.items() if name not in self._hosts]
        for _, name in sorted(new):
            report = self._reports[name]
            problem = self._problem(name, report)
            if name in self._book.drained:
                problem = "it is drained"
            for node in () if problem else nodes_of(report.place, name):
                budget, others = self._book.budgets.get(node), lowest.get(node, 0)
                if problem is None and budget is not None and others + report.floor > budget:
                    problem = (
                        f"its floor of {watts(report.floor)} and the {watts(others)} to which the"
                        f" other hosts of {place_name(node)} can be limited exceed the budget of"
                        f" {watts(budget)}. Raise that budget, or drain a host"
                    )
            if problem is not None:
                self._waiting[name] = f"{name} is not admitted: {problem}."
                continue
            for node in nodes_of(report.place, name):
                lowest[node] = lowest.get(node, 0) + report.floor
            held = max(report.limit, report.floor)
            found[name] = self._live(name, report, PowerBounds(held, held), None)
        return found

    def _admitted(
        self, joining: Mapping[str, _Host], nodes: Mapping[str, FleetPlace]
    ) -> dict[str, _Host]:
        """The hosts that join and for which there is room now."""
        used = {node: (one.enforceable, one.safe) for node, one in nodes.items()}
        admitted = {}
        for name, host in joining.items():
            above = nodes_of(host.place, name)
            after = {
                node: (limit + host.bounds.limit, safe + host.bounds.safe)
                for node in above
                for limit, safe in [used.get(node, (0, 0))]
            }
            full = [
                node
                for node in above
                if max(after[node]) > self._book.budgets.get(node, _UNLIMITED)
            ]
            if full:
                self._waiting[name] = (
                    f"{name} waits for {watts(host.bounds.limit)} that other hosts of"
                    f" {place_name(full[0])} have to give up first."
                )
                continue
            used |= after
            admitted[name] = host
        return admitted

    # -------------------------------------------------------------------------------- the shares

    def _targets(self, hosts: Mapping[str, _Host], *, safe: bool) -> dict[str, int]:
        """The share of each host: by its demand, or without any for its safe allotment."""
        claims = {}
        for name, host in hosts.items():
            if host.fixed:
                held = host.bounds.safe if safe else host.bounds.limit
                claims[name] = BudgetClaim(held, held, _FIXED_PRIORITY)
            else:
                want = None if safe else host.demand
                claims[name] = BudgetClaim(host.floor, host.ceiling, host.priority, want)
        return self._share(hosts, claims)

    def _step(
        self, hosts: Mapping[str, _Host], targets: Mapping[str, int], *, safe: bool
    ) -> dict[str, int]:
        """Each host's target as far as the others have released the power for it."""
        claims, held = {}, {}
        for name, host in hosts.items():
            held[name] = host.bounds.safe if safe else host.bounds.limit
            most = held[name] if host.fixed else max(held[name], targets[name])
            claims[name] = BudgetClaim(held[name], most, host.priority)
        shares = self._share(hosts, claims)
        return {
            name: held[name] if host.fixed else min(shares[name], targets[name])
            for name, host in hosts.items()
        }

    def _share(
        self, hosts: Mapping[str, _Host], claims: Mapping[str, BudgetClaim]
    ) -> dict[str, int]:
        members: dict[str, list[str]] = {"": []}
        for name, host in hosts.items():
            members.setdefault(host.place, []).append(name)
        return share_nested_budget(claims, _tree(members, self._book.budgets))

    def _sums(self) -> dict[str, FleetPlace]:
        """The sums of the registered hosts at every place with hosts or a budget."""
        budgets = self._book.budgets
        sums: dict[str, list[int]] = {place: [0] * 6 for place in ("", *budgets)}
        for name, host in self._hosts.items():
            allotted = min(host.bounds.limit, self._book.hosts[name].allotment.limit)
            absent = name not in self._reports
            values = (1, host.demand, allotted, host.bounds.safe, host.bounds.limit, absent)
            for node in nodes_of(host.place, name):
                if node in budgets or node != node_of(host.place, name):
                    old = sums.get(node, [0] * 6)
                    sums[node] = [a + b for a, b in zip(old, values, strict=True)]
        return {node: FleetPlace(node, budgets.get(node), *values) for node, values in sums.items()}


def _next_entry(host: _Host, limit: int, safe: int, revision: int, least: int) -> BookEntry:
    """The entry of a host after the change, or with what it has acknowledged."""
    if host.report is None and host.entry is not None:  # nothing reaches it
        return host.entry
    assert host.report is not None  # noqa: S101 - only registered hosts have no report
    if host.entry is not None:
        old = host.entry.allotment
        near = max(abs(limit - old.limit), abs(safe - old.safe)) < max(1, least)
        if old.session == host.report.session and near:
            limit, safe, revision = old.limit, old.safe, old.sequence
    return BookEntry(
        place=host.place,
        floor=host.floor,
        ceiling=host.report.ceiling,
        priority=host.priority,
        allotment=Allotment(session=host.report.session, sequence=revision, limit=limit, safe=safe),
        limit_bound=max(limit, host.bounds.limit),
        safe_bound=max(safe, host.bounds.safe),
    )


def _tree(members: Mapping[str, Iterable[str]], budgets: Mapping[str, int]) -> BudgetGroup[str]:
    """The groups of all places with members, each with its budget."""
    places = sorted({group for place in members for group in groups_of(place)}, reverse=True)
    inner: dict[str, list[BudgetGroup[str]]] = {}
    for place in places:  # inner groups before outer ones
        group = BudgetGroup(
            budgets.get(place),
            tuple(sorted(members.get(place, ()))),
            tuple(reversed(inner.get(place, ()))),
        )
        if not place:
            return group
        inner.setdefault(place.rpartition("/")[0], []).append(group)
    raise AssertionError("the whole fleet is a group")  # pragma: no cover
