"""Findings of doctor on a host's part in a fleet: etcd, ceiling, name, allotment and budgets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace
from testbed.memory_cluster import MemoryCoordination
from testbed.simulated_fleet import SimulatedFleet, W

from wattspan.capper.protocol import RefusalReason, StateReply
from wattspan.cli.doctor import Finding, Severity
from wattspan.cli.doctor.fleet import examine_fleet
from wattspan.config import FleetSettings
from wattspan.config.tables import EtcdEndpoint
from wattspan.fleet.allotment import (
    ENDED_AFTER,
    AllotmentBook,
    HostTerms,
    drain_host,
    note_absence,
    remove_host,
)
from wattspan.fleet.coordination import (
    Changes,
    CoordinationError,
    KeyChange,
    KeyWrite,
    PermissionDeniedError,
    RevisionCondition,
    UnreachableError,
)
from wattspan.fleet.records import encode, read_state
from wattspan.model import SECOND
from wattspan.ports import CapsError

OK, NOTE, WARN, FAIL = Severity.OK, Severity.NOTE, Severity.WARN, Severity.FAIL
NAME, PLACE, URL = "host0", "row-1", "http://127.0.0.1:2379"
ETCD = f"etcd {URL}"


class Member(MemoryCoordination):
    """A member of the cluster that may refuse calls, answer late, or be silent in a watch."""

    def __init__(self, host: Host, lost: CoordinationError | None = None) -> None:
        super().__init__(host.fleet.cluster)
        self._host, self._lost = host, lost

    def read(self, prefix: str):
        self._host.fleet.clock.advance(self._host.delay)
        if error := self._lost or self._host.refuses_reads:
            raise error
        found = super().read(prefix)
        if self._host.is_renewed:
            self._host.renew()
        return found

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        if self._host.refuses_writes is not None:
            raise self._host.refuses_writes
        return super().commit(writes, conditions)

    def watch(self, prefix: str, after: int) -> Changes:
        if self._host.refuses_watches is not None:
            raise self._host.refuses_watches
        return Silence() if self._host.is_silent else super().watch(prefix, after)


class Silence:
    """Changes of a key that nobody writes."""

    def wait(self, seconds: float) -> tuple[KeyChange, ...]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Capper:
    """An asked capper, as CapperProbe has it."""

    state: StateReply | None = None
    error: CapsError = field(default_factory=lambda: CapsError(""))


class Host:
    """The first host of a fleet of three, in contact, whose doctor is asked."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet = fleet
        self.settings = fleet.hosts[NAME].settings
        self.endpoints = (URL,)
        self.lost: dict[str, CoordinationError] = {}
        """The error of each lost member, by its URL."""
        self.delay = 0.0
        self.refuses_reads: CoordinationError | None = None
        self.refuses_writes: CoordinationError | None = None
        self.refuses_watches: CoordinationError | None = None
        self.is_silent = self.is_renewed = False
        """Nobody renews the report, or it is renewed after each read."""
        self.capper = Capper()
        self.opened: list[Member] = []
        fleet.run(6)
        self.allot()

    def allot(self, **changes: object) -> None:
        """Let the capper answer, with the state of the simulated one."""
        row = replace(self.fleet.hosts[NAME].allotment(), **changes)
        self.capper.state = StateReply(rows=[], lease=1, allotment=row)

    def change(self, book: AllotmentBook) -> None:
        self.fleet.operator.commit([KeyWrite(self.fleet.keys.book, encode(book))])

    def renew(self) -> None:
        """Write the report again, as a live host does."""
        key = self.fleet.keys.report(NAME)
        self.fleet.operator.commit([KeyWrite(key, self.state.written[key].value)])

    @property
    def book(self) -> AllotmentBook:
        return self.state.book

    @property
    def state(self):
        return read_state(self.fleet.keys, self.fleet.operator.read(self.fleet.keys.prefix))

    def connect(self, endpoint: EtcdEndpoint) -> Member:
        member = Member(self, self.lost.get(str(endpoint)))
        self.opened.append(member)
        return member

    def told(self, host: str = "box", **settings: object) -> dict[str, Finding]:
        chosen = replace(self.settings, **({"endpoints": self.endpoints} | settings))
        found = examine_fleet(
            chosen, host, self.fleet.clock, self.connect, lambda: self.capper
        )  # fmt: skip
        findings = {finding.what: finding for finding in found}
        assert all(not member.connected for member in self.opened)
        for finding in findings.values():
            assert finding.remedy or finding.mark in (OK, NOTE), finding
        return findings


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Host(
            SimulatedFleet(
                Path(folder), 3, budgets={PLACE: 1200 * W, "": 5000 * W}, places=(PLACE,)
            )
        )


# --------------------------------------------------------------------------------------- etcd


def test_host_without_a_fleet_is_a_note() -> None:
    found = list(examine_fleet(FleetSettings(), "box", None, None, None))  # nothing is asked
    assert [(one.mark, one.what) for one in found] == [(NOTE, "fleet")]


def test_healthy_host_has_no_problem_and_nothing_is_written(host: Host) -> None:
    before = host.state.written
    findings = host.told()
    assert {finding.mark for finding in findings.values()} == {OK}
    assert findings.keys() == {
        ETCD, "ceiling", "leader", "allotment", f"budget of {PLACE}", "budget of the fleet",
        "terms",
    }  # fmt: skip
    assert findings["allotment"].detail == (
        "host0 at row-1 counts with 400 W, and with 400 W without contact"
    )
    assert findings["budget of row-1"].detail == "1200 W; the floors of its hosts are 900 W"
    assert host.state.written == before


@pytest.mark.parametrize(
    ("error", "detail", "remedy"),
    [
        (
            UnreachableError("No member decides.", ("connection refused",)),
            "connection refused",
            "Start etcd there",
        ),
        (UnreachableError("The link is cut."), "The link is cut.", "Start etcd there"),
        (
            PermissionDeniedError(
                "etcd at X rejects the credentials: no. Correct user in [fleet]."
            ),
            "etcd at X rejects the credentials: no",
            "Correct user in [fleet].",
        ),
        (CoordinationError("etcd refuses. Ask why."), "etcd refuses", "Ask why."),
    ],
)
def test_unreadable_etcd_is_a_failure_with_its_cause(
    error: CoordinationError, detail: str, remedy: str, host: Host
) -> None:
    host.refuses_reads = error
    findings = host.told()
    assert findings.keys() == {ETCD, "ceiling"}
    assert (findings[ETCD].mark, findings[ETCD].detail) == (FAIL, detail)
    assert findings[ETCD].remedy.startswith(remedy)


def test_permission_to_read_alone_is_a_failure(host: Host) -> None:
    host.refuses_writes = PermissionDeniedError(
        "etcd at X rejects the request: permission denied. Grant the user of [fleet] a role."
    )
    finding = host.told()[ETCD]
    assert (finding.mark, finding.remedy) == (FAIL, "Grant the user of [fleet] a role.")


def test_lost_member_beside_one_that_serves_is_a_warning(host: Host) -> None:
    other = "http://127.0.0.1:2380"
    host.lost = {other: UnreachableError("No member decides.", ("it does not answer in time",))}
    findings = host.told(endpoints=(other, URL))
    assert findings[f"etcd {other}"].mark is WARN
    assert findings[f"etcd {other}"].detail == "it does not answer in time"
    assert findings[ETCD].mark is OK
    assert findings["allotment"].mark is OK


def test_refused_credentials_are_reported_once(host: Host) -> None:
    host.refuses_reads = PermissionDeniedError("etcd rejects the credentials. Correct user.")
    findings = host.told(endpoints=(URL, "http://127.0.0.1:2380", "http://127.0.0.1:2381"))
    assert findings.keys() == {ETCD, "ceiling"}


@pytest.mark.parametrize(
    ("url", "mark"),
    [("http://10.0.0.1:2379", WARN), ("https://10.0.0.1:2379", OK), ("http://[::1]:2379", OK)],
)
def test_network_without_tls_is_a_warning(url: str, mark: Severity, host: Host) -> None:
    finding = host.told(endpoints=(url,))[f"etcd {url}"]
    assert finding.mark is mark
    assert ("without TLS" in finding.detail) is (mark is WARN)


def test_slow_member_is_a_warning_with_the_limit(host: Host) -> None:
    host.delay = 1.5
    finding = host.told()[ETCD]
    assert finding.mark is WARN
    assert finding.detail.startswith("answers within 1.5 s, and permits reads and writes; 2.0 s")


# ------------------------------------------------------------------------------------- ceiling


def test_ceiling_has_its_age_and_its_end(host: Host) -> None:
    host.allot(until=host.fleet.clock.now().since_boot + 8 * SECOND, safe=350 * W)
    assert host.told()["ceiling"].detail == (
        "400 W, renewed 2.0 s ago, for 8.0 s more; 350 W without contact, at most"
    )


@pytest.mark.parametrize(
    ("limit", "detail"),
    [
        (400 * W, "400 W, its fallback: no allotment of the fleet is in force"),
        (0, "300 W, the floors of its devices: no allotment of the fleet is in force"),
    ],
)
def test_ended_allotment_is_a_warning_with_the_limit(limit: int, detail: str, host: Host) -> None:
    for until in (None, host.fleet.clock.now().since_boot):
        host.allot(limit=limit, until=until)
        host.is_silent = True
        finding = host.told()["ceiling"]
        assert (finding.mark, finding.detail) == (WARN, detail)


def test_missing_capper_and_one_outside_a_fleet_are_reported(host: Host) -> None:
    host.is_silent = True
    host.capper.state = None
    assert "no capper answers" in host.told()["ceiling"].detail
    host.capper.state = StateReply(rows=[], lease=1)
    finding = host.told()["ceiling"]
    assert (finding.mark, "restart the capper" in finding.remedy) == (FAIL, True)


@pytest.mark.parametrize(
    ("enforced", "detail"), [(None, "is unknown"), (500 * W, "limited to 500 W together")]
)
def test_limits_above_the_ceiling_are_a_warning(
    enforced: int | None, detail: str, host: Host
) -> None:
    assert "limits" not in host.told()
    host.allot(enforced=enforced)
    assert detail in host.told()["limits"].detail


# ---------------------------------------------------------------------------------------- name


def test_name_of_another_live_host_is_a_failure(host: Host) -> None:
    host.allot(limit=0, until=None)  # an allotment is acknowledged, and not by this host
    host.is_renewed = True
    finding = host.told()["name"]
    assert (finding.mark, finding.remedy.split(",")[0]) == (
        FAIL, "Give each host its own [fleet] name",
    )  # fmt: skip
    assert finding.detail == (
        "another host is in contact as host0, and enforces its allotment of 400 W"
    )


def test_own_session_before_its_first_allotment_is_no_clash(host: Host) -> None:
    host.allot(limit=0, until=None)
    host.change(remove_host(host.book, NAME, None))
    host.is_renewed = True
    assert "name" not in host.told()


def test_former_session_is_a_note(host: Host) -> None:
    host.is_silent = True
    host.capper.state = None
    assert host.told()["name"].mark is NOTE


def test_unwatched_session_is_a_note(host: Host) -> None:
    host.refuses_watches = UnreachableError("The link is cut.")
    host.capper.state = None
    assert "The link is cut." in host.told()["name"].detail


def test_name_is_not_judged_where_the_capper_refuses_this_user(host: Host) -> None:
    host.capper = Capper(error=CapsError("No.", RefusalReason.NOT_ALLOWED))
    assert "name" not in host.told()


# ---------------------------------------------------------------------------- leader, allotment


def test_fleet_without_a_leader_is_a_warning(host: Host) -> None:
    host.fleet.operator.commit([KeyWrite(host.fleet.keys.leader, None)])
    finding = host.told()["leader"]
    assert (finding.mark, "lead = true" in finding.remedy) == (WARN, True)


def test_unreadable_records_are_a_failure(host: Host) -> None:
    host.fleet.operator.commit([KeyWrite(host.fleet.keys.book, b"{")])
    finding = host.told()["records"]
    assert finding.mark is FAIL
    assert "The record /wattspan/fleet/book of the fleet is invalid" in finding.detail


def test_host_that_never_joined_is_a_warning(host: Host) -> None:
    assert host.told(name="")["allotment"].detail.startswith("box has never joined")


def test_host_without_contact_counts_with_its_fallback(host: Host) -> None:
    host.fleet.hosts[NAME].stop_agent()
    host.fleet.run(1)
    host.allot()
    finding = host.told()["allotment"]
    assert (finding.mark, finding.detail) == (
        WARN,
        "host0 at row-1 counts with 400 W, without contact",
    )


def test_unacknowledged_allotment_is_a_note_with_both_limits(host: Host) -> None:
    entry = host.book.hosts[NAME]
    newest = replace(entry.allotment, sequence=entry.allotment.sequence + 1, limit=350 * W)
    hosts = {**host.book.hosts, NAME: replace(entry, allotment=newest)}
    host.change(replace(host.book, hosts=hosts))
    finding = host.told()["allotment"]
    assert (finding.mark, finding.detail) == (
        NOTE, "host0 at row-1 counts with 400 W until it has put its newest, 350 W, in force",
    )  # fmt: skip


def test_drained_host_has_the_command_that_undoes_it(host: Host) -> None:
    host.change(drain_host(host.book, NAME))
    finding = host.told()["drained"]
    assert "wattspan fleet drain host0 --undo" in finding.remedy


def test_invalid_report_is_a_warning(host: Host) -> None:
    host.fleet.operator.commit([KeyWrite(host.fleet.keys.report(NAME), b"{}")])
    finding = host.told()["waiting"]
    assert finding.mark is WARN
    assert "The record /wattspan/fleet/reports/host0 of the fleet is invalid" in finding.detail


# ------------------------------------------------------------------------------------- budgets


def test_budget_below_the_floors_is_a_failure_with_the_figures(host: Host) -> None:
    book = host.book
    host.change(replace(book, budgets={**book.budgets, PLACE: 800 * W}))
    finding = host.told()[f"budget of {PLACE}"]
    assert finding.mark is FAIL
    assert finding.detail == (
        "The budget of row-1, 800 W, is 100 W below the floors of its 3 hosts, which are 900 W"
        " together"
    )
    assert finding.remedy == "Set a higher budget, or remove hosts first."


def test_floor_of_a_host_that_waits_counts(host: Host) -> None:
    book = remove_host(host.book, NAME, None)
    host.change(replace(book, budgets={PLACE: 700 * W}))
    findings = host.told()
    assert findings[f"budget of {PLACE}"].mark is FAIL
    assert "host0 is not admitted" in findings["waiting"].detail
    assert "allotment" not in findings


def test_host_without_any_budget_is_a_warning(host: Host) -> None:
    host.change(replace(host.book, budgets={"row-2": 1000 * W}))
    finding = host.told()["budget"]
    assert (finding.mark, finding.detail) == (
        WARN, "none applies to row-1, so this host is not limited",
    )  # fmt: skip


def test_host_at_no_place_is_named_so() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        host = Host(SimulatedFleet(Path(folder), 3, budgets={"": 1200 * W}))
        assert host.told()["allotment"].detail.startswith("host0 at no place counts with 400 W")


def test_absent_and_ended_hosts_are_named(host: Host) -> None:
    host.fleet.hosts["host1"].stop_agent()
    host.fleet.run(2)
    host.allot()
    absent = host.told()["absent hosts"]
    assert (absent.mark, absent.detail.split()[0]) == (WARN, "host1")
    host.change(note_absence(host.book, {"host1": ENDED_AFTER}))
    ended = host.told()["ended hosts"]
    assert (ended.mark, ended.detail.split()[0]) == (WARN, "host1")
    assert "fleet remove HOST" in ended.remedy
    host.change(remove_host(host.book, "host1", None))
    assert not {"absent hosts", "ended hosts"} & host.told().keys()


def test_terms_of_the_host_are_shown(host: Host) -> None:
    assert "the default ones: a floor of 2000 W" in host.told()["terms"].detail
    terms = HostTerms(floor=400 * W, ceiling=900 * W, priority=7)
    host.fleet.operator.commit([KeyWrite(host.fleet.keys.terms(NAME), encode(terms))])
    assert host.told()["terms"].detail == (
        "a floor of 400 W and a limit of 900 W at most, priority 7"
    )
    low = HostTerms(floor=200 * W, ceiling=900 * W)
    host.fleet.operator.commit([KeyWrite(host.fleet.keys.terms(NAME), encode(low))])
    assert "it reports a floor of 300 W" in host.told()["waiting"].detail
