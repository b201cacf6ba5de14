"""The judge of the attack schedule detects violations, and its bodies match their description."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from testbed.hostile import bodies
from testbed.hostile.judge import (
    Finding,
    Reply,
    Rule,
    Sample,
    above_budget,
    mean_rate,
    service,
    services,
    verdict,
    worst_service,
)

WELL = Finding("an attack", "a topic", 5.0, before=60_000_000, peak=90_000_000, after=61_000_000)


def replies(times: Sequence[float], status: int = 200, kind: str = "healthz") -> list[Reply]:
    return [Reply(kind, float(at), seconds, status) for at, seconds in enumerate(times)]


def finding(**changes: object) -> Finding:
    facts = {name: getattr(WELL, name) for name in WELL.__dataclass_fields__}
    return Finding(**{**facts, **changes})  # type: ignore[arg-type]


def test_p99_leaves_out_one_request_of_a_hundred() -> None:
    assert service(replies([0.1] * 99 + [9.0])).p99 == 0.1
    assert service(replies([0.1] * 98 + [9.0] * 2)).p99 == 9.0
    assert service(replies([0.1] * 198 + [9.0] * 2)).p99 == 0.1


def test_p99_of_few_requests_leaves_out_one() -> None:
    assert service(replies([0.1, 0.2, 9.0])).p99 == 0.2
    assert service(replies([9.0])).p99 == 9.0
    assert service([]).requests == 0


@pytest.mark.parametrize("status", [0, 429, 503])
def test_request_that_is_not_served_has_no_end(status: int) -> None:
    found = service([*replies([0.1] * 10), *replies([0.1] * 2, status)])
    assert found.p99 == math.inf
    assert found.refused + found.unanswered == 2
    assert found.unanswered == (2 if status == 0 else 0)


def test_each_kind_of_request_is_judged() -> None:
    found = services([*replies([0.1] * 50), *replies([0.1] * 2, 503, "batch/unix")])
    assert worst_service(found)[0] == "batch/unix"
    assert verdict(finding(others=found), Rule()) == [
        "batch/unix: p99 not served, 2 of 2 not served"
    ]
    assert verdict(finding(others=found), Rule(others=False)) == []


def test_late_requests_fail_an_attack() -> None:
    late = services(replies([0.1] * 10 + [1.2] * 2))
    assert verdict(finding(others=late), Rule()) == ["healthz: p99 1.20 s, 0 of 12 not served"]
    assert verdict(finding(others=late), Rule(p99=2.0)) == []


def test_wedge_kill_and_own_faults_fail_an_attack() -> None:
    wrong = verdict(finding(wedged=True, killed=True, faults=["a fault"]), Rule())
    assert wrong == ["a fault", "the agent was killed", "the agent did not recover"]
    assert verdict(finding(killed=True), Rule(memory=False)) == []


def test_memory_that_remains_fails_an_attack_with_a_bound() -> None:
    grown = finding(after=WELL.before + 11_000_000)
    assert verdict(grown, Rule(growth=10.0)) == ["11 MB remain, at most 10"]
    assert verdict(grown, Rule()) == []
    assert verdict(WELL, Rule(growth=10.0)) == []


def samples(*totals: float) -> list[Sample]:
    return [Sample(number / 50, {"a": total, "b": 0.0}) for number, total in enumerate(totals)]


def test_budget_holds_from_the_first_sample_within_it() -> None:
    assert above_budget(samples(1900, 1300, 1200, 1100, 1200), 1200) == []
    assert [one.total for one in above_budget(samples(1900, 1200, 1201, 1200), 1200)] == [1201]
    assert above_budget(samples(1900, 1300), 1200) == []


def test_rate_of_samples_is_their_mean() -> None:
    assert mean_rate(samples(1, 1, 1)) == pytest.approx(50)
    assert mean_rate(samples(1)) == 0


# ------------------------------------------------------------------------------------------ bodies


def parsed(body: bodies.Body) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(body.build())


def test_field_floods_are_valid_protobuf_but_for_their_number() -> None:
    floods = {body.name: body for body in bodies.protobuf_floods(4_000)}
    for name, body in floods.items():
        if name != "nested values":  # protobuf's own bound on depth
            assert parsed(body).resource_spans, name
    (span,) = parsed(floods["attributes of a span"]).resource_spans[0].scope_spans[0].spans
    assert len(span.attributes) == 2_000
    assert len(parsed(floods["empty spans"]).resource_spans[0].scope_spans[0].spans) == 2_000


def test_attack_body_round_trips_through_json() -> None:
    for body in [*bodies.varints(100), *bodies.json_floods(1_000), *bodies.bombs(1)]:
        assert bodies.understood(body.told()) == body


def test_bomb_is_much_smaller_than_its_content() -> None:
    (gzip, *_) = bodies.bombs(8 * bodies.MIB)
    assert len(gzip.build()) < 8 * bodies.MIB / 500


def test_span_template_has_the_requested_span_count() -> None:
    told = ExportTraceServiceRequest.FromString(bodies.span_template(7))
    assert len(told.resource_spans[0].scope_spans[0].spans) == 7


# ------------------------------------------------------------------------------------------- table
