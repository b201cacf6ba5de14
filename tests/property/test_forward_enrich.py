"""For any request, enrichment adds energy attributes and changes nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from testbed.forwarding import joules, spans_in

from wattspan.model import HwType, Provenance
from wattspan.otlp.enrichment import ATTRIBUTE_PREFIX, EnergyAttributeEncoder, enrich, slice_spans
from wattspan.spans.values import Outcome

small = st.integers(0, 2**31)
texts = st.text(max_size=8)
# Field 3999 is unknown: a sender newer than our schema.
unknown = st.sampled_from([b"", b"\xf8\xf9\x01\x05", b"\xfa\xf9\x01\x02hi"])
energies = st.none() | st.builds(
    joules,
    st.dictionaries(st.sampled_from(HwType), small),
    st.dictionaries(st.sampled_from(HwType), small),
    outcome=st.sampled_from(Outcome),
    covered=st.integers(0, 10**6),
)


@st.composite
def requests(draw: st.DrawFn) -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    for _ in range(draw(st.integers(0, 3))):
        resource = message.resource_spans.add(schema_url=draw(texts))
        if draw(st.booleans()):
            resource.resource.dropped_attributes_count = draw(small)
        for _ in range(draw(st.integers(0, 3))):
            scope = resource.scope_spans.add(schema_url=draw(texts))
            scope.scope.name = draw(texts)
            for _ in range(draw(st.integers(0, 3))):
                span = scope.spans.add(
                    name=draw(texts), span_id=draw(st.binary(max_size=8)), flags=draw(small)
                )
                for _ in range(draw(st.integers(0, 3))):
                    span.attributes.add(key=draw(texts)).value.string_value = draw(texts)
                span.events.add(name=draw(texts))
                span.MergeFromString(draw(unknown))
            scope.MergeFromString(draw(unknown))
        resource.MergeFromString(draw(unknown))
    message.MergeFromString(draw(unknown))
    return message


@given(requests(), st.data())
def test_enrichment_changes_only_energy_attributes(
    message: ExportTraceServiceRequest, data: st.DataObject
):
    before = message.SerializeToString()
    count = len(spans_in(before))
    drawn = data.draw(st.lists(energies, min_size=count, max_size=count))
    attributes = EnergyAttributeEncoder({HwType.CPU: Provenance.ESTIMATED})
    after = ExportTraceServiceRequest.FromString(enrich(before, drawn, attributes))

    assert message.SerializeToString() == before, "the message itself is not touched"
    for resource in after.resource_spans:
        for scope in resource.scope_spans:
            for span, energy in zip(scope.spans, drawn, strict=False):
                added = [kv for kv in span.attributes if kv.key.startswith(ATTRIBUTE_PREFIX)]
                assert bool(added) == (energy is not None)
                del span.attributes[len(span.attributes) - len(added) :]
            drawn = drawn[len(scope.spans) :]
    assert after.SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )


@given(requests(), st.integers(0, 30))
def test_parts_are_the_whole(message: ExportTraceServiceRequest, where: int):
    whole = message.SerializeToString()
    spans = spans_in(whole)
    where = min(where, len(spans))
    first, second = slice_spans(whole, 0, where), slice_spans(whole, where, len(spans))
    assert (spans_in(first), spans_in(second)) == (spans[:where], spans[where:])
