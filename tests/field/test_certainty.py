"""Cases of figures that are known, a lower bound or unknown, on every surface of the agent.

A case lists ``domains`` with their readings as pairs of seconds and joules (``steady`` are watts
over a period, each second), and what the surfaces say at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from testbed.field import FieldCase, field_cases
from testbed.top_view import document, drawn

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    SECOND,
    Certainty,
    Consumer,
    Domain,
    Group,
    GroupKind,
    HwType,
    Instant,
    Microjoules,
    Payer,
    PayerInfo,
    Provenance,
    Reading,
    Snapshot,
    Tick,
    Usage,
)
from wattspan_exporters.catalogue import CATALOGUE

BEGIN = 1_000 * SECOND
WORKER = Consumer(40, 4)


def instant(second: float) -> Instant:
    mono = BEGIN + round(second * SECOND)
    return Instant(mono, mono + 10**18)


def domain_of(table: Mapping[str, Any]) -> Domain:
    return Domain(
        table["id"],
        HwType(table["type"]),
        table["id"],
        table.get("source", table["id"]),
        Provenance.MEASURED,
        in_cover=table.get("in_cover", True),
        resource=table.get("resource"),
    )


def readings_of(table: Mapping[str, Any]) -> Iterator[tuple[float, int]]:
    """Seconds and microjoules of all readings."""
    counter = 0
    for period in table.get("steady", ()):
        for second in range(period["from"], period["to"] + 1):
            if second > period["from"]:
                counter += round(period["watts"] * 1e6)
            yield second, counter


def usages_at(case: FieldCase, second: int) -> Iterator[Usage]:
    """The worker uses every resource for half of each second."""
    for table in case["domains"]:
        if resource := table.get("resource"):
            spent: dict[Payer, int] = {WORKER: SECOND // 2} if table.get("used", True) else {}
            yield Usage(resource, instant(second - 1), instant(second), spent, 0, SECOND)


def played(case: FieldCase) -> Snapshot:
    """The snapshot at the end of the case, by the ledger as it runs."""
    ledger = Ledger(LedgerSettings(), boot_id="boot", now=BEGIN)
    domains = {table["id"]: domain_of(table) for table in case["domains"]}
    due = {table["id"]: dict(readings_of(table)) for table in case["domains"]}
    group = Group(GroupKind.UNIT, "worker.service")
    for second in range(case["seconds"] + 1):
        at = instant(second)
        listed: dict[str, tuple[Domain, ...]] = {}
        if second == 0:
            for domain in domains.values():
                listed[domain.source] = (*listed.get(domain.source, ()), domain)
        readings = tuple(
            Reading(name, at, Microjoules(counters[second]))
            for name, counters in due.items()
            if second in counters
        )
        births = (PayerInfo(WORKER, "worker", (group,)),) if second == 0 else ()
        usages = tuple(usages_at(case, second)) if second else ()
        ledger.apply(Tick(at, listed, readings, births, usages, ()))
        ledger.snapshot(at, "host")  # ranks the processes
    return ledger.snapshot(instant(case["seconds"]), "host")


def scraped(snapshot: Snapshot) -> dict[str, dict[str, int | float]]:
    """All series by the Prometheus name and the values of the labels."""
    return {
        metric.series: {" ".join(labels): value for labels, value in metric.draw(snapshot)}
        for metric in CATALOGUE
    }


@pytest.mark.parametrize("case", field_cases("certainty"))
def test_certainty_of_a_figure_is_on_every_surface(case: FieldCase) -> None:
    snapshot = played(case)
    series, shown = scraped(snapshot), document(snapshot)
    energies = series["hw_energy_joules_total"]
    certain = series["wattspan_domain_certainty_info"]

    for name, certainty in case["expected"]["domains"].items():
        known = [value for labels, value in energies.items() if labels.startswith(f"{name} ")]
        assert bool(known) is (certainty != Certainty.UNKNOWN), name
        assert f"{name} energy {certainty}" in certain
        (entry,) = [one for one in shown.domains if one.hw_id == name]
        assert (entry.energy_joules is None) is (certainty == Certainty.UNKNOWN), name
        assert entry.energy_certainty == certainty

    for name, up in case["expected"].get("up", {}).items():
        assert series["wattspan_domain_up"][name] == up, name
    for name, reason in case["expected"].get("gaps", {}).items():
        assert series["wattspan_gap_seconds_total"][f"{name} {reason}"] > 0
        assert any(f"unknown ({reason})" in line for line in drawn(snapshot, height=None))

    for figure, total in (("energy", "joules_total"), ("power", "watts")):
        certainty = case["expected"]["host"][figure]
        assert f"{figure} {certainty}" in series["wattspan_host_certainty_info"]
        exact = figure == "power" and certainty != Certainty.KNOWN
        absent = exact or certainty == Certainty.UNKNOWN
        assert (not series[f"hw_host_{figure}_{total}"]) is absent
    assert shown.host.energy_certainty == case["expected"]["host"]["energy"]
    assert shown.host.power_certainty == case["expected"]["host"]["power"]
    head = drawn(snapshot)[0]
    assert head.count("≥ ") == list(case["expected"]["host"].values()).count("lower_bound")

    said = {kind: str(one) for kind, one in snapshot.attribution_certainty.items()}
    assert said == case["expected"].get("attribution", said)
    if (bounded := case["expected"].get("worker_bounded")) is not None:
        (group,) = [one for one in shown.groups if one.name == "worker.service"]
        assert [str(kind) for kind in group.bounded] == bounded
        line = next(line for line in drawn(snapshot) if "worker.service" in line)
        assert ("≥ " in line) is bool(bounded)
