"""Spans, from the join's results to a real Prometheus: joules a token, and the way to a trace."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.exporting import serving
from testbed.joined_spans import CPU, GPU, joined
from testbed.prometheus_server import scraping
from testbed.requirements import ROOT
from testbed.snapshots import busy_host
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import Instant, Snapshot
from wattspan.spans.aggregator import SpanAggregator
from wattspan.spans.values import SpanEnergy

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_prometheus]

PER_TOKEN = (
    "sum by (service_name, span_name) (increase(wattspan_span_energy_joules_total[1h])) / "
    "sum by (service_name, span_name) "
    '(increase(wattspan_span_tokens_total{direction="output"}[1h]))'
)


def told_of(page: str) -> list[str]:
    """The queries in the tables of a guide."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    found = re.findall(r"^\| .* \| `(.*)` \|$", text, re.MULTILINE)
    assert len(found) >= 5
    return found


def ended_now(result: SpanEnergy, now: Instant) -> SpanEnergy:
    return result._replace(span=result.span._replace(start=now.mono - 10**9, end=now.mono))


def test_real_prometheus_has_joules_per_token_and_exemplars(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    clock = SystemClock()
    totals = SpanAggregator(10)

    def spend(requests: int, most: int) -> SpanEnergy:
        """Each request takes 3 J of the GPU, 1 J of the CPU and makes 16 tokens; one takes more.

        It takes ``most`` J of the GPU.
        """
        now = clock.now()
        chat = joined("chat", {CPU: 10**6, GPU: 3 * 10**6}, service="llm", tokens=(100, 16))
        tokens = 4 * (most + 1)  # for a quarter of a joule each, as the others
        gpu = {CPU: 10**6, GPU: most * 10**6}
        heavy = joined("chat", gpu, service="llm", tokens=(100, tokens))
        results = [ended_now(one, now) for one in (*[chat] * (requests - 1), heavy)]
        totals.add(results, now)
        return results[-1]

    def snapshot() -> Snapshot:
        return replace(busy_host(), spans=totals.accounts())

    spend(2, most=4)
    with serving(clock, exemplars="all") as served:
        served.snapshot = snapshot()
        job = {
            "job_name": "wattspan",
            "static_configs": [{"targets": [f"127.0.0.1:{served.port}"]}],
        }
        features = ["exemplar-storage"]
        with scraping(tmp_path, free_port(), [job], features=features) as prometheus:
            heavy = spend(500, most=5)
            served.snapshot = snapshot()
            joules = 'wattspan_span_energy_joules_total{span_name="chat", hw_type="gpu"}'
            eventually(
                lambda: prometheus.query(joules, "service_name") == {"llm": "1509"},
                "the spans are scraped",
                within=30,
            )
            for query in told_of("see-spans.md"):
                assert prometheus.get("query", query=query)["resultType"] == "vector"
            per_token = prometheus.query(PER_TOKEN, "span_name")
            assert float(per_token["chat"]) == pytest.approx(
                (499 * 4 + 6) / (499 * 16 + 24), rel=1e-9
            )
            found = prometheus.get(
                "query_exemplars",
                query="wattspan_span_energy_joules_total",
                start=str(time.time() - 600),
                end=str(time.time() + 600),
            )
    told = {
        (one["seriesLabels"]["hw_type"], exemplar["labels"]["span_id"]): exemplar
        for one in found
        for exemplar in one["exemplars"]
    }
    exemplar = told["gpu", heavy.span.id.hex()]
    assert exemplar["labels"]["trace_id"] == heavy.span.trace.hex()
    assert float(exemplar["value"]) == 5.0
    assert abs(exemplar["timestamp"] - time.time()) < 300
