"""``wattspan report``, from a store written by a ledger."""

import csv
import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from testbed.known_totals import Books, J, an_hour_ago
from testbed.program import wattspan

from wattspan.cli import cli
from wattspan.config import StoreSettings as Settings
from wattspan.storage.store import Store
from wattspan.testing import ManualClock

Report = Callable[..., Result]


host = pytest.fixture(an_hour_ago)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["report", "--state-dir", str(tmp_path), *arguments])

    return run


def write(state_dir: Path, host: Books, *, turns: int = 10, emulated: bool = False) -> None:
    with closing(Store(state_dir, Settings(), host.clock, emulated=emulated)) as store:
        for _ in range(turns):
            store.write(host.spend({1: 10, 2: 5, 3: 1}, seconds=60))


def test_lines_of_every_kind_sum_to_the_total(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    for by in ("process", "group", "kind", "user", "container"):
        for limit in ("0", "1", "2"):
            facts = json.loads(report("--by", by, "--json", "--limit", limit).stdout)
            total = facts["total"]["energy_microjoules"]
            assert total == 2 * host.package
            kinds = {line["kind"] for line in facts["lines"]} - {None}
            assert kinds
            for kind in kinds:
                mine = [line for line in facts["lines"] if line["kind"] in (kind, None)]
                assert sum(line["energy_microjoules"] for line in mine) == total


def test_processes_come_with_their_group_and_the_greatest_first(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    lines = json.loads(report("--json").stdout)["lines"]
    assert [(line["role"], line["name"], line["group"]) for line in lines] == [
        ("named", "job1", "c1"),
        ("named", "job2", "c2"),
        ("named", "job3", "c3"),
        ("other", "other processes", None),
        ("idle", "idle", None),
        ("unattributed", "unattributed", None),
    ]
    assert lines[0]["energy_microjoules_by_type"] == {"cpu": 100 * J, "gpu": 100 * J}


def test_report_by_user_covers_all_energy(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    lines = json.loads(report("--by", "user", "--json").stdout)["lines"]
    energy = {line["name"]: line["energy_microjoules"] for line in lines}
    assert energy["u"] == 2 * 110 * J
    assert energy["in no user"] == (2 * 50 + 10) * J


def test_only_one_kind_of_hardware(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    facts = json.loads(report("--hw-type", "gpu", "--json").stdout)
    assert facts["total"]["energy_microjoules_by_type"] == {"gpu": host.package}
    assert facts["provenance"] == {"gpu": "derived"}
    assert {domain["hw_type"] for domain in facts["domains"]} == {"gpu"}


def test_domains_that_are_parts_of_others_are_shown_and_not_added(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    facts = json.loads(report("--by", "domain", "--json").stdout)
    domains = {domain["hw_id"]: domain for domain in facts["domains"]}
    assert domains["core-0"]["energy_microjoules"] == host.package
    assert domains["core-0"]["consumers_microjoules"] is None
    assert facts["total"]["energy_microjoules"] == sum(
        domain["energy_microjoules"] for domain in domains.values() if domain["in_cover"]
    )
    assert domains["GPU-0"]["gap_seconds"] == {"reset": 10.0}


def test_table_names_unit_provenance_idle_and_gaps(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    lines = report().stdout.splitlines()
    assert lines[0].endswith("by the minute, in J")
    assert lines[3].split() == ["process", "group", "cpu", "gpu", "total", "share"]
    assert lines[4].split() == ["measured", "derived", "derived"]
    # Energy of the CPU is withheld from processes, and that of the GPU in its gap is missing.
    assert lines[5].split() == ["job1", "c1", "≥", "100.00", "≥", "100.00", "≥", "200.00", "50%"]
    names = [line.split("  ")[0] for line in lines[5:11]]
    assert names == ["job1", "job2", "job3", "other processes", "idle", "unattributed"]
    assert lines[11].split() == ["total", "200.00", "≥", "200.00", "≥", "400.00", "100%"]
    assert lines[-1] == "  GPU-0: 10.0 s reset"
    assert "EMULATED" not in "".join(lines)


def test_domain_table_shows_unknown_as_a_dash(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    lines = report("--by", "domain").stdout.splitlines()
    core = next(line for line in lines if line.startswith("core-0"))
    assert core.split()[3:] == ["200.00", "-", "-", "-", "part"]


@pytest.mark.parametrize(
    ("joules", "unit"), [(1, "J"), (10_000, "kJ"), (100_000, "Wh"), (9_000_000, "kWh")]
)
def test_unit_fits_the_total(
    tmp_path: Path, host: Books, report: Report, joules: int, unit: str
) -> None:
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        store.write(host.spend({1: joules}))
    assert report().stdout.splitlines()[0].endswith(f"in {unit}")
    assert report("--unit", "J").stdout.splitlines()[0].endswith("in J")


def test_report_of_an_emulated_host_is_labelled(
    tmp_path: Path, host: Books, report: Report
) -> None:
    host.emulated = True
    write(tmp_path, host, emulated=True)
    assert "EMULATED: " in report().stdout
    assert json.loads(report("--json").stdout)["emulated"] is True


def test_real_store_is_preferred_to_an_emulated_one(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    other = Books(ManualClock(wall=host.clock.now().wall), emulated=True)
    write(tmp_path, other, emulated=True)
    assert "EMULATED" not in report().stdout
    assert "EMULATED" in report("--emulated").stdout


def test_csv_has_a_row_for_each_line_and_type(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    rows = list(csv.DictReader(io.StringIO(report("--csv").stdout)))
    total = {row["hw_type"]: int(row["energy_uj"]) for row in rows if row["role"] == "total"}
    assert total == {"cpu": host.package, "gpu": host.package}
    parts = [row for row in rows if row["role"] != "total" and row["hw_type"] == "gpu"]
    assert sum(int(row["energy_uj"]) for row in parts) == total["gpu"]
    domains = list(csv.DictReader(io.StringIO(report("--by", "domain", "--csv").stdout)))
    assert {row["hw_id"]: row["consumers_uj"] for row in domains}["core-0"] == ""


def test_window_in_time(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host, turns=1)
    early = host.clock.now().wall // 10**9
    host.clock.advance(1800)
    write(tmp_path, host, turns=1)
    moment = datetime.fromtimestamp(early + 600, UTC).isoformat()
    before = json.loads(report("--to", moment, "--json").stdout)
    after = json.loads(report("--from", moment, "--json").stdout)
    lately = json.loads(report("--since", "45m", "--json").stdout)
    assert before["total"]["energy_microjoules"] == 2 * (16 + 1 + 3) * J
    assert before["total"] == after["total"] == lately["total"]
    for start in (("--since", "106751d"), ("--from", "0001-01-03")):
        whole = json.loads(report(*start, "--json").stdout)
        assert whole["total"]["energy_microjoules"] == 4 * (16 + 1 + 3) * J


def test_name_cannot_command_the_terminal(tmp_path: Path, host: Books, report: Report) -> None:
    opening = host.spend({1: 1})
    info = replace(opening.processes[0].info, command="\x1b[2Jevil\n" + "x" * 100)
    evil = replace(opening, processes=(replace(opening.processes[0], info=info),))
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        store.write(evil)
    shown = report().stdout
    assert "\x1b" not in shown
    assert "?[2Jevil?xxx" in shown
    assert max(map(len, shown.splitlines()[2:])) < 110
    assert json.loads(report("--json").stdout)["lines"][0]["name"].startswith("\x1b[2Jevil\n")


def test_missing_store_is_a_one_line_error(report: Report, tmp_path: Path) -> None:
    done = report()
    assert done.exit_code == 5
    assert done.stderr.startswith(f"wattspan: There is no store at {tmp_path}/wattspan.sqlite")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_empty_store_and_empty_range_have_messages(
    tmp_path: Path, host: Books, report: Report
) -> None:
    Store(tmp_path, Settings(), host.clock).close()
    assert "holds no energy yet" in report().stderr
    write(tmp_path, host, turns=1)
    done = report("--to", "2001-01-01", "--from", "2000-01-01")
    assert done.exit_code == 1
    assert "holds nothing from 2000-01-01" in done.stderr
    assert "--from and --to" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--since", "soon"], "'--since'"),
        (["--since", "0s"], "give 1s at least"),
        (["--since", "999ms", "--to", "2025-01-01"], "give 1s at least"),
        (["--from", "yesterday"], "is not a time"),
        (["--from", "0001-01-01T00:00+14:00"], "is not a time"),
        (["--since", "1h", "--from", "2025-01-01"], "choose one"),
        (["--from", "2025-01-02", "--to", "2025-01-01"], "--from is not before --to"),
        (["--since", "99999d", "--to", "0001-02-01"], "--to is before 1970"),
        (["--by", "colour"], "'--by'"),
        (["--format", "parquet"], "--output FILE"),
        (["--format", "xlsx"], "'--format'"),
        (["--output", "/"], "'--output'"),
    ],
)
def test_bad_arguments_are_usage_errors(
    report: Report, arguments: list[str], complaint: str
) -> None:
    done = report(*arguments)
    assert done.exit_code == 2
    assert complaint in done.stderr


def test_configured_state_directory_is_read(tmp_path: Path, host: Books) -> None:
    write(tmp_path, host)
    done = CliRunner().invoke(
        cli,
        ["report", "--json", "--set", f"agent.state_dir={tmp_path}"],
        env={"WATTSPAN_CONFIG": ""},
    )
    assert json.loads(done.stdout)["store"] == str(tmp_path / "wattspan.sqlite")


def test_report_writes_nothing_to_the_store(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    report()
    after = {
        path: path.read_bytes()
        for path in tmp_path.iterdir()
        if not path.name.endswith(("-shm", "-wal"))
    }
    assert after == before


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("report",), "Or run `sudo wattspan report`."),
        (("tune", "history"), "Permission denied. Run this as root or as the user of the agent."),
    ],
)
def test_unreadable_store_error_names_permitted_users(
    tmp_path: Path, host: Books, words: tuple[str, ...], remedy: str
) -> None:
    state_dir = tmp_path / "state"
    write(state_dir, host)
    state_dir.chmod(0o750)
    nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    done = wattspan(
        *words,
        within=nobody,
        WATTSPAN_AGENT_STATE_DIR=str(state_dir),
        WATTSPAN_AGENT_RUN_DIR=str(tmp_path / "run"),
    )
    assert done.returncode == 5
    assert remedy in done.stderr
