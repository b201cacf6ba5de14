"""Names that processes, containers and spans give themselves, on their way into a scrape."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

from testbed.scrapes import full_host, parse

from fuzz.registry import target
from fuzz.supply import Supply
from wattspan.ingest.span_attributes import printable
from wattspan.model import (
    Consumer,
    Exemplar,
    HwType,
    Microjoules,
    PayerInfo,
    ProcessRow,
    SpanAccounts,
    SpanRow,
)
from wattspan.spans.aggregator import shortened_name
from wattspan.util.text import MAX_LABEL
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import sanitize
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

_JOULE = Microjoules(10**6)
_SERIES = ("wattspan_process_energy_joules_total", "wattspan_span_energy_joules_total")
_METRICS = [metric for metric in CATALOGUE if metric.series in _SERIES]
_HOST = replace(full_host(), groups=())
_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_KEPT = {9: " ", 10: " "}  # which the format escapes


def _harmless(shown: str) -> None:
    """The text cannot move a terminal's cursor, reverse reading direction, or fail to encode."""
    assert len(shown) <= 200
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown), shown
    assert not any(unicodedata.bidirectional(c) in _TURNING for c in shown), shown


@target(
    "labels",
    whose="any process, which chooses its name and those of its spans",
    holds="a scrape that Prometheus' own parser reads, with one series for each and the name in it",
    watched=("wattspan_exporters", "wattspan.spans"),
    samples=(
        b"\x07trainer\x04step",
        b'\x06a"\\\n{}\x05}=\r\xc2\x85',
        b"\x09\xff\xfe\xed\xa0\x80\xe2\x80\xa8",
    ),
    words=(b'"', b"\\", b"\n", b"# EOF", b"} 5 # {", b"\xe2\x80\xae", b"\0", b"\xed\xb2\x80"),
)
def labels(data: bytes) -> None:
    supply = Supply(data)
    raws = supply.chunk(), supply.chunk()
    first, second = (raw.decode("utf-8", "surrogateescape") for raw in raws)
    for name in (first, second):
        assert len(shortened_name(name)) <= MAX_LABEL
        _harmless(sanitize(name).translate(_KEPT))
    _harmless(printable(raws[0], 200))
    exemplar = Exemplar("ab" * 16, "cd" * 8, _JOULE, 10**18)
    energy = {HwType.CPU: _JOULE}
    snapshot = replace(
        _HOST,
        processes=(ProcessRow(PayerInfo(Consumer(5, 7), first, ()), energy, {}),),
        spans=SpanAccounts((SpanRow(first, second, energy, exemplars={HwType.CPU: exemplar}),)),
    )
    for form in ExpositionFormat:
        scrape = parse(Renderer(_METRICS).render(snapshot, form), form)
        spans = [dict(pairs) for name, pairs in scrape if name == _SERIES[1]]
        (found,) = spans
        assert found.get("service_name", "") == sanitize(first)
        assert found.get("span_name", "") == sanitize(second)
