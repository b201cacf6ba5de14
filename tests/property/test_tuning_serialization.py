"""Any decision round-trips through JSON and the decision log."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from wattspan.model import Decision, DecisionReason, Instant, Knob, Move, RecordedDecision
from wattspan.service.decision_events import decision_record
from wattspan.storage.tuning import DecisionLog
from wattspan.testing import ManualClock
from wattspan.tuning.serialization import (
    recorded_decision_from_json,
    recorded_decision_to_json,
)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
decisions = st.builds(
    Decision,
    st.sampled_from(Move),
    st.sampled_from(DecisionReason),
    words,
    st.dictionaries(words, st.integers(0, 2_000_000), max_size=3),
    st.dictionaries(words, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
decided = st.builds(
    RecordedDecision,
    st.builds(Instant, st.integers(0, 2**62), st.integers(0, 2**62), st.just(0)),
    words,
    st.sampled_from(Knob),
    decisions,
    st.booleans(),
)


@given(decided)
def test_decision_round_trips_through_json(one: RecordedDecision) -> None:
    assert (
        recorded_decision_from_json(
            msgspec.json.decode(msgspec.json.encode(recorded_decision_to_json(one)))
        )
        == one
    )


@given(decided)
def test_event_holds_the_decision(one: RecordedDecision) -> None:
    event = decision_record(one)
    devices = event.attributes["wattspan.autotune.devices"]
    assert devices == sorted(one.decision.caps)
    assert event.attributes["wattspan.autotune.reason"] == one.decision.reason


@settings(max_examples=40, deadline=None)
@given(st.lists(decided, max_size=12), st.integers(100, 2_000), st.integers(0, 200))
def test_truncated_decision_log_yields_only_real_decisions(
    several: list[RecordedDecision], size: int, torn: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.jsonl"
        book = DecisionLog(path, ManualClock(), size)
        for one in several:
            book.add(one)
        before = book.recent(limit=100)
        assert all(one in several for one in before)
        if path.exists():
            path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - torn)])
        again = DecisionLog(path, ManualClock(), size)
        after = again.recent(limit=100)
        assert all(one in before for one in after)
        fresh = RecordedDecision(
            Instant(0, 2**62),
            "fresh",
            Knob.GPU_POWER,
            Decision(Move.HOLD, DecisionReason.HELD, ""),
            True,
        )
        again.add(fresh)
        assert again.recent("fresh") == [fresh]
