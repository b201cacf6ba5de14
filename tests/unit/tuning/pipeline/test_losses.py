"""The excess of losses on other hosts, by the times of clocks that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.pipelines import WATTS

from wattspan.fleet.job_records import JobRecord, LossRun, SeenRecord
from wattspan.model import SECOND
from wattspan.tuning.decisions.budget import lost_part
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.decisions.values import WorkUnit
from wattspan.tuning.pipeline.control import ChargedIteration, PipelineControl
from wattspan.tuning.pipeline.iterations import AssembledIteration
from wattspan.tuning.pipeline.replicas import LossHistory
from wattspan.tuning.pipeline.session_state import JobLoss, PipelinePolicy, begin_session

OFFSET = 5000 * SECOND
"""The clock of the other host minus that of this one."""

SLOWER = {1: Evidence(1, 0.1, 0.01), 2: Evidence(1, 0.2, 0.0)}
RATES = {level: lost_part(one.mean) for level, one in SLOWER.items()} | {0: 0.0}


def charged(*levels: int, first: int = 100) -> PipelineControl:
    """A control with iterations of a second each, charged to these levels."""
    session = replace(begin_session(PipelinePolicy(1600, 800, blocking_watts=WATTS)), slower=SLOWER)
    iterations = [
        ChargedIteration(
            AssembledIteration(number, (WorkUnit(number * SECOND, (number + 1) * SECOND),), ()),
            SECOND,
            level,
            SLOWER.get(level, Evidence(0, 0.0, 0.0)),
        )
        for number, level in enumerate(levels, first)
    ]
    return PipelineControl(session, charged=tuple(iterations))


def told(*runs: tuple[int, int, float], sent: int, seen: int = 0, host: str = "b") -> SeenRecord:
    """A record with runs in seconds of this host's clock."""
    losses = tuple(
        LossRun(start * SECOND + OFFSET, end * SECOND + OFFSET, rate, rate)
        for start, end, rate in runs
    )
    end = sent * SECOND + OFFSET
    record = JobRecord(session="s", sent=end, covered=end, losses=losses)
    return SeenRecord(host, (seen or sent) * SECOND, record)


def begun() -> LossHistory:
    """A history that has seen a record at 100 s."""
    history = LossHistory().charge({"a": charged(0, first=99)})
    return history.receive([told(sent=100)], 100 * SECOND)


def test_own_iterations_become_runs() -> None:
    history = LossHistory().charge({"a": charged(1, 1, 0, 2, 2, 2)})
    first, second = history.runs
    assert (first.start, first.end) == (100 * SECOND, 102 * SECOND)
    assert first.mean == pytest.approx(lost_part(0.1))
    assert first.bound == pytest.approx(lost_part(0.12))
    assert (second.start, second.end, second.bound) == (
        103 * SECOND, 106 * SECOND, pytest.approx(lost_part(0.2)),
    )  # fmt: skip
    assert history.covered == 106 * SECOND
    assert history.charge({"a": charged()}) is history


def test_old_runs_are_forgotten() -> None:
    history = LossHistory().charge({"a": charged(1)})
    assert history.charge({"a": charged(2, first=140)}).runs[0].start == 140 * SECOND


def test_iteration_without_time_has_no_run() -> None:
    control = charged(1)
    (one,) = control.charged
    short = one._replace(iteration=AssembledIteration(0, (WorkUnit(5, 5),), ()))
    assert LossHistory().charge({"a": replace(control, charged=(short,))}).runs == ()


def test_losses_before_the_first_record_do_not_count() -> None:
    history = LossHistory().charge({"a": charged(0, first=99)})
    history = history.receive([told((80, 100, 0.5), sent=100)], 100 * SECOND)
    assert history.elsewhere == JobLoss()
    assert history.added == 100 * SECOND


def test_excess_over_the_own_loss_is_added_once() -> None:
    history = begun().charge({"a": charged(0, 1, 1, 2)})
    record = told((101, 104, 0.15), sent=104)
    history = history.receive([record], 104 * SECOND)
    expected = 2 * (0.15 - RATES[1]) * SECOND  # own losses are larger at level 2
    assert history.elsewhere.lost == pytest.approx(expected)
    assert history.receive([record], 105 * SECOND).elsewhere == history.elsewhere


def test_largest_loss_among_other_hosts_counts() -> None:
    history = begun().charge({"a": charged(0, 0, 0, 0)})
    records = [
        told((101, 103, 0.1), sent=104),
        told((102, 104, 0.3), sent=104, host="c"),
    ]
    history = history.receive(records, 104 * SECOND)
    assert history.elsewhere.lost == pytest.approx((0.1 + 0.3 + 0.3) * SECOND)


def test_excess_waits_for_own_iterations_and_all_records() -> None:
    record = told((100, 104, 0.5), sent=104)
    history = begun().receive([record], 104 * SECOND)
    assert history.elsewhere == JobLoss()  # the own loss until then is not known
    history = history.charge({"a": charged(2, 2, 2, 2)})
    behind = history.receive([record, told(sent=102, seen=102, host="c")], 104 * SECOND)
    assert behind.added == 102 * SECOND
    assert behind.elsewhere.lost == pytest.approx(2 * (0.5 - RATES[2]) * SECOND)
    assert behind.receive([record], 104 * SECOND).elsewhere.lost == pytest.approx(
        4 * (0.5 - RATES[2]) * SECOND
    )


def test_excess_waits_for_a_while_only() -> None:
    history = begun().receive([told((100, 104, 0.5), sent=104)], 114 * SECOND)
    assert history.elsewhere.lost == pytest.approx(4 * 0.5 * SECOND)


def test_time_without_records_does_not_count_beyond_the_window() -> None:
    history = begun().charge({"a": charged(0, first=399)})
    assert history.receive([], 400 * SECOND) is history
    unusable = SeenRecord("c", 400 * SECOND, None, "Its record has another schema.")
    history = history.receive([told((360, 380, 0.5), sent=400), unusable], 400 * SECOND)
    assert history.elsewhere.lost == pytest.approx(10 * 0.5 * SECOND)


def test_late_record_does_not_move_the_times_of_its_host() -> None:
    history = begun().charge({"a": charged(0, 0, 0, 0, 0, 0)})
    late = told((102, 104, 0.2), sent=104, seen=106)
    history = history.receive([late], 106 * SECOND)
    assert history.added == pytest.approx(104 * SECOND, abs=0.01 * SECOND)
    assert history.elsewhere.lost == pytest.approx(2 * 0.2 * SECOND, rel=0.01)


def test_restarted_host_has_other_times() -> None:
    history = begun().charge({"a": charged(0, 0, 0, 0)})
    record = JobRecord(
        session="new", sent=10 * SECOND, covered=10 * SECOND,
        losses=(LossRun(0, 2 * SECOND, 0.1, 0.1),),
    )  # fmt: skip
    history = history.receive([SeenRecord("b", 104 * SECOND, record)], 104 * SECOND)
    assert history.added == 104 * SECOND
    assert history.elsewhere == JobLoss()  # its loss ended at 96 s by this host's clock
