"""The lines and the JSON of ``wattspan tune recommend``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wattspan.cli.formatting import UNKNOWN, table_lines
from wattspan.cli.tune.text import percent, setting_text, sort_rows
from wattspan.model import Knob, TuningAccounts, TuningRow
from wattspan.tuning.decisions.instances import InstanceRange, best_range, instance_ranges
from wattspan.tuning.serialization import setting_number, unit
from wattspan.util.text import printable

NOT_TRACKED = (
    "The load of no job is tracked, so no number of instances can be compared. Set"
    ' `control = "track"` for the job of a server in [[autotune.job]].'
)
_LIMITS = {True: "kept", False: "missed", None: "not certain"}
_TITLES = ("INSTANCES", "LOAD OF EACH", "SETTING", "LIMITS", "REQUESTS", "J/TOKEN", "ENERGY")


def recommendation_lines(accounts: TuningAccounts, instances: int) -> Iterator[str]:
    """A table of the numbers of instances of each tracked job, and the best one."""
    rows = [row for row in sort_rows(accounts.rows) if row.load is not None]
    if not rows:
        yield NOT_TRACKED
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from map(printable, _job_lines(row, instances))


def recommendation_facts(row: TuningRow, instances: int) -> dict[str, Any] | None:
    """The JSON form for one job; None if its load is not tracked."""
    if row.load is None:
        return None
    ranges = instance_ranges(row.load, instances)
    best = best_range(ranges)
    return {
        "job": row.job,
        "unit": unit(row.knob),
        "instances": instances,
        "load": row.load.load,
        "ranges": [_range_facts(row.knob, one) for one in ranges],
        "recommended": None if best is None else _range_facts(row.knob, best),
    }


def _range_facts(knob: Knob, one: InstanceRange) -> dict[str, Any]:
    return {
        "least_instances": one.least,
        "most_instances": one.most,
        "bin_bound": one.bin.bin_bound,
        "setting": setting_number(knob, one.bin.setting),
        "kept": one.bin.kept,
        "requests": one.bin.requests,
        "joules_per_token": one.bin.joules_per_token,
        "energy_change": one.change,
    }


def _job_lines(row: TuningRow, instances: int) -> Iterator[str]:
    load = row.load
    assert load is not None  # noqa: S101 - rows without a load are left out
    each = f"{instances} instances of" if instances > 1 else "1 instance of"
    yield f"{row.job}: {each} load {load.load:.1f}"
    ranges = instance_ranges(load, instances)
    if not ranges:
        yield "No figure yet: no request is in flight, or no load bin has ended requests."
        return
    best = best_range(ranges)
    cells = [_TITLES, *(_cells(row.knob, one, load.load * instances) for one in ranges)]
    for one, line in zip([None, *ranges], table_lines(cells, left=(2, 3)), strict=True):
        yield f"{' ' if one is None or one is not best else '*'} {line}".rstrip()
    if best is None:
        yield "No recommendation: no load bin has certain latencies and known energy per token yet."
        return
    yield (
        f"* is the least energy within the latency limits: INSTANCES {_range_text(best)}, ENERGY"
        f" {_change_text(best.change)}. Nothing is changed: a load balancer or a scheduler sets the"
        " number of instances. Loads that were never met have no line."
    )


def _cells(knob: Knob, one: InstanceRange, total: float) -> tuple[str, ...]:
    energy = one.bin.joules_per_token
    return (
        _range_text(one),
        _load_text(one, total),
        setting_text(knob, one.bin.setting),
        _LIMITS[one.bin.kept],
        str(one.bin.requests),
        UNKNOWN if energy is None else f"{energy:.3g}",
        _change_text(one.change),
    )


def _range_text(one: InstanceRange) -> str:
    if one.most is None:
        return f"{one.least} or more"
    return str(one.least) if one.most == one.least else f"{one.least} to {one.most}"


def _load_text(one: InstanceRange, total: float) -> str:
    most = total / one.least
    if one.most is None:
        return f"{most:.1f} or less"
    return f"{most:.1f}" if one.most == one.least else f"{total / one.most:.1f} to {most:.1f}"


def _change_text(change: float | None) -> str:
    if change is None:
        return UNKNOWN
    text = percent(change)
    return text if text.startswith(("-", "0.0")) else f"+{text}"
