"""fleet.terms: reports are bounded by what the operator has written."""

from __future__ import annotations

import pytest
from testbed.memory_cluster import MemoryCluster
from testbed.simulated_fleet import W

from wattspan.fleet.allotment import (
    DEFAULT_TERMS,
    AllotmentBook,
    FleetTerms,
    HostReport,
    HostTerms,
    accept_budgets,
    is_host_name,
    terms_problem,
)
from wattspan.fleet.coordination import KeyWrite
from wattspan.fleet.records import FleetKeys, FleetState, Presence, encode, read_state
from wattspan.model import SECOND
from wattspan.testing import ManualClock

KEYS = FleetKeys("/fleet/")
REPORT = HostReport(
    session="s", place="", floor=300 * W, ceiling=1500 * W, limit=300 * W, priority=700
)
TERMS = HostTerms(floor=400 * W, ceiling=1000 * W, priority=200)


def state_of(records: dict[str, bytes]) -> FleetState:
    client = MemoryCluster(ManualClock()).client()
    book = accept_budgets(AllotmentBook(), {"": 1000 * W})
    client.commit([KeyWrite(KEYS.book, encode(book))])
    for key, value in records.items():
        client.commit([KeyWrite(key, value)])
    return read_state(KEYS, client.read(KEYS.prefix))


def presence(report: HostReport) -> bytes:
    return encode(Presence(report=report, beat=1, lifetime=10 * SECOND))


def report_with(**values: object) -> HostReport:
    return HostReport(**({key: getattr(REPORT, key) for key in REPORT.__struct_fields__} | values))


def test_terms_bound_ceiling_and_priority() -> None:
    bounded = FleetTerms({"a": TERMS}).bounded("a", REPORT)
    assert (bounded.floor, bounded.ceiling, bounded.priority) == (300 * W, 1000 * W, 200)


@pytest.mark.parametrize(("reported", "counted"), [(700, 100), (30, 30), (-5, 0)])
def test_host_without_terms_can_only_lower_its_priority(reported: int, counted: int) -> None:
    assert FleetTerms().bounded("a", report_with(priority=reported)).priority == counted
    assert FleetTerms().of("a") is DEFAULT_TERMS


def test_floor_above_the_terms_is_a_violation_with_the_figures() -> None:
    terms = FleetTerms({"a": TERMS})
    assert terms.violation("a", REPORT) == ""
    reason = terms.violation("a", report_with(floor=405 * W))
    assert "a floor of 405 W, and its terms permit a floor of 400 W" in reason
    assert "fleet terms set a" in reason
    assert "a ceiling of 1000 W" in FleetTerms(
        {"a": HostTerms(floor=2000 * W, ceiling=1000 * W)}
    ).violation("a", report_with(floor=1200 * W))


def test_false_floor_takes_no_power_from_another_host() -> None:
    terms = {KEYS.default_terms: encode(TERMS)}
    false = presence(report_with(floor=900 * W))
    state = state_of(terms | {KEYS.report("a"): false, KEYS.report("b"): presence(REPORT)})
    plan = state.plan()
    assert plan.book.hosts.keys() == {"b"}
    assert plan.book.hosts["b"].allotment.limit == 1000 * W
    assert "a is not admitted: it reports a floor of 900 W" in plan.waiting["a"]


def test_false_floor_of_a_registered_host_is_not_followed() -> None:
    terms = {KEYS.default_terms: encode(TERMS)}
    both = {KEYS.report(name): presence(REPORT) for name in "ab"}
    book = state_of(terms | both).plan().book
    assert book is not None
    false = {KEYS.report("a"): presence(report_with(floor=905 * W))}
    state = state_of(terms | both | false | {KEYS.book: encode(book)})
    plan = state.plan()
    assert "a keeps its allotment" in plan.waiting["a"]
    assert (plan.book or book).hosts["b"].allotment == book.hosts["b"].allotment


@pytest.mark.parametrize(
    "value",
    [
        b"{}",
        b'{"floor":NaN,"ceiling":1}',
        b'{"floor":1,"ceiling":1e308}',
        b'{"floor":-1,"ceiling":1}',
        b'{"floor":0,"ceiling":1}',
        b'{"floor":2,"ceiling":1}',
        b'{"floor":1,"ceiling":1000000000001}',
        b'{"floor":1,"ceiling":2,"priority":1001}',
        b'{"floor":1,"ceiling":2,"more":1}',
    ],
)
@pytest.mark.parametrize("key", [KEYS.terms("a"), KEYS.default_terms])
def test_host_with_unreadable_terms_is_not_admitted(value: bytes, key: str) -> None:
    state = state_of({key: value, KEYS.report("a"): presence(REPORT)})
    assert f"The record {key} of the fleet is invalid" in state.invalid["a"]
    assert state.plan().book is None


@pytest.mark.parametrize("number", [b"NaN", b"1e308", b"-1", b"9007199254740992", b"1.5"])
@pytest.mark.parametrize("field", ["floor", "ceiling", "limit", "demand", "priority", "beat"])
def test_report_with_an_impossible_number_is_invalid(field: str, number: bytes) -> None:
    marked = report_with(demand=300 * W)
    value = presence(marked)
    before, _, rest = value.partition(f'"{field}":'.encode())
    after = rest[len(rest) - len(rest.lstrip(b"0123456789")) :]
    state = state_of({KEYS.report("a"): before + f'"{field}":'.encode() + number + after})
    assert state.invalid.keys() == {"a"}
    assert state.plan().book is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a\n", "é", "x" * 101])
def test_report_under_an_odd_name_is_not_followed(name: str) -> None:
    assert not is_host_name(name)
    state = state_of({KEYS.report(name): presence(REPORT)})
    assert "names no host" in state.invalid[name]
    assert state.plan().book is None


def test_terms_need_a_range() -> None:
    assert terms_problem(TERMS) == ""
    assert "no range of power" in terms_problem(HostTerms(floor=2, ceiling=1))
