"""``wattspan report`` of a host whose energy costs and emits something."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from testbed.known_totals import Books

from wattspan.cli import cli
from wattspan.clock import SystemClock
from wattspan.config import StoreSettings as Settings
from wattspan.footprint.cost import KILOWATT_HOUR
from wattspan.model import Footprint, Microjoules, RatedEnergy, RateOrigin
from wattspan.model.settings import Duration
from wattspan.storage.store import Store
from wattspan.testing import ManualClock

Report = Callable[..., Result]


@pytest.fixture
def host() -> Books:
    """Its clock starts a whole number of hours ago, at least two."""
    now = SystemClock().now().wall // 10**9
    return Books(ManualClock(wall=(now // 3600 - 2) * 3600 * 10**9))


@pytest.fixture
def report(tmp_path: Path) -> Report:
    def run(*arguments: str, price: str = "", **settings: str) -> Result:
        sets = [f"cost.price={price}"] if price else []
        sets += [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        options = [part for each in sets for part in ("--set", each)]
        command = ["report", "--state-dir", str(tmp_path), *arguments, *options]
        return CliRunner().invoke(cli, command, catch_exceptions=False)

    return run


def write(
    state_dir: Path,
    host: Books,
    *,
    turns: int = 10,
    seconds: float = 60,
    footprint: Footprint | None = None,
    settings: Settings | None = None,
) -> None:
    with closing(Store(state_dir, settings or Settings(), host.clock)) as store:
        for _ in range(turns):
            opening = host.spend({1: 10, 2: 5, 3: 1}, seconds=seconds)
            assert store.write(replace(opening, footprint=footprint or Footprint()))


def facts(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def euros(microjoules: float, price: float) -> float:
    return microjoules * price / KILOWATT_HOUR


# ---------------------------------------------------------------------------------- constants


@pytest.mark.parametrize("by", ["process", "group", "kind", "domain", "user"])
@pytest.mark.parametrize("limit", ["0", "1"])
def test_total_cost_is_independent_of_the_grouping(
    by: str, limit: str, tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    told = facts(report("--by", by, "--limit", limit, "--json", price="1000000"))
    total = told["total"]["cost"]["amount"]
    assert total == pytest.approx(euros(told["total"]["energy_microjoules"], 10**6), abs=1e-9)
    for line in (*told["lines"], *told["domains"]):
        amount = euros(line["energy_microjoules"], 10**6)
        assert line["cost"]["amount"] == pytest.approx(amount, abs=1e-9)
    for kind in {line["kind"] for line in told["lines"]} - {None}:
        mine = [line for line in told["lines"] if line["kind"] in (kind, None)]
        # each is rounded to a billionth
        assert sum(one["cost"]["amount"] for one in mine) == pytest.approx(total, abs=1e-8)
    if by == "domain":
        cover = [one["cost"]["amount"] for one in told["domains"] if one["in_cover"]]
        assert sum(cover) == pytest.approx(total, abs=1e-8)


def test_report_without_rates_has_no_cost(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    told = facts(report("--json"))
    assert "cost" not in told["total"]
    assert "EUR" not in report().stdout
    assert "cost" not in report("--csv").stdout


def test_cost_columns_have_four_digits(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    lines = report(price="0.3", carbon__intensity="380").stdout.splitlines()
    heading = next(line for line in lines if line.startswith("process"))
    assert heading.split()[-4:] == ["share", "EUR", "g", "CO2e"]
    total = next(line for line in lines if line.startswith("total")).split()
    energy = 2 * host.package
    # The energy before the agent's start is unknown.
    assert total[-4:] == ["≥", f"{euros(energy, 0.3):.8f}", "≥", f"{euros(energy, 380):.5f}"]
    assert not any("not known for" in line for line in lines)


def test_large_carbon_mass_is_in_kilograms(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host, turns=1)
    host.spent[1] += 50_000 * 10**6
    write(tmp_path, host, turns=1)
    lines = report(carbon__intensity="1000000").stdout.splitlines()
    assert next(x for x in lines if x.startswith("process")).endswith("kg CO2e")
    total = next(x for x in lines if x.startswith("total")).split()[-1]
    assert float(total) == pytest.approx(euros(2 * host.package, 1000), abs=0.001)


def test_machine_readable_rows_have_amounts_and_unknowns(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    for by in ("process", "span", "domain"):
        rows = list(csv.DictReader(io.StringIO(report("--csv", "--by", by, price="2").stdout)))
        assert rows
        for row in rows:
            amount = euros(int(row["energy_uj"]), 2)
            assert float(row["cost_EUR"]) == pytest.approx(amount, abs=1e-9)
            assert row["cost_unknown_uj"] == "0"


def test_cost_is_filtered_by_hardware_type(tmp_path: Path, host: Books, report: Report) -> None:
    write(tmp_path, host)
    told = facts(report("--json", "--hw-type", "gpu", price="5"))
    assert told["total"]["cost"]["amount"] == pytest.approx(euros(host.package, 5), abs=1e-9)
    none = report("--hw-type", "enclosure", price="5")
    assert none.exit_code == 0
    assert "total" in none.stdout


# ---------------------------------------------------------------------------------- schedules


def tariff(path: Path, text: str) -> str:
    path.write_text(f'zone = "UTC"\n{text}')
    return str(path)


def test_minutes_have_their_time_of_day_rate(tmp_path: Path, host: Books, report: Report) -> None:
    """Half an hour at one rate, half an hour at another, and a quarter without a rate."""
    start = datetime.fromtimestamp(host.clock.now().wall // 10**9, UTC)
    hour = start.hour
    write(tmp_path, host, turns=59)
    path = tariff(
        tmp_path / "tariff.toml",
        f'[[period]]\nrate = 1\nfrom = "{hour:02}:00"\nto = "{hour:02}:30"\n'
        f'[[period]]\nrate = 3\nfrom = "{hour:02}:30"\nto = "{hour:02}:45"\n',
    )
    result = report("--json", cost__schedule=path)
    told = facts(result)["total"]
    # turns are written at the minutes 1 to 59, each of the same energy
    each = 2 * host.package / 59
    assert told["cost"]["amount"] == pytest.approx(euros(each, 29 * 1 + 15 * 3), abs=1e-9)
    assert told["cost"]["unknown_microjoules"] == pytest.approx(15 * each)
    text = report(cost__schedule=path).stdout
    assert "≥" in text
    assert "The price was not known for" in text
    assert "(25%), which is in no cost." in text


def test_energy_within_an_hour_is_spread_evenly(
    tmp_path: Path, host: Books, report: Report
) -> None:
    host.clock.advance(-3600 * 24 * 3)
    hour = datetime.fromtimestamp(host.clock.now().wall // 10**9, UTC).hour
    few = Settings(minutes=Duration.parse("1h"))
    write(tmp_path, host, turns=1, settings=few)
    spent = 2 * host.package
    write(tmp_path, host, turns=61, seconds=3600, settings=few)
    path = tariff(
        tmp_path / "tariff.toml",
        f'[[period]]\nrate = 4\nfrom = "{hour:02}:00"\nto = "{hour:02}:15"\n'
        f'[[period]]\nrate = 8\nfrom = "{hour:02}:15"\nto = "{hour:02}:45"\n',
    )
    first = host.clock.now().wall // 10**9 - 60 - 61 * 3600
    times = [datetime.fromtimestamp(t, UTC).isoformat() for t in (first, first + 3600)]
    arguments = ["--from", times[0], "--to", times[1]]
    told = facts(report(*arguments, "--json", cost__schedule=path))
    assert told["bucket_seconds"] == [3600]
    assert told["total"]["energy_microjoules"] == spent
    assert told["total"]["cost"]["amount"] == pytest.approx(euros(spent, 1 + 4), abs=1e-9)
    assert told["total"]["cost"]["unknown_microjoules"] == pytest.approx(spent / 4)
    assert "spent evenly" in report(*arguments, cost__schedule=path).stdout


def test_unreadable_tariff_removes_only_the_costs(
    tmp_path: Path, host: Books, report: Report
) -> None:
    write(tmp_path, host)
    result = report("--json", cost__schedule=str(tmp_path / "none.toml"))
    assert "there is no such file" in result.stderr
    told = facts(result)["total"]
    assert told["cost"]["amount"] is None
    assert told["cost"]["unknown_microjoules"] == told["energy_microjoules"]
    table = report(cost__schedule=str(tmp_path / "none.toml")).stdout
    assert next(x for x in table.splitlines() if x.startswith("total")).split()[-1] == "-"


# ------------------------------------------------------------------------------------ as recorded


def test_report_uses_stored_polled_rates(tmp_path: Path, host: Books, report: Report) -> None:
    for rate, unknown in ((10**9, 0), (None, 5), (3 * 10**9, 5)):
        said = Footprint(cost=RatedEnergy("EUR", RateOrigin.METRIC, rate, 0, Microjoules(unknown)))
        # the minute in which it is said is not the first that it holds of
        host.clock.advance(60 - host.clock.now().wall // 10**9 % 60)
        write(tmp_path, host, turns=10, footprint=said)
    path = tmp_path / "price"
    told = facts(report("--json", cost__file=str(path)))["total"]
    each = 2 * host.package / 30
    assert told["cost"]["amount"] == pytest.approx(euros(each, 10 * 1 + 10 * 3), abs=1e-9)
    assert told["cost"]["unknown_microjoules"] == pytest.approx(10 * each, abs=1)
    other = facts(report("--json", cost__file=str(path), cost__currency="CHF"))["total"]
    assert other["cost"]["amount"] is None
    assert not path.exists()  # a report sends no request


def test_first_minutes_with_a_polled_rate_are_priced_completely(
    tmp_path: Path, host: Books, report: Report
) -> None:
    host.clock.advance(42)
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        for rate in (None, 2 * 10**9, 2 * 10**9):
            opening = host.now() if rate is None else host.spend({1: 10}, seconds=15)
            said = Footprint(cost=RatedEnergy("EUR", RateOrigin.METRIC, rate))
            assert store.write(replace(opening, footprint=said))
    told = facts(report("--json", cost__file=str(tmp_path / "price")))["total"]
    assert told["cost"]["unknown_microjoules"] == 0
    assert told["cost"]["amount"] == pytest.approx(euros(2 * host.package, 2), abs=1e-9)
