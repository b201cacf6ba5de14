import pytest

from wattspan.cli import formatting


@pytest.mark.parametrize(
    ("watts", "text"),
    [(None, "-"), (0, "0.0"), (84.249, "84.2"), (700, "700.0"), (12_345.678, "12346")],
)
def test_watts_have_one_decimal_and_unknown_is_a_dash(watts: float | None, text: str) -> None:
    assert formatting.watts(watts) == text


@pytest.mark.parametrize(
    ("microjoules", "text"),
    [
        (None, "-"), (0, "0.00 J"), (7, "7.00 µJ"), (4_300, "4.30 mJ"), (-1_230, "-1.23 mJ"),
        (-2_500_000_000, "-2.50 kJ"), (9_994_999, "9.99 J"), (9_996_000, "10.0 J"),
        (999_400_000, "999 J"), (999_600_000, "1.00 kJ"), (12_345_000_000, "12.3 kJ"),
        (5 * 10**24, "5000 PJ"),
    ],
)  # fmt: skip
def test_joules_have_three_digits_and_a_prefix(microjoules: int | None, text: str) -> None:
    assert formatting.joules(microjoules) == text


@pytest.mark.parametrize(
    ("value", "prefix", "factor"),
    [
        (0.0, "", 1.0), (0.213, "m", 1e-3), (3.2e-5, "µ", 1e-6), (1e-9, "µ", 1e-6),
        (42.0, "", 1.0), (12_345.0, "k", 1e3), (1e20, "P", 1e15),
    ],
)  # fmt: skip
def test_unit_prefix_leaves_one_to_three_digits(value: float, prefix: str, factor: float) -> None:
    assert formatting.unit_prefix(value) == (prefix, pytest.approx(factor))


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, "-"), (0, 5, "0%"), (1, 500, "0.2%"), (31, 100, "31%")]
)
def test_share_of_zero_is_unknown(part: int, whole: int, text: str) -> None:
    assert formatting.share(part, whole) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (99.96, "1m 40s"), (3600, "1h 00m"), (90_061, "1d 01h")],
)
def test_duration_has_two_units(seconds: float, text: str) -> None:
    assert formatting.duration_text(round(seconds * 1e9)) == text


def test_clock_time_is_in_utc() -> None:
    assert formatting.clock_time(1_700_000_000 * 10**9) == "22:13:20Z"


def test_table_has_the_columns_that_are_declared_and_not_empty() -> None:
    columns = (
        formatting.TableColumn("name", lambda row: row[0], left=True),
        formatting.TableColumn("", lambda row: "", left=True),
        formatting.TableColumn("watts", lambda row: row[1], note="measured"),
    )
    rows = (("a longer\nname", 7), ("b", 1234))
    assert formatting.table_lines(columns, rows, max_width=6) == [
        "name       watts",
        "        measured",
        "a lon…         7",
        "b           1234",
    ]
    untitled = [one._replace(title="", note="") for one in columns]
    assert formatting.table_lines(untitled, rows[1:]) == ["b  1234"]
