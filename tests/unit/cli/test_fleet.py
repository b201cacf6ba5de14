"""``wattspan fleet``: its output, and errors without a fleet or without etcd."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from testbed.reserved_port import reserved_port
from testbed.simulated_fleet import SimulatedFleet, W

from wattspan.cli.fleet import (
    RefusedChangeError,
    book_without,
    command,
    fleet_facts,
    fleet_lines,
    without_host,
    without_hosts,
)
from wattspan.fleet.allotment import HostInUseError, drain_host, watts
from wattspan.fleet.coordination import KeyWrite
from wattspan.fleet.records import FleetState, encode, read_state
from wattspan.ports import ConfigError, WattspanError


@pytest.fixture
def fleet() -> Iterator[SimulatedFleet]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        budgets = {"": 3000 * W, "row-1": 1000 * W}
        yield SimulatedFleet(Path(folder), 3, budgets=budgets, places=("row-1", "row-2"))


def state_of(fleet: SimulatedFleet) -> FleetState:
    return read_state(fleet.keys, fleet.operator.read(fleet.keys.prefix))


def run(*words: str) -> Result:
    # click keeps the first help option of a command: another one would change the reference pages.
    return CliRunner().invoke(command, [*words], help_option_names=["-h", "--help"])


def test_status_shows_budgets_hosts_and_reasons(fleet: SimulatedFleet) -> None:
    fleet.run(6)
    state = state_of(fleet)
    book = drain_host(state.book, "host1")
    fleet.operator.commit([KeyWrite(fleet.keys.book, encode(book))])
    fleet.run(6)
    fleet.hosts["host2"].stop_agent()
    fleet.run(1)
    facts = fleet_facts(state_of(fleet))
    json.dumps(facts)
    text = "\n".join(fleet_lines(facts))
    assert text == (
        "Leader: host0\n"
        "place      budget  demand  allotted    safe  hosts\n"
        "the fleet  3000 W  2300 W    1300 W  1300 W      3\n"
        "row-1      1000 W  2000 W    1000 W  1000 W      2\n"
        "row-2           -   300 W     300 W   300 W      1\n"
        "host   floor  demand  allotted   safe\n"
        "host0  300 W     all     500 W  500 W\n"
        "host1  300 W     all     300 W  300 W  drained\n"
        "host2  300 W       -     500 W  500 W  no contact"
    )


def test_powers_of_the_tables_never_touch() -> None:
    powers = {"demand": 1005.823, "enforceable": 999.96, "safe": 1_234_567.8}
    place = {"place": "row-1", "budget": 1_000_000.0, "hosts": 3, **powers}
    *_, row, _ = fleet_lines({"leader": "", "places": [place], "hosts": []})
    assert " ".join(row.split()) == "row-1 1000000 W 1006 W 1000 W 1234568 W 3"
    assert watts(1_000_000_000) == "1000000 W"
    assert watts(470_816) == "470.816 W"


def test_host_with_an_unreadable_report_counts_as_present(fleet: SimulatedFleet) -> None:
    fleet.run(6)
    for host in fleet.hosts.values():
        host.kill_agent()
    fleet.operator.commit([KeyWrite(fleet.keys.report("host0"), b"{}")])
    state = state_of(fleet)
    status = fleet_facts(state)["hosts"][0]
    assert status["in_contact"]
    assert status["enforceable"] == state.book.hosts["host0"].limit_bound / 1000
    assert "The record /wattspan/fleet/reports/host0 of the fleet is invalid" in status["waiting"]
    with pytest.raises(HostInUseError, match="host0 is in contact and may use 500 W"):
        book_without(state, "host0")
    fleet.operator.commit([KeyWrite(fleet.keys.report("host0"), None)])
    assert "host0" not in book_without(state_of(fleet), "host0").hosts


def test_removal_of_an_unknown_host_names_the_known_ones(fleet: SimulatedFleet) -> None:
    fleet.run(6)
    with pytest.raises(RefusedChangeError, match=r"no host x\. Its hosts: host0, host1, host2"):
        book_without(state_of(fleet), "x")


def test_places_and_hosts_that_the_fleet_does_not_have_are_named(fleet: SimulatedFleet) -> None:
    fleet.run(6)
    state = state_of(fleet)
    assert [without_hosts(state, node) for node in ("", "row-1", "row-1/host0")] == [""] * 3
    assert without_hosts(state, "row-3") == (
        "No host is at row-3 at present. Places with hosts: row-1, row-2."
    )
    assert without_host(state, "host1") == ""
    assert "host7 is not in the fleet at present. Its hosts: host0," in without_host(state, "host7")


def test_status_of_an_empty_fleet_names_no_leader(fleet: SimulatedFleet) -> None:
    fleet.operator.commit([KeyWrite(fleet.keys.book, None)])
    lines = list(fleet_lines(fleet_facts(state_of(fleet))))
    assert lines[0] == "Leader: none; no allotment changes"


@pytest.mark.parametrize(
    "words",
    [("status",), ("budget", "fleet", "1"), ("drain", "h"), ("remove", "h"), ("terms", "list")],
)
def test_command_without_a_fleet_names_the_setting(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert isinstance(result.exception, ConfigError)
    assert "[fleet] endpoints" in str(result.exception)


def test_command_without_etcd_names_the_endpoint() -> None:
    with reserved_port() as port:
        result = run("status", "--set", f'fleet.endpoints=["http://127.0.0.1:{port}"]')
    assert isinstance(result.exception, WattspanError)
    assert result.exception.exit_code == 8
    assert f"127.0.0.1:{port}: connection refused" in str(result.exception)


@pytest.mark.parametrize("words", [("fleet",), ("fleet", "5", "--remove"), ("fleet", "0")])
def test_budget_needs_watts_or_their_removal(words: tuple[str, ...]) -> None:
    assert run("budget", *words).exit_code == 2


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ('endpoints=["etcd:2379"]', "begins with neither"),
        ('endpoints=["http://u:secret@h"]', "set user instead"),
        ('name="a b"', "no name of letters"),
        ('place="/row"', "no place"),
        ('prefix="/fleet"', "does not end with"),
        ('user="u"', "belong together"),
        ('tls_key="/k"', "Set tls_certificate"),
        ('tls_ca="ca.pem"', "relative path"),
    ],
)
def test_invalid_setting_is_refused_without_secrets(setting: str, cause: str) -> None:
    result = run("status", "--set", f"fleet.{setting}")
    assert isinstance(result.exception, ConfigError)
    assert cause in str(result.exception)
    assert "secret" not in str(result.exception).replace("not secret", "")


@pytest.mark.parametrize(
    "words",
    [("set", "h"), ("remove",), ("remove", "h", "--default"), ("set", "--floor", "1"),
     ("set", "h", "--floor", "nan", "--ceiling", "1"), ("set", "h", "--floor", "0"),
     ("set", "h", "--floor", "1", "--ceiling", "1e308")],
)  # fmt: skip
def test_terms_need_a_host_and_numbers(words: tuple[str, ...]) -> None:
    assert run("terms", *words).exit_code == 2


@pytest.mark.parametrize(
    ("words", "cause"),
    [(("h", "--floor", "2", "--ceiling", "1"), "are no range"),
     (("a/b", "--floor", "1", "--ceiling", "2"), "is no name of a host"),
     (("..", "--floor", "1", "--ceiling", "2"), "is no name of a host")],
)  # fmt: skip
def test_invalid_terms_are_refused(words: tuple[str, ...], cause: str) -> None:
    result = run("terms", "set", *words)
    assert isinstance(result.exception, RefusedChangeError)
    assert cause in str(result.exception)
