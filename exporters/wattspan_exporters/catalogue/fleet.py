"""Metrics of power budgets that several hosts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from wattspan.model import Snapshot
from wattspan.model.snapshot import FleetAccounts, FleetPlace
from wattspan_exporters.catalogue.definition import Instrument, Metric, Sample, single

GAUGE = Instrument.GAUGE

WHOLE_FLEET = "fleet"
"""The label of the place that has all hosts."""


def _host(name: str, unit: str, text: str, value: Callable[[FleetAccounts], int | None]) -> Metric:
    """A metric of this host's part; absent outside a fleet."""

    def draw(snapshot: Snapshot) -> int | None:
        return None if snapshot.fleet is None else value(snapshot.fleet)

    return Metric(f"wattspan.fleet.{name}", GAUGE, unit, text, (), single(draw))


def _place(name: str, unit: str, text: str, value: Callable[[FleetPlace], int | None]) -> Metric:
    """A metric of each place, which the leader alone has."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for one in () if snapshot.fleet is None else snapshot.fleet.places:
            if (figure := value(one)) is not None:
                yield (one.place or WHOLE_FLEET,), figure

    said = f"{text} From the leader of the fleet only."
    return Metric(f"wattspan.fleet.{name}", GAUGE, unit, said, ("place",), draw)


FLEET = (
    _host("host.allotment", "W", "Power limit that the fleet allots to this host.",
          attrgetter("allotment")),
    _host("host.safe", "W", "Power limit of this host without contact to the fleet, at most.",
          attrgetter("safe")),
    _host("host.demand", "W",
          "Power for which this host asks; absent if it asks for that of all its devices.",
          attrgetter("demand")),
    _host("contact", "", "Contact of this host to the fleet: 1 in a session, else 0.",
          lambda accounts: int(accounts.in_contact)),
    _host("leader", "", "Leadership of the fleet: 1 if this host leads, else 0.",
          lambda accounts: int(accounts.leads)),
    _place("budget", "W", "Power budget of a place.", attrgetter("budget")),
    _place("demand", "W", "Power for which the hosts of a place ask.", attrgetter("demand")),
    _place("allotted", "W", "Sum of the power limits that the hosts of a place may enforce now.",
           attrgetter("enforceable")),
    _place("safe", "W", "Sum of the power limits of the hosts of a place without contact.",
           attrgetter("safe")),
    _place("headroom", "W", "Part of the budget of a place that no host may use now.",
           attrgetter("headroom")),
    _place("hosts", "{host}", "Registered hosts of a place.", attrgetter("hosts")),
    _place("absent_hosts", "{host}", "Registered hosts of a place without contact.",
           attrgetter("absent")),
    _host("ended_hosts", "{host}",
          "Hosts that are not counted any more because they were absent for too long. From the"
          " leader of the fleet only.",
          lambda accounts: accounts.ended if accounts.leads else None),
)  # fmt: skip
