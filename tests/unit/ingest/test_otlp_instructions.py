"""Instructions of pipelines that spans report in attributes, in both encodings."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from testbed.otlp import request, span
from testbed.otlp_reference import records_in_both_encodings

from wattspan.ingest.export_request import InstructionReport
from wattspan.spans.values import ReportedInstruction

REPORT = InstructionReport("gpt", "stage", "microbatch", "instruction")
OTHER = InstructionReport("", "pp.stage", "pp.batch", "pp.pass")


def told(
    *spans: Span, reports: tuple[InstructionReport, ...] = (REPORT, OTHER), service: str = "gpt"
) -> list[ReportedInstruction | None]:
    """The instructions of the spans; the same in both encodings."""
    whole = request(*spans, resource={"service.name": service})
    return [one.instruction for one in records_in_both_encodings(whole, instructions=reports)]


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("forward", "forward"),
        ("FWD", "forward"),
        ("f", "forward"),
        ("Backward", "backward"),
        ("bwd", "backward"),
        ("b", "backward"),
        ("weight", None),
        ("", None),
        (1, None),
    ],
)
def test_instruction_has_its_kind(instruction: str | int, kind: str | None) -> None:
    expected = None if kind is None else ReportedInstruction(2, 7, kind)
    assert told(span(1, stage=2, microbatch=7, instruction=instruction)) == [expected]


def test_numbers_may_be_texts() -> None:
    assert told(span(1, stage="2", microbatch="7", instruction="f")) == [
        ReportedInstruction(2, 7, "forward")
    ]


@pytest.mark.parametrize("stage", [-1, "first", float("nan"), True])
def test_invalid_stage_is_no_instruction(stage: object) -> None:
    assert told(span(1, stage=stage, microbatch=7, instruction="f")) == [None]


def test_missing_attribute_is_no_instruction() -> None:
    assert (
        told(
            span(1, stage=2, microbatch=7),
            span(2, stage=2, instruction="f"),
            span(3, microbatch=7, instruction="f"),
            span(4),
        )
        == [None] * 4
    )


def test_first_report_of_a_service_counts() -> None:
    spans = (
        span(1, stage=0, microbatch=0, instruction="f"),
        span(2, pp__stage=1, pp__batch=1, pp__pass="b"),
    )
    assert told(*spans) == [ReportedInstruction(0, 0, "forward"), None]
    assert told(*spans, service="other") == [None, ReportedInstruction(1, 1, "backward")]
    assert told(*spans, reports=()) == [None, None]


REPLICATED = InstructionReport("gpt", "stage", "microbatch", "instruction", "replica")


@pytest.mark.parametrize(("value", "name"), [("dp-0", "dp-0"), (3, "3"), (0, "0")])
def test_replica_has_a_name(value: str | int, name: str) -> None:
    reported = told(
        span(1, stage=2, microbatch=7, instruction="f", replica=value), reports=(REPLICATED,)
    )
    assert reported == [ReportedInstruction(2, 7, "forward", name)]


@pytest.mark.parametrize("value", ["", True, 0.5, None])
def test_instruction_without_a_valid_replica_is_none(value: object) -> None:
    more = {} if value is None else {"replica": value}
    reported = told(span(1, stage=2, microbatch=7, instruction="f", **more), reports=(REPLICATED,))
    assert reported == [None]
