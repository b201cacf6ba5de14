"""Energy on spans, and nothing else about them changed."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from testbed.forwarding import joules, request, spans_in

from wattspan.inference.estimate import RequestEstimate
from wattspan.model import HwType, Microjoules, Provenance, StaticBasis
from wattspan.otlp.enrichment import EnergyAttributeEncoder, enrich, slice_spans
from wattspan.spans.values import Outcome, SpanEnergy

CPU, GPU, MEMORY = HwType.CPU, HwType.GPU, HwType.MEMORY
MEASURED = EnergyAttributeEncoder(dict.fromkeys(HwType, Provenance.MEASURED))


def told(span: Span) -> dict[str, object]:
    """The attributes of a span, by key; every key once."""
    values = {kv.key: getattr(kv.value, kv.value.WhichOneof("value")) for kv in span.attributes}
    assert len(values) == len(span.attributes)
    return values


def enriched(
    energy: SpanEnergy | None, attributes: EnergyAttributeEncoder = MEASURED
) -> dict[str, object]:
    (span,) = spans_in(enrich(request("a").SerializeToString(), [energy], attributes))
    return told(span)


def test_joules_are_added_by_kind_and_in_total():
    energy = joules(
        {CPU: 1_500_000, GPU: 250_000}, {CPU: 2_000_000, GPU: 1_000_000}, {CPU: 5, GPU: 7}
    )
    assert enriched(energy) == {
        "wattspan.energy.cpu.exclusive": 1.5,
        "wattspan.energy.cpu.inclusive": 2.0,
        "wattspan.energy.cpu.uncertainty": 5e-6,
        "wattspan.energy.gpu.exclusive": 0.25,
        "wattspan.energy.gpu.inclusive": 1.0,
        "wattspan.energy.gpu.uncertainty": 7e-6,
        "wattspan.energy.exclusive": 1.75,
        "wattspan.energy.inclusive": 3.0,
        "wattspan.energy.uncertainty": 12e-6,
        "wattspan.energy.coverage": 1.0,
        "wattspan.energy.outcome": "joined",
        "wattspan.energy.provenance": "measured",
    }


def test_kind_that_was_not_measured_is_absent_not_zero():
    assert not [key for key in enriched(joules({CPU: 1})) if "gpu" in key or "memory" in key]


def test_zero_joules_are_a_measurement():
    assert enriched(joules({CPU: 0}))["wattspan.energy.cpu.exclusive"] == 0.0


def test_partly_measured_span_has_its_coverage():
    told = enriched(joules({CPU: 1}, outcome=Outcome.PARTIAL, covered=250_000))
    assert told["wattspan.energy.coverage"] == 0.25
    assert told["wattspan.energy.outcome"] == "partial"


def test_span_without_energy_has_its_outcome_only():
    nothing = joules({}, outcome=Outcome.NO_ENERGY, covered=0)
    assert enriched(nothing) == {
        "wattspan.energy.coverage": 0.0,
        "wattspan.energy.outcome": "no_energy",
    }


def test_kind_with_inclusive_energy_only_has_no_exclusive_energy():
    told = enriched(joules({}, {CPU: 9}))
    assert "wattspan.energy.cpu.inclusive" in told
    assert "wattspan.energy.cpu.exclusive" not in told
    assert "wattspan.energy.exclusive" not in told


def test_span_of_unknown_energy_is_unchanged():
    assert enriched(None) == {}


def test_provenance_is_added_for_every_kind():
    mixed = EnergyAttributeEncoder(
        {CPU: Provenance.MEASURED, GPU: Provenance.DERIVED, MEMORY: Provenance.ESTIMATED}
    )
    told = enriched(joules({CPU: 1, GPU: 1, MEMORY: 1}), mixed)
    assert told["wattspan.energy.provenance"] == "estimated"
    assert told["wattspan.energy.gpu.provenance"] == "derived"
    assert told["wattspan.energy.memory.provenance"] == "estimated"
    assert "wattspan.energy.cpu.provenance" not in told
    assert enriched(joules({CPU: 1}), mixed)["wattspan.energy.provenance"] == "measured"


def test_emulated_energy_is_labelled_emulated():
    emulated = EnergyAttributeEncoder({CPU: Provenance.EMULATED})
    assert enriched(joules({CPU: 1}), emulated)["wattspan.energy.provenance"] == "emulated"


def test_replayed_span_has_its_energy_replaced_not_doubled():
    once = enrich(
        request("a").SerializeToString(), [joules({CPU: 1_000_000, GPU: 1_000_000})], MEASURED
    )
    (span,) = spans_in(enrich(once, [joules({CPU: 3_000_000})], MEASURED))
    assert told(span)["wattspan.energy.exclusive"] == 3.0
    assert not [key for key in told(span) if "gpu" in key]


def test_span_with_text_that_is_not_utf8_has_its_energy_replaced():
    once = enrich(request("café").SerializeToString(), [joules({CPU: 1_000_000})], MEASURED)
    invalid = once.replace("é".encode(), b"\xe9\xe9")

    twice = enrich(invalid, [joules({CPU: 3_000_000})], MEASURED)

    (span,) = spans_in(twice.replace(b"\xe9\xe9", "é".encode()))
    assert span.name == "café"
    assert told(span)["wattspan.energy.exclusive"] == 3.0


def test_energy_is_searched_in_the_first_span_attributes_only():
    message = request("a")
    (span,) = message.resource_spans[0].scope_spans[0].spans
    span.attributes.add(key="wattspan.energy.exclusive").value.double_value = 1.0
    for _ in range(1024):
        span.attributes.add()
    (after,) = spans_in(enrich(message.SerializeToString(), [joules({CPU: 1})], MEASURED))
    assert after.attributes[: len(span.attributes)] == span.attributes


def test_energy_of_another_agent_remains_without_our_own():
    there = ExportTraceServiceRequest.FromString(
        enrich(request("a").SerializeToString(), [joules({CPU: 1_000_000})], MEASURED)
    )
    assert enrich(there.SerializeToString(), [None], MEASURED) == there.SerializeToString()


def test_prefix_outside_of_attribute_keys_is_unchanged():
    message = request("a")
    (span,) = message.resource_spans[0].scope_spans[0].spans
    span.events.add(name="wattspan.energy.exclusive")
    (after,) = spans_in(enrich(message.SerializeToString(), [joules({CPU: 1})], MEASURED))
    assert after.events == span.events


def test_attributes_of_the_application_come_first_and_in_order():
    message = request("a")
    (span,) = message.resource_spans[0].scope_spans[0].spans
    for key in ("z", "a", "m"):
        span.attributes.add(key=key).value.int_value = 1
    span.dropped_attributes_count = 7
    (after,) = spans_in(enrich(message.SerializeToString(), [joules({CPU: 1})], MEASURED))
    assert [kv.key for kv in after.attributes][:3] == ["z", "a", "m"]
    assert after.dropped_attributes_count == 7


def test_energies_that_do_not_fit_the_spans_are_an_error():
    with pytest.raises(ValueError, match="1 energies of 2 spans"):
        enrich(request("a", "b").SerializeToString(), [None], MEASURED)
    with pytest.raises(ValueError, match="2 energies of 1 spans"):
        enrich(request("a").SerializeToString(), [None, None], MEASURED)


def test_part_of_a_request_keeps_its_order_and_resources():
    message = request("a", "b", service="one")
    message.resource_spans.extend(request("c", "d", "e", service="two").resource_spans)
    whole = message.SerializeToString()
    first = ExportTraceServiceRequest.FromString(slice_spans(whole, 0, 2))
    middle = ExportTraceServiceRequest.FromString(slice_spans(whole, 1, 4))
    assert first == request("a", "b", service="one")
    assert [span.name for span in spans_in(middle.SerializeToString())] == ["b", "c", "d"]
    assert len(middle.resource_spans) == 2


def test_span_from_time_without_a_baseline_has_its_quality():
    unknown = EnergyAttributeEncoder({CPU: Provenance.MEASURED}, {CPU: 1, MEMORY: 1})
    told = enriched(joules({CPU: 1, GPU: 1}), unknown)  # the span begins at 0
    assert told["wattspan.energy.quality"] == "baseline_unknown"
    assert told["wattspan.energy.cpu.quality"] == "baseline_unknown"
    assert not {"wattspan.energy.gpu.quality", "wattspan.energy.memory.quality"} & told.keys()
    known = EnergyAttributeEncoder({CPU: Provenance.MEASURED}, {CPU: 0})
    assert not [key for key in enriched(joules({CPU: 1}), known) if "quality" in key]


def test_estimated_request_has_its_provisional_energy() -> None:
    estimate = RequestEstimate(
        Microjoules(2_500_000), Microjoules(500_000), Microjoules(2_000_000), Microjoules(250_000)
    )
    body, known = request("a", "b", "c").SerializeToString(), joules({CPU: 1})
    energies = [known, known, None]

    first, second, third = spans_in(
        enrich(body, energies, MEASURED, {1: estimate, 2: estimate._replace(uncertainty=None)})
    )

    assert {key: value for key, value in told(second).items() if ".request" in key} == {
        "wattspan.energy.request": 2.5,
        "wattspan.energy.request.input": 0.5,
        "wattspan.energy.request.output": 2.0,
        "wattspan.energy.request.uncertainty": 0.25,
        "wattspan.energy.request.quality": "provisional",
    }
    assert not [key for key in told(first) if ".request" in key]
    assert not third.attributes


def test_uncertainty_of_a_request_is_absent_before_it_is_known() -> None:
    zero = Microjoules(0)
    body = request("a").SerializeToString()
    estimates = {0: RequestEstimate(zero, zero, zero, None)}

    (span,) = spans_in(enrich(body, [joules({CPU: 1})], MEASURED, estimates))

    assert told(span)["wattspan.energy.request"] == 0.0
    assert "wattspan.energy.request.uncertainty" not in told(span)


def test_static_part_has_its_basis():
    energy = joules({GPU: 3_000_000})._replace(
        static=Microjoules(1_250_000), basis=StaticBasis.FITTED
    )
    told = enriched(energy)
    assert told["wattspan.energy.static"] == 1.25
    assert told["wattspan.energy.static.basis"] == "fitted"
    assert told["wattspan.energy.exclusive"] == 3.0
    assert not [key for key in enriched(joules({GPU: 3})) if "static" in key]
