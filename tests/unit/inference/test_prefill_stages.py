"""The begin of prefill by the stage spans of an engine."""

from __future__ import annotations

from wattspan.inference.traces import MAX_TRACES, PrefillStages
from wattspan.model import Principal
from wattspan.spans.values import Span, SpanColumns

ALICE, BOB = Principal(1000), Principal(1001)


def _stage(trace: bytes, start: int, name: str = "prefill_forward") -> Span:
    return Span(trace, b"s" * 8, b"", "sglang", name, start, start + 1, None, 0, 0)


def test_earliest_stage_within_the_time_begins_prefill() -> None:
    stages = PrefillStages()
    stages.add(ALICE, SpanColumns.of([_stage(b"a", at) for at in (3, 9, 7, 40)]))
    stages.add(ALICE, SpanColumns.of([_stage(b"a", 6, "chunked_prefill"), _stage(b"b", 5)]))

    assert stages.begin(ALICE, b"a", 5, 30) == 6
    assert stages.begin(ALICE, b"a", 10, 30) is None
    assert stages.begin(ALICE, b"c", 0, 30) is None


def test_other_spans_are_ignored() -> None:
    stages = PrefillStages()
    stages.add(ALICE, SpanColumns.of([_stage(b"a", 1, "decode_forward")]))
    stages.add(ALICE, SpanColumns.of([_stage(b"a", 2, "prefill_waiting"), _stage(b"b", 5)]))

    assert stages.begin(ALICE, b"a", 0, 30) is None
    assert stages.begin(ALICE, b"b", 0, 30) == 5


def test_stages_are_bounded() -> None:
    stages = PrefillStages()
    stages.add(ALICE, SpanColumns.of([_stage(b"a", at) for at in range(1000, 0, -1)]))
    assert stages.begin(ALICE, b"a", 0, 1000) == 1000 - 63

    stages.add(ALICE, SpanColumns.of([_stage(b"%d" % i, 1) for i in range(MAX_TRACES)]))
    assert stages.begin(ALICE, b"a", 0, 1000) is None


def test_stages_of_another_principal_change_nothing() -> None:
    stages = PrefillStages()
    stages.add(ALICE, SpanColumns.of([_stage(b"a", 20)]))
    stages.add(BOB, SpanColumns.of([_stage(b"a", at) for at in range(100)]))

    assert stages.begin(ALICE, b"a", 0, 30) == 20
