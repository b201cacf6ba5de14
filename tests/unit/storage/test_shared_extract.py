"""An extract of the history for a user who may not read the store."""

from __future__ import annotations

import json

import pytest

from wattspan.model import GapReason, GroupKind, HwType, Provenance
from wattspan.storage.breakdown import break_down
from wattspan.storage.deltas import PROCESS, EnergyOwner, SpanName, SpanUsage, UsageRole
from wattspan.storage.query import (
    DomainTotal,
    HistoryExtract,
    NoHistory,
    extract_from_json,
    extract_to_json,
    own_extract,
)

PACKAGE = DomainTotal(
    "rapl:package-0", HwType.CPU, "package-0", Provenance.MEASURED, "cpu-time", True, True,
    {GapReason.RESET: 5}, 100, 70, 20, 10, 0,
)  # fmt: skip
USER, CPU = GroupKind.USER.value, HwType.CPU
OWNERS = {
    EnergyOwner(USER, CPU, "ada"): 30,
    EnergyOwner(USER, CPU, "eve"): 25,
    EnergyOwner.others(USER, CPU): 15,
    EnergyOwner(PROCESS, CPU, "ada", "session-1.scope"): 40,
    EnergyOwner(GroupKind.UNIT.value, CPU, "ada"): 40,
}
SPANS = {SpanName(UsageRole.NAMED, "shop", "pay"): SpanUsage({CPU: 9}, 1)}
EXTRACT = HistoryExtract(60, 180, (60,), (PACKAGE,), OWNERS, SPANS)


def test_user_gets_the_own_row_and_the_rest() -> None:
    own = own_extract(EXTRACT, "ada")
    assert own.owners == {
        EnergyOwner(USER, CPU, "ada"): 30,
        EnergyOwner.others(USER, CPU): 40,
        EnergyOwner.others(PROCESS, CPU): 40,
        EnergyOwner.others(GroupKind.UNIT.value, CPU): 40,
    }
    assert own.spans == {}
    assert own.domains == EXTRACT.domains


@pytest.mark.parametrize("kind", [USER, PROCESS])
def test_restricted_report_has_the_same_sums(kind: str) -> None:
    def total(extract: HistoryExtract) -> int:
        (section,) = break_down(extract, (kind,)).sections
        return sum(line.total for line in section.lines)

    assert total(own_extract(EXTRACT, "ada")) == total(EXTRACT) == 70


def test_name_of_the_rest_is_nobodys_row() -> None:
    owners = {EnergyOwner(USER, CPU, "", rest=True): 3}
    extract = HistoryExtract(0, 60, (60,), (PACKAGE,), owners)
    assert own_extract(extract, "").owners == owners


@pytest.mark.parametrize("found", [own_extract(EXTRACT, "ada"), NoHistory(None), NoHistory((1, 2))])
def test_extract_survives_json(found: HistoryExtract | NoHistory) -> None:
    assert extract_from_json(json.loads(json.dumps(extract_to_json(found)))) == found


@pytest.mark.parametrize("facts", [[], {"extract": {}}, {"reach": "always"}])
def test_invalid_facts_are_refused(facts: object) -> None:
    with pytest.raises(ValueError, match=r"Expected|missing"):
        extract_from_json(facts)
