"""Counts of processes by sums of perf events that the kernel's own programs have recorded.

A file has ``[[row]]`` tables: ``pid``, ``words`` (the fields of a pair on socket 0) and ``clock``,
the CPU time of the process in the same period.
"""

from __future__ import annotations

from typing import Any

import pytest
from testbed.field import FieldCase, field_cases

from wattspan.model import Consumer, Instant, Payer, Usage
from wattspan.processes.performance_counters import CounterSums, add_counts

MS = 1_000_000


@pytest.mark.parametrize("case", field_cases("counters"))
def test_recorded_sums_are_the_counts_of_their_processes(case: FieldCase) -> None:
    rows: dict[Payer, Any] = {Consumer(row["pid"], 7): row for row in case["row"]}
    sums = CounterSums(
        [row["pid"] << 32 for row in rows.values()],
        [word for row in rows.values() for word in row["words"]],
    )
    spent = {payer: row["clock"] for payer, row in rows.items()}
    usages = [Usage(name, Instant(0, 0), Instant(1, 1), spent) for name in ("cpu", "cpu:0")]
    for usage in add_counts(usages, sums, {}):
        assert usage.counts is not None
        assert {payer: [*counts] for payer, counts in usage.counts.items()} == {
            payer: row["words"] for payer, row in rows.items()
        }
        for payer, counts in usage.counts.items():
            assert abs(counts.time - spent[payer]) <= 0.02 * spent[payer] + 2 * MS
