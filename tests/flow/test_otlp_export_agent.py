"""A whole agent on an emulated host: an OTLP sink receives the values of its /metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from pathlib import Path

from testbed.collector import HttpCollector, Reply
from testbed.live_host import LiveAgent
from testbed.otlp_sink import Key, Point, by_series, points, resource_of, total_seen
from testbed.scrapes import CATALOGUE_SERIES, Series, parse
from testbed.waiting import eventually

from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.prometheus.renderer import ExpositionFormat

LASTING = {metric.name for metric in CATALOGUE if metric.lasting} - {"wattspan.process.energy"}


def agent(collector: HttpCollector, state: Path, **settings: object) -> LiveAgent:
    return LiveAgent(
        "two-socket-h100",
        state,
        **{
            "exporters.otlp.endpoint": collector.url,
            "exporters.otlp.interval": "1s",
            "exporters.prometheus.listen": "127.0.0.1:0",
            **settings,
        },
    )


def scrape(live: LiveAgent) -> dict[Series, float]:
    (address,) = [each for each in live.agent.addresses if each.endswith("/metrics")]
    with urllib.request.urlopen(address, timeout=20) as answer:
        found = parse(answer.read(), ExpositionFormat.TEXT)
    return {series: value for series, value in found.items() if series[0] in CATALOGUE_SERIES}


def pushes(collector: HttpCollector) -> dict[int, list[Point]]:
    """The points of each push, by the time of its snapshot."""
    found: dict[int, list[Point]] = {}
    for point in points(*list(collector.metrics)):
        found.setdefault(point.time, []).append(point)
    return found


def at(scraped: Mapping[Series, float]) -> float:
    return scraped["wattspan_snapshot_time_seconds", frozenset()]


def test_sink_receives_the_values_of_metrics(tmp_path: Path) -> None:
    with HttpCollector() as collector, agent(collector, tmp_path) as live:
        live.host.start_jobs()
        scrapes: dict[float, dict[Series, float]] = {}

        def both() -> list[tuple[dict[Series, float], list[Point]]]:
            seen = scrape(live)
            scrapes[at(seen)] = seen
            received = pushes(collector)
            return [
                (scrapes[time / 1e9], found)
                for time, found in received.items()
                if time / 1e9 in scrapes
            ][2:3]

        ((scraped, received),) = eventually(both, "three snapshots that both have seen", 60)
    assert by_series(received) == scraped
    names = {point.name for point in received}
    assert {
        "hw.energy",
        "hw.host.energy",
        "wattspan.process.energy",
        "wattspan.idle.energy",
    } <= names
    assert live.log == []


def test_totals_and_their_start_times_survive_a_restart_of_the_agent(tmp_path: Path) -> None:
    runs: list[list[Point]] = []
    instances = set()
    for _ in range(2):
        with HttpCollector() as collector, agent(collector, tmp_path):
            eventually(lambda here=collector: len(here.metrics) >= 2, "two pushes", 60)
        runs.append(list(points(*collector.metrics)))
        instances |= {resource_of(each)["service.instance.id"] for each in collector.metrics}
    first, second = runs
    began = {point.key: point for point in first if point.name in LASTING}
    ended = {point.key: point for point in second if point.name in LASTING}
    assert len(began.keys() & ended.keys()) > 10
    for key in began.keys() & ended.keys():
        assert ended[key].start == began[key].start, key
        assert ended[key].value >= began[key].value, key
    counters: dict[Key, list[Point]] = {}
    for point in first + second:
        if point.kind == "counter":
            counters.setdefault(point.key, []).append(point)
    for of_one in counters.values():
        total_seen(of_one)  # asserts that streams never overlap, and never fall
    ticks = {point.start for run in (first, second) for point in run if "ticks" in point.name}
    assert len(ticks) == 2
    assert len(instances) == 1


def test_emulated_host_is_labelled_without_a_machine_id(tmp_path: Path) -> None:
    with HttpCollector() as collector, agent(collector, tmp_path):
        eventually(lambda: collector.metrics, "a push")
    resource = resource_of(collector.metrics[0])
    assert resource["wattspan.emulated"] is True
    assert resource["host.name"] == "emulated-two-socket-h100"
    assert "host.id" not in resource


def test_missing_receiver_is_visible_in_the_metrics(tmp_path: Path) -> None:
    with HttpCollector() as collector, agent(collector, tmp_path) as live:
        eventually(lambda: collector.metrics, "a push")
        collector.script(*[Reply(503)] * 100)
        down = {("wattspan_source_up", frozenset({("source", "otlp")})): 0.0}
        drops = ("wattspan_agent_exporter_drops_total", frozenset({("exporter", "otlp")}))
        eventually(lambda: down.items() <= scrape(live).items(), "the source is down", 60)
        eventually(lambda: scrape(live)[drops] > 0, "drops", 60)
