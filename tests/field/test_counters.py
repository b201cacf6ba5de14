"""Counts of processes by sums of perf events that the kernel's own programs have recorded.

A file has ``[[row]]`` tables: ``pid``, ``words`` (the fields of a pair on socket 0) and ``clock``,
the CPU time of the process in the same period. Without ``reading``, rows are of the first period.
"""

from __future__ import annotations

from itertools import groupby

import pytest
from testbed.field import FieldCase, field_cases
from testbed.recorded_counters import RecordedCounters
from testbed.synthetic_kernel import Life, SyntheticKernel

from wattspan.attribution.counted_uses import credible

MS = 1_000_000


@pytest.mark.parametrize("case", field_cases("counters"))
def test_recorded_sums_are_the_counts_of_their_processes(case: FieldCase) -> None:
    kernel, counters, lives = SyntheticKernel(), RecordedCounters(), dict[int, Life]()
    source = kernel.source(counters=counters, vigil=True)
    source.poll()
    for _, group in groupby(case["row"], lambda row: row.get("reading", 0)):
        rows = {}
        for row in group:
            life = lives[row["pid"]] = lives.get(row["pid"]) or kernel.spawn()
            rows[life.consumer] = row
            kernel.run(life, row["clock"])
        counters.count(*((payer.pid, 0, row["words"]) for payer, row in rows.items()))
        kernel.clock.advance(1.0)
        for usage in source.poll().usages:
            assert usage.counts is not None
            assert {payer: [*counts] for payer, counts in usage.counts.items()} == {
                payer: row["words"] for payer, row in rows.items()
            }
            for payer, counts in usage.counts.items():
                spent = usage.spent[payer]
                assert abs(counts.time - spent) <= 0.02 * spent + 2 * MS
                assert credible(spent, counts)
