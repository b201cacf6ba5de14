"""Records of other hosts: any bytes are a record within its bounds, or refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wattspan.fleet.job_records import (
    MAX_RUNS,
    JobRecord,
    JobView,
    LossRun,
    PipelineSummary,
    RefusedRecordError,
    SeenRecord,
    bounded_runs,
    decode_record,
    encode_record,
)
from wattspan.model import SECOND
from wattspan.tuning import host_turns
from wattspan.tuning.pipeline.replicas import LossHistory, judged

OWN = PipelineSummary(name="0", whole=1.0, computed=0.9, tail=0.1, noise=0.0, state="hold")
NOW = 1000 * SECOND
NUMBERS = st.one_of(
    st.integers(-2, 2**63), st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 2)
)
PIPELINES = st.fixed_dictionaries(
    {
        "name": st.text(max_size=3),
        "whole": NUMBERS,
        "computed": NUMBERS,
        "tail": NUMBERS,
        "noise": NUMBERS,
        "state": st.text(max_size=3),
    }
)
RECORDS = st.fixed_dictionaries(
    {
        "session": st.text(max_size=3),
        "sent": st.integers(0, 2**62 - 1),
        "covered": st.integers(0, 2**62 - 1),
        "pipelines": st.lists(PIPELINES, max_size=3),
        "losses": st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS).map(list), max_size=3),
    },
    optional={
        "ranks": st.fixed_dictionaries(
            {}, optional={"since": NUMBERS, "setting": st.text(max_size=3), "lost": NUMBERS}
        )
    },
)


def used(value: bytes) -> None:
    """Decode a record and use it as a tuner does."""
    try:
        record: JobRecord | None = decode_record(value)
        refusal = ""
    except RefusedRecordError as error:
        record, refusal = None, str(error)
        assert refusal.startswith("Its record ")
        assert refusal.endswith((".", "?"))
    seen = SeenRecord("b", NOW, record, refusal)
    turn = host_turns.judged(JobView((seen,)), 2, None, NOW)
    assert turn.may_explore is (record is not None and record.ranks is not None)
    assert turn.figures[0].sentence
    partners = judged(JobView((seen,)), (OWN,), NOW)
    (figures,) = partners.figures
    assert figures.sentence
    for one in partners.pipelines.values():
        assert 0 < one.finishes(NOW, NOW + SECOND) <= NOW + SECOND + 1
    history = LossHistory(covered=NOW).receive(partners.records, NOW)
    history = history.receive(partners.records, NOW + 20 * SECOND)
    assert 0 <= history.elsewhere.lost <= history.elsewhere.bound + 1 <= 30 * SECOND + 1


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_used(value: bytes) -> None:
    used(value)


@given(RECORDS)
def test_any_figures_are_refused_or_used_within_bounds(facts: dict[str, Any]) -> None:
    used(json.dumps(facts).encode())


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 20), st.floats(0, 1), st.floats(0, 1)),
        max_size=2 * MAX_RUNS,
    )
)
def test_own_runs_are_always_readable(runs: list[tuple[int, int, float, float]]) -> None:
    made = [
        LossRun(start, start + lasted, min(one, other), max(one, other))
        for start, lasted, one, other in runs
    ]
    record = JobRecord(session="a", sent=600, covered=600, losses=bounded_runs(made))
    assert decode_record(encode_record(record)) == record
