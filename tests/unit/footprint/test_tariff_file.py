"""The tariff file: applicable rates in local time, and errors of invalid files."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from testbed.requirements import ROOT

from wattspan.config import load
from wattspan.config.loading import parse_toml
from wattspan.footprint.cost import Schedule
from wattspan.footprint.tariff_file import build_schedule, read_schedule
from wattspan.ports import ConfigError

PATH = Path("/etc/wattspan/tariff.toml")
BERLIN = ZoneInfo("Europe/Berlin")
CENT = 10**7

TWO_RATES = """
zone = "Europe/Berlin"

[[period]]
rate = 0.36
days = ["mon-fri"]
from = "07:00"
to = "22:00"

[[period]]
rate = 0.24
days = ["mon-fri"]
from = "22:00"
to = "07:00"
"""


def schedule(text: str) -> Schedule:
    return build_schedule(parse_toml(text, PATH))


def one(keys: str) -> Schedule:
    """A file with one period of 1 cent, in UTC."""
    return schedule(f'zone = "UTC"\n[[period]]\nrate = 0.01\n{keys}')


def fault(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        schedule(text)
    return str(caught.value)


def at(schedule: Schedule, when: str, zone: str = "Europe/Berlin", fold: int = 0) -> int | None:
    """The rate in cents at a local time."""
    local = datetime.fromisoformat(when).replace(tzinfo=ZoneInfo(zone), fold=fold)
    rate = schedule.rate(int(local.timestamp()))
    return None if rate is None else rate // CENT


def held(schedule: Schedule, start: datetime, hours: int = 24) -> int:
    """For how many seconds any rate is in force from ``start`` on."""
    first = int(start.timestamp())
    return sum(
        length for length, rate in schedule.periods_between(first, first + 3600 * hours) if rate
    )


# -------------------------------------------------------------------------------- applicable
# rates


@pytest.mark.parametrize(
    ("when", "cents"),
    [
        ("2026-01-14 06:59", 24),  # a Wednesday
        ("2026-01-14 07:00", 36),
        ("2026-01-14 21:59", 36),
        ("2026-01-14 22:00", 24),
        ("2026-01-15 00:00", 24),
        ("2026-01-17 06:59", 24),  # Saturday: periods that began on Friday
        ("2026-01-17 07:00", None),
        ("2026-01-18 12:00", None),
        ("2026-01-19 03:00", None),  # Monday: no period began on Sunday
        ("2026-01-19 07:00", 36),
    ],
)
def test_period_holds_from_its_first_minute_to_before_its_last(
    when: str, cents: int | None
) -> None:
    assert at(schedule(TWO_RATES), when) == cents


def test_default_rate_applies_outside_periods() -> None:
    assert at(schedule("otherwise = 0.2\n" + TWO_RATES), "2026-01-18 12:00") == 20


def test_one_figure_for_always_needs_no_period() -> None:
    assert at(schedule('zone = "UTC"\notherwise = 0.3'), "2026-01-18 12:00") == 30


def test_repeated_hour_applies_twice_and_a_skipped_one_never() -> None:
    night = schedule('zone="Europe/Berlin"\n[[period]]\nrate=0.01\nfrom="02:00"\nto="03:00"')
    assert held(night, datetime(2026, 10, 25, tzinfo=BERLIN), hours=25) == 7200
    assert held(night, datetime(2026, 3, 29, tzinfo=BERLIN), hours=23) == 0
    assert at(night, "2026-10-25 02:30", fold=0) == at(night, "2026-10-25 02:30", fold=1) == 1


def test_night_period_follows_clock_changes() -> None:
    night = schedule('zone="Europe/Berlin"\n[[period]]\nrate=0.01\nfrom="22:00"\nto="06:00"')
    assert held(night, datetime(2026, 3, 28, 12, tzinfo=BERLIN)) == 7 * 3600
    assert held(night, datetime(2026, 10, 24, 12, tzinfo=BERLIN)) == 9 * 3600


def test_zone_that_is_a_quarter_of_an_hour_off_is_exact() -> None:
    noon = schedule('zone="Asia/Kathmandu"\n[[period]]\nrate=0.01\nfrom="12:00"\nto="13:00"')
    assert held(noon, datetime(2026, 5, 5, tzinfo=UTC)) == 3600
    assert at(noon, "2026-05-05 12:59", "Asia/Kathmandu") == 1
    assert at(noon, "2026-05-05 13:00", "Asia/Kathmandu") is None


def test_season_goes_over_the_new_year() -> None:
    winter = one('season = ["10-01", "03-31"]')
    assert [at(winter, f"2026-{day} 12:00", "UTC") for day in ("09-30", "10-01", "12-31")] == [
        None,
        1,
        1,
    ]
    assert [at(winter, f"2027-{day} 12:00", "UTC") for day in ("01-01", "03-31", "04-01")] == [
        1,
        1,
        None,
    ]


def test_last_night_of_a_season_ends_in_the_next_morning() -> None:
    nights = one('season = ["02-01", "02-28"]\nfrom = "22:00"\nto = "06:00"')
    assert at(nights, "2026-03-01 05:59", "UTC") == 1
    assert at(nights, "2026-02-01 05:59", "UTC") is None
    assert at(nights, "2028-02-29 05:59", "UTC") == 1  # not February 28th
    assert at(nights, "2028-03-01 05:59", "UTC") is None


def test_price_that_changed_is_two_periods() -> None:
    changed = schedule(
        'zone = "UTC"\n[[period]]\nrate = 0.30\nuntil = 2026-03-31\n'
        "[[period]]\nrate = 0.34\nsince = 2026-04-01\n"
    )
    assert at(changed, "2026-03-31 23:59", "UTC") == 30
    assert at(changed, "2026-04-01 00:00", "UTC") == 34


def test_times_and_days_may_be_written_as_toml_has_them() -> None:
    same = one('from = 07:00:00\nto = "8:30"\nsince = "2026-01-01"\nuntil = 2026-12-31')
    assert at(same, "2026-06-06 08:29", "UTC") == 1
    assert at(same, "2026-06-06 08:30", "UTC") is None


def test_days_go_round_the_week() -> None:
    assert one('days = ["Sat-Mon", "wed"]').periods[0].days == {5, 6, 0, 2}


# ------------------------------------------------------------------------ invalid files


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ('from = "7"', '"7" is not a time of day'),
        ('from = "25:00"', '"25:00" is not a time of day'),
        ('to = "07:60"', '"07:60" is not a time of day'),
        ('from = "24:00"', 'cannot begin at "24:00"'),
        ('from = "07:00"\nto = "07:00"', 'from and to are both "07:00"'),
        ('days = ["monday"]', '"monday" is not a day'),
        ('days = ["mon-fri-sun"]', '"mon-fri-sun" is not a day'),
        ('season = ["10-01"]', "a season has a first and a last day"),
        ('season = ["02-30", "03-31"]', '"02-30" is not a day of the year'),
        ('season = ["W01-1", "03-31"]', '"W01-1" is not a day of the year'),
        ('since = "soon"', '"soon" is not a day'),
        ("since = 0001-01-01", '"0001-01-01" is not a day'),
        ("since = 2026-02-01\nuntil = 2026-01-01", "until = 2026-01-01 is before since"),
    ],
)
def test_period_that_cannot_be_is_named_with_its_line(keys: str, why: str) -> None:
    told = fault(f'zone = "UTC"\n[[period]]\nrate = 0.01\n{keys}')
    assert told.startswith(f"{PATH}:2: period[0]: ")
    assert why in told


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('zone = "UTC"', "the file sets no rate"),
        ("", "'tariff' needs the key 'zone'"),
        ('zone = "Mars/Olympus"\notherwise = 1', '"Mars/Olympus" is not a time zone'),
        ('zone = "../../etc/passwd"\notherwise = 1', "is not a time zone"),
        ('zone = ""\notherwise = 1', '"" is not a time zone'),
        ('zone = "UTC"\notherwise = -0.1', "their rate counts as unknown"),
        ('zone = "UTC"\notherwise = nan', "out of bounds"),
        ('zone = "UTC"\notherwise = 1e300', "out of bounds"),
        ('zone = "UTC"\n[[period]]\nfrom = "07:00"', "needs the key 'rate'"),
        ('zone = "UTC"\n[[period]]\nrate = "0.3"', "expected number"),
        ('zone = "UTC"\n[[period]]\nrate = 1\nday = ["mon"]', "did you mean 'days'"),
        ('zone = "UTC"\nperiod = 3', "expected tables"),
        ("zone = ", "not TOML"),
        ('zone = "UTC"\n' + "[[period]]\nrate = 1\n" * 201, "the limit of 200"),
    ],
)
def test_invalid_tariff_file_error_names_the_cause(text: str, why: str) -> None:
    assert why in fault(text)
    assert str(PATH) in fault(text)


def test_all_tariff_errors_are_reported_together() -> None:
    row = "[[period]]\nrate = 1\n"
    told = fault(f'zone = "Nowhere"\n{row}from = "x"\n{row}to = "y"')
    assert [line.partition(": ")[0] for line in told.splitlines()] == [
        f"{PATH}:1",
        f"{PATH}:2",
        f"{PATH}:5",
    ]


def test_overlap_names_both_lines_and_when() -> None:
    told = fault(TWO_RATES.replace('to = "07:00"', 'to = "07:30"'))
    overlap = f"period[1] overlaps period[0] at {PATH}:4: both apply at 07:00"
    assert told.startswith(f"{PATH}:10: {overlap}")
    assert "on Tue" in told


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ('days = ["fri"]\nfrom = "22:00"\nto = "06:00"', 'days = ["sat"]\nto = "06:00"', True),
        ('days = ["fri"]\nfrom = "22:00"\nto = "06:00"', 'days = ["sat"]\nfrom = "06:00"', False),
        ('season = ["03-01", "05-31"]', 'season = ["06-01", "02-28"]', False),
        ('season = ["03-01", "05-31"]', 'season = ["05-31", "02-28"]', True),
        # A leap day, a Monday, once in 28 years
        ('season = ["02-29", "02-29"]', 'days = ["mon"]', True),
        ("until = 2026-03-31", "since = 2026-04-01", False),
        ("until = 2026-03-31", "since = 2026-03-31", True),
        ('until = 2026-03-31\nfrom = "22:00"\nto = "06:00"', "since = 2026-04-01", True),
        ('since = 2026-06-01\nuntil = 2026-06-30\nseason = ["12-01", "12-31"]', "", False),
    ],
)
def test_periods_overlap_if_there_is_any_minute_of_both(
    one: str, other: str, overlap: bool
) -> None:
    text = f'zone = "UTC"\n[[period]]\nrate = 1\n{one}\n[[period]]\nrate = 2\n{other}'
    if overlap:
        assert "overlaps" in fault(text)
    else:
        assert len(schedule(text).periods) == 2


def test_missing_tariff_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such file\. Write one, or name another"):
        read_schedule(tmp_path / "none.toml")


def test_tariff_whose_existence_is_unknown_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file name too long\. Make it readable"):
        read_schedule(tmp_path / ("x" * 300))


def test_binary_tariff_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    path.write_bytes(b'zone = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_schedule(path)


@pytest.mark.parametrize("page", ["how-to/cost-and-carbon.md", "reference/tariff.md"])
def test_tariffs_that_are_documented_can_be_read(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    tariffs = [block for block in blocks if "[[period]]" in block]
    assert tariffs
    for block in tariffs:
        assert schedule(block).periods


def test_settings_that_are_documented_are_right(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "cost-and-carbon.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    settings = [block for block in blocks if "[[period]]" not in block]
    assert settings
    for block in settings:
        path = tmp_path / "config.toml"
        path.write_text(block)
        assert load(path, environ={}).warnings == ()
