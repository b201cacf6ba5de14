"""Division among spans on hosts where some hardware types are absent or charge nothing."""

from __future__ import annotations

from typing import Any

import pytest
from testbed.field import FieldCase, field_cases

from wattspan.model import HwType, Microjoules
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span, SpanColumns

MICROSECOND = 1_000
END = 100 * MICROSECOND


def columns(spans: list[dict[str, int]]) -> SpanColumns:
    return SpanColumns.of(
        [
            Span(
                bytes(16),
                bytes([each["id"]]) * 8,
                b"",
                "service",
                "name",
                each["start"] * MICROSECOND,
                each["end"] * MICROSECOND,
            )
            for each in spans
        ]
    )


@pytest.mark.parametrize("case", field_cases("span_lanes"))
def test_energies_of_spans_and_outside_are_exact_in_each_lane(case: FieldCase) -> None:
    profile, process = EnergyProfile(), ProcessSpans()
    for name, watts in case["power"].items():
        kind, energy = HwType(name), Microjoules(watts * END // 1_000)
        profile.append(kind, kind, 0, END, energy, 0)
    profile.merge()
    profile.finish()
    found: dict[str, dict[str, int]] = {name: {} for name in case["power"]}

    def count(ident: str, energies: Any) -> None:
        for kind, energy in energies.items():
            found[kind.value][ident] = found[kind.value].get(ident, 0) + energy

    for export in case["export"]:
        waiting = [columns(export.get("waiting", []))]
        for each in process.settle(columns(export["spans"]), profile, END, waiting=waiting):
            count(str(each.span.id[0]), each.exclusive)
        count("outside", process.outside(profile, export["outside_until"] * MICROSECOND))
    assert found == case["expected"]
