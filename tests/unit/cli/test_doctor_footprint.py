"""Findings of doctor and `config check` on prices and intensities."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from wattspan.cli import cli
from wattspan.cli.doctor import Finding, Severity
from wattspan.cli.doctor.host import examine_footprint
from wattspan.config import CarbonSettings, Config, CostSettings
from wattspan.testing import ManualClock

ALWAYS = 'zone = "UTC"\notherwise = 0.25\n'


def found(cost: CostSettings | None = None, carbon: CarbonSettings | None = None) -> list[Finding]:
    config = Config(cost=cost or CostSettings(), carbon=carbon or CarbonSettings())
    return list(examine_footprint(config, ManualClock()))


def test_missing_rate_is_a_note() -> None:
    assert [(one.mark, one.what) for one in found()] == [
        (Severity.NOTE, "cost"),
        (Severity.NOTE, "carbon"),
    ]


def test_rate_is_listed_with_unit_and_origin(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    path.write_text(ALWAYS)
    assert [
        str(one.detail)
        for one in found(CostSettings(schedule=str(path)), CarbonSettings(intensity=380))
    ] == [
        "0.25 EUR/kWh now, by cost.schedule",
        "380 g/kWh now, by carbon.intensity",
    ]


def test_faults_of_a_tariff_are_one_failure_each(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    path.write_text('zone = "Nowhere"\n[[period]]\nrate = 1\nfrom = "x"')
    first, second, _ = found(CostSettings(schedule=str(path)))
    assert (first.mark, second.mark) == (Severity.FAIL, Severity.FAIL)
    assert first.detail.startswith(f"{path}:1: ")
    assert second.detail.startswith(f"{path}:2: ")


def test_time_without_a_tariff_period_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    path.write_text('zone = "UTC"\n[[period]]\nrate = 1\nuntil = 2020-01-01')
    assert found(CostSettings(schedule=str(path)))[0] == Finding(
        Severity.NOTE, "cost", "unknown now, by cost.schedule: no period holds at this time"
    )


def test_unavailable_rate_is_a_warning_with_its_cause(tmp_path: Path) -> None:
    price = tmp_path / "price"
    missing, _ = found(CostSettings(file=str(price)))
    assert missing.mark is Severity.WARN
    assert "no such file" in missing.detail
    price.write_text("-5")
    below, _ = found(CostSettings(file=str(price), max_age=2**62))
    assert "-5 is no rate per kilowatt-hour" in below.detail


def test_config_check_reads_the_tariff(tmp_path: Path) -> None:
    tariff, config = tmp_path / "tariff.toml", tmp_path / "config.toml"
    config.write_text(f'[cost]\nschedule = "{tariff}"\n')
    missing = CliRunner().invoke(cli, ["config", "check", str(config)])
    assert (missing.exit_code, "there is no such file" in missing.output) == (2, True)
    tariff.write_text("zone = 3")
    wrong = CliRunner().invoke(cli, ["config", "check", str(config)])
    assert wrong.exit_code == 2
    assert f"{tariff}:1: Bad value for 'tariff.zone'" in wrong.output
    tariff.write_text(ALWAYS)
    assert CliRunner().invoke(cli, ["config", "check", str(config)]).exit_code == 0
