"""Content of a row in every text format."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from testbed.scrapes import full_host
from testbed.snapshots import CPU, NOON, process

from wattspan.model import Instant, Snapshot
from wattspan.ports import ConfigError
from wattspan.util.text import escape_formula
from wattspan_exporters.catalogue import CATALOGUE, select_metrics
from wattspan_exporters.catalogue.definition import Instrument, Metric, Sample
from wattspan_exporters.files import DEFAULT_METRICS
from wattspan_exporters.files.rows import (
    COLUMNS,
    CSV,
    JSON_LINES,
    RowEncoder,
    format_time,
)

TABLE = "exporters.files"
NAMES = [column.name for column in COLUMNS]


def lines(encoder: RowEncoder, snapshot: Snapshot) -> list[str]:
    return encoder.encode(snapshot).data.decode().splitlines()


def objects(snapshot: Snapshot, metrics: Sequence[Metric] = CATALOGUE) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines(RowEncoder(metrics, JSON_LINES), snapshot)]


def drawn(*samples: Sample, unit: str = "J") -> Metric:
    return Metric("test.energy", Instrument.COUNTER, unit, "", ("hw.id",), lambda _: samples)


def test_every_row_has_every_column_in_the_same_order() -> None:
    assert {tuple(row) for row in objects(full_host())} == {tuple(NAMES)}
    assert CSV.header.decode() == ",".join(NAMES) + "\n"


def test_row_has_time_host_metric_and_provenance() -> None:
    row = next(row for row in objects(full_host()) if row["metric"] == "wattspan.process.energy")
    assert {name: value for name, value in row.items() if value is not None} == {
        "timestamp": "2023-11-14T22:13:20.000000Z", "monotonic_ns": 10**12, "host": "node7",
        "metric": "wattspan.process.energy", "instrument": "Counter", "unit": "J",
        "value": 9120, "whole": 9_120_000_000, "provenance": "measured", "hw_type": "cpu",
        "pid": 4123, "command": "python", "group": "trainer-7f9c",
    }  # fmt: skip


def test_attributes_without_a_column_are_one_json_object() -> None:
    row = next(row for row in objects(full_host()) if row["metric"] == "wattspan.gpu.clock")
    assert isinstance(row["attributes"], str)
    assert json.loads(row["attributes"]) == {"clock": "sm"}


@pytest.mark.parametrize(
    ("microjoules", "text"),
    [
        (0, "0"),
        (1, "0.000001"),
        (1_000_000, "1"),
        (-7, "-0.000007"),
        (2**62, "4611686018427.387904"),
    ],
)
def test_whole_value_is_exact(microjoules: int, text: str) -> None:
    metric = drawn((("x",), microjoules))
    (line,) = lines(RowEncoder([metric], JSON_LINES), full_host())
    assert f'"value":{text},"whole":{microjoules},' in line
    (cells,) = csv.reader(lines(RowEncoder([metric], CSV), full_host()))
    row = dict(zip(NAMES, cells, strict=True))
    assert (row["value"], row["whole"]) == (text, str(microjoules))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_value_without_number_is_null(value: float) -> None:
    (row,) = objects(full_host(), [drawn((("x",), value), unit="1")])
    assert (row["value"], row["whole"]) == (None, None)


def test_fraction_has_no_whole_number_and_a_huge_one_neither() -> None:
    huge = 2**63
    rows = objects(full_host(), [drawn((("x",), 0.25), (("y",), huge), unit="1")])
    assert [(row["value"], row["whole"]) for row in rows] == [(0.25, None), (huge, None)]


def test_series_that_is_drawn_twice_is_written_once() -> None:
    rows = objects(full_host(), [drawn((("x",), 1), (("x",), 2))])
    assert [row["whole"] for row in rows] == [1]


def test_microseconds_are_rounded_down() -> None:
    assert format_time(NOON + 1_999) == "2023-11-14T22:13:20.000001Z"
    assert format_time(NOON - 1) == "2023-11-14T22:13:19.999999Z"


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "\udce9", 'quo"te', "a,b", "é" * 10**6, "'x", ""])
def test_hostile_name_is_one_cell(name: str) -> None:
    snapshot = replace(full_host(), processes=(process(7, name, name, {}, {CPU: 3}),))
    metrics = select_metrics(["wattspan.process.energy"], TABLE)
    row = objects(snapshot, metrics)[0]
    heading, *rows = csv.reader(
        (CSV.header + RowEncoder(metrics, CSV).encode(snapshot).data)
        .decode()
        .splitlines(keepends=True),
        strict=True,
    )
    cells = dict(zip(heading, rows[0], strict=True))
    assert (row["pid"], cells["pid"]) == (7, "7")
    assert cells["command"].removeprefix("'") == (row["command"] or "")
    assert len(cells["command"]) <= 130


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "'=1", "＝1"])
def test_csv_cells_are_never_formulas_and_are_reversible(name: str) -> None:
    snapshot = replace(full_host(), processes=(process(7, name, "", {}, {CPU: 3}),))
    encoder = RowEncoder(select_metrics(["wattspan.process.energy"], TABLE), CSV)
    cells = next(csv.reader(lines(encoder, snapshot)))
    assert cells[NAMES.index("command")] == f"'{name}"
    assert escape_formula(name).removeprefix("'") == name


def test_ended_series_are_removed() -> None:
    encoder = RowEncoder(select_metrics(["wattspan.process.energy"], TABLE), JSON_LINES)
    for n in range(100):
        crowd = tuple(process(100 * n + pid, "x", "", {}, {CPU: 1}) for pid in range(100))
        encoder.encode(replace(full_host(), processes=crowd))
    assert encoder.kept < 400


def test_clock_may_step_back() -> None:
    early = replace(full_host(), at=Instant(2 * 10**12, NOON - 3600 * 10**9))
    row = objects(early)[0]
    assert (row["timestamp"], row["monotonic_ns"]) == ("2023-11-14T21:13:20.000000Z", 2 * 10**12)


# ----------------------------------------------------------------------------------- selection


def test_default_metrics_include_energy_power_and_cost() -> None:
    names = {metric.name for metric in select_metrics(DEFAULT_METRICS, TABLE, facts=False)}
    assert {"hw.energy", "wattspan.span.energy", "wattspan.gap.time", "hw.gpu.utilization"} <= names
    assert {"wattspan.autotune.slowdown", "wattspan.power.limit"} <= names
    certain = {f"wattspan.{of}.certainty.info" for of in ("host", "domain", "attribution")}
    assert certain <= names, "a lower bound is told from a known figure"
    assert not names & {"wattspan.source.up", "wattspan.agent.ticks", "wattspan.gpu.info"}


def test_facts_are_written_where_they_are_named() -> None:
    chosen = select_metrics(["wattspan.gpu.info", "hw.power"], TABLE, facts=False)
    assert [m.name for m in chosen] == [
        "hw.power", "wattspan.gpu.info",
    ]  # fmt: skip


def test_files_and_pushes_choose_alike() -> None:
    patterns = ("hw.*", "!hw.gpu.*", "hw.gpu.memory.*")
    names = [metric.name for metric in select_metrics(patterns, TABLE, facts=False)]
    assert names == [metric.name for metric in select_metrics(patterns, "exporters.otlp")]
    assert "hw.gpu.memory.usage" in names
    assert "hw.gpu.utilization" not in names


def test_unknown_metric_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'"hw\.enrgy".*"hw\.energy" is near'):
        select_metrics(["hw.enrgy"], TABLE)
