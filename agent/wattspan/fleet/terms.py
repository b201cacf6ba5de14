"""Terms of hosts: bounds that the operator of a fleet writes, and agents only read. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from wattspan.fleet.allotment import HostReport, Power, watts
from wattspan.sharing.power_budget import DEFAULT_PRIORITY

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
