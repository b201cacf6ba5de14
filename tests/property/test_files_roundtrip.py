"""Any snapshots become files that other readers read, with exactly the known values."""

from __future__ import annotations

import csv
import io
import tempfile
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.file_writer import Desk, desk, read
from testbed.snapshots import account

from wattspan.model import (
    Consumer,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Microjoules,
    Milliwatts,
    PayerInfo,
    ProcessRow,
    Provenance,
)
from wattspan_exporters.catalogue import select_metrics
from wattspan_exporters.catalogue.definition import sanitize
from wattspan_exporters.files import DEFAULT_METRICS
from wattspan_exporters.files.rows import CSV, convert, format_time

pytestmark = pytest.mark.slow

names = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(
    ["=cmd|'/c calc'!A0", '"', "a,b", "\n", "\0", "\udcff", "'", "'=", "NA", "null", "x" * 200]
)
energies = st.integers(0, 2**60).map(Microjoules)  # so that a host of three is below 2**63
by_type = st.dictionaries(st.sampled_from(HwType), energies, min_size=1)


@st.composite
def hosts(draw: st.DrawFn) -> dict[str, Any]:
    """Changes between two snapshots."""
    processes = tuple(
        ProcessRow(PayerInfo(Consumer(pid, 1), draw(names)), draw(by_type), {})
        for pid in draw(st.lists(st.integers(1, 2**22), unique=True, max_size=4))
    )
    groups = tuple(
        GroupRow(Group(GroupKind.CONTAINER, name), draw(by_type), {})
        for name in draw(st.lists(names, unique_by=sanitize, max_size=3))
    )
    domains = tuple(
        replace(
            account(f"d{n}", draw(st.sampled_from(HwType)), draw(names), None, (0, 0, 0)),
            energy=draw(energies),
            power=draw(st.none() | st.integers(0, 2**40).map(Milliwatts)),
        )
        for n in range(draw(st.integers(1, 3)))
    )
    provenance = dict.fromkeys(HwType, Provenance.MEASURED)
    return {
        "processes": processes, "groups": groups, "domains": domains, "other": draw(by_type),
        "provenance": provenance, "gpus": (),
    }  # fmt: skip


def expected(it: Desk) -> list[tuple[object, ...]]:
    """Expected rows of the newest snapshot."""
    found = []
    for metric in select_metrics(DEFAULT_METRICS, "exporters.files", facts=False):
        for labels, value in metric.draw(it.snapshot):
            given = dict(zip(metric.labels, map(sanitize, labels), strict=True))
            whole = value if isinstance(value, int) else None
            exact = Decimal(repr(value)) if whole is None else Decimal(value) / 10**metric.decimals
            known = tuple(given.get(n) or None for n in ("hw_id", "hw_type", "command", "group"))
            found.append((format_time(it.snapshot.at.wall), metric.name, exact, whole, *known))
    return found


def told(rows: list[Any]) -> list[tuple[object, ...]]:
    columns = ("hw_id", "hw_type", "command", "group")
    return [
        (
            row["timestamp"], row["metric"], Decimal(row["value"]), row["whole"],
            *(row[name] for name in columns),
        )
        for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@given(data=st.data())
def test_text_files_equal_the_snapshots(form: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted: list[tuple[object, ...]] = []
        compression = data.draw(st.sampled_from(["none", "gzip"]))
        size = data.draw(st.sampled_from(["4KiB", "8KiB", "64MiB"]))
        keys = {"format": form, "compression": compression, "rotate": "30s", "rotate_size": size}
        with desk(Path(folder), **keys) as it:
            for changes in data.draw(st.lists(hosts(), min_size=1, max_size=3)):
                it.clock.step_wall(data.draw(st.integers(-(10**6), 10**6)))
                it.turn(data.draw(st.floats(0.1, 40)), **changes)
                wanted += expected(it)
        rows = [row for path in it.closed for row in read(path)]
        assert Counter(told(rows)) == Counter(wanted)
        assert it.writer.drops == 0
        assert it.log == []


@given(snapshots=st.lists(hosts(), min_size=1, max_size=3))
def test_parquet_equals_the_text_files(snapshots: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with desk(Path(folder)) as it:
            for changes in snapshots:
                it.turn(**changes)
        text = it.closed[0]
        parquet = text.with_suffix(".parquet")
        with text.open("rb") as part, parquet.open("wb") as out:
            count = convert(part, out)
        rows, same = read(text), read(parquet)
    assert len(rows) == len(same) == count
    for row, other in zip(rows, same, strict=True):
        assert float(row["value"]) == other["value"]
        at = f"{other['timestamp']:%Y-%m-%dT%H:%M:%S.%fZ}"
        assert {**other, "value": row["value"], "timestamp": at} == row


@given(hosts())
def test_cells_are_never_formulas(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with desk(Path(folder), format="csv") as it:
            it.turn(**changes)
        text = it.closed[0].read_bytes().removeprefix(CSV.header)
    for cell in cells(text.decode()):
        number = cell.lstrip("-").replace(".", "", 1).isdecimal()
        assert number or cell[:1] not in set("=+-@\t\r\n")


def cells(text: str) -> list[str]:
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@given(host=hosts(), cut=st.floats(0, 1), garbage=st.sampled_from([b"", b"\0" * 99, b"x", b"\n\n"]))
def test_truncated_part_keeps_exactly_the_rows_before(
    form: str, host: dict[str, Any], cut: float, garbage: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with desk(Path(folder), format=form) as it:
            it.turn(**host)
        (whole,) = it.closed
        rows, data = read(whole), whole.read_bytes()
        left = data[: round(cut * len(data))]
        whole.with_name(f"{whole.name}.part").write_bytes(left + garbage)
        whole.unlink()
        with desk(Path(folder), metrics=["hw.power"]) as after:
            after.turn(10**6)
            kept = read(whole) if whole.exists() else []
    assert kept == rows[: len(kept)]
    if form == "jsonl":
        restored = garbage[:1] == data[len(left) : len(left) + 1] == b"\n"
        assert len(kept) == left.count(b"\n") + restored
    else:
        complete = list(csv.reader(io.StringIO(left.decode(errors="replace"), newline="")))
        assert len(complete) - 2 <= len(kept) <= len(complete)
