"""From a snapshot to a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from random import Random
from time import process_time

import pytest
from testbed.scrapes import CATALOGUE_SERIES, GOLDEN, full_host, parse, total, value
from testbed.snapshots import CPU, NOON, busy_host, process, serving_host

from wattspan.model import SECOND, AgentStats, Instant, Microjoules, ProcessRow, Snapshot
from wattspan.model.settings import Duration, Size
from wattspan.util.text import MAX_LABEL
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import Instrument, Metric, Sample, sanitize
from wattspan_exporters.catalogue.series import CACHE_SLACK
from wattspan_exporters.prometheus.exporter import SelfMetrics
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer, escape, format_number

formats = pytest.mark.parametrize(
    "form", list(ExpositionFormat), ids=lambda form: form.name.lower()
)


@formats
def test_golden_scrape(form: ExpositionFormat) -> None:
    written = GOLDEN[form].read_text(encoding="utf-8")
    hint = "meant? write it anew: python -m testbed.scrapes"
    assert Renderer().render(full_host(), form).decode() == written, hint


@formats
def test_parser_reads_every_metric_and_exact_values(form: ExpositionFormat) -> None:
    scrape = parse(Renderer().render(full_host(), form), form)
    assert {name for name, _ in scrape} == CATALOGUE_SERIES
    assert value(scrape, "hw_energy_joules_total", hw_id="intel-rapl:0") == 12421.123456
    assert value(scrape, "hw_gpu_memory_limit_bytes", hw_id="GPU-0") == 80 * 2**30
    assert value(scrape, "wattspan_agent_cpu_seconds_total") == 1.25


def test_text_and_openmetrics_have_equal_values() -> None:
    renderer = Renderer()
    text, openmetrics = (
        parse(renderer.render(full_host(), form), form) for form in ExpositionFormat
    )
    assert text == openmetrics


@formats
def test_cover_adds_up_in_the_scrape(form: ExpositionFormat) -> None:
    scrape = parse(Renderer().render(full_host(), form), form)
    cover = total(scrape, "hw_energy_joules_total", hw_parent="")
    assert cover == pytest.approx(value(scrape, "hw_host_energy_joules_total"), abs=1e-7)


def test_openmetrics_declares_units_and_ends() -> None:
    lines = Renderer().render(full_host(), ExpositionFormat.OPENMETRICS).decode().splitlines()
    assert "# TYPE hw_energy_joules counter" in lines
    assert "# UNIT hw_energy_joules joules" in lines
    assert "# UNIT hw_gpu_utilization_ratio ratio" in lines
    assert "# TYPE wattspan_domain info" in lines
    assert lines[-1] == "# EOF"


def test_text_format_has_neither_units_nor_an_end() -> None:
    text = Renderer().render(full_host(), ExpositionFormat.TEXT).decode()
    assert "# UNIT" not in text
    assert "# EOF" not in text
    assert "# TYPE hw_energy_joules_total counter" in text
    assert "# TYPE wattspan_domain_info gauge" in text


@formats
def test_exporter_self_metrics_follow_the_catalogue(form: ExpositionFormat) -> None:
    itself = SelfMetrics("1.2.3")
    renderer = Renderer((*CATALOGUE, *itself.metrics))
    document = renderer.render(full_host(), form, itself.render(form))
    scrape = parse(document, form)
    assert value(scrape, "wattspan_build_info", version="1.2.3") == 1
    assert value(scrape, "process_resident_memory_bytes") > 0
    own = {metric.series for metric in itself.metrics}
    assert not own & {metric.series for metric in CATALOGUE}


@pytest.mark.parametrize("quantity", [Duration(SECOND), Duration(100 * 10**6), Size(1 << 30)])
def test_quantity_of_the_configuration_is_drawn_as_a_number(quantity: int) -> None:
    stats = AgentStats(Instant(0, NOON), interval=quantity, rss_bytes=quantity)
    snapshot = replace(full_host(), stats=stats)
    scrape = parse(Renderer().render(snapshot, ExpositionFormat.TEXT), ExpositionFormat.TEXT)
    assert value(scrape, "wattspan_agent_interval_seconds") == quantity / SECOND
    assert value(scrape, "wattspan_agent_resident_memory_bytes") == quantity


def test_metrics_of_the_process_are_read_every_five_seconds() -> None:
    itself = SelfMetrics("1.2.3")

    def cpu_seconds(at: int) -> float:
        text = itself.render(ExpositionFormat.TEXT, at)
        return value(parse(text.encode(), ExpositionFormat.TEXT), "process_cpu_seconds_total")

    first = cpu_seconds(SECOND)
    while process_time() < first + 0.02:
        pass
    assert cpu_seconds(6 * SECOND - 1) == first
    assert cpu_seconds(6 * SECOND) > first


def test_empty_snapshot_is_still_a_valid_scrape() -> None:
    bare = Snapshot(Instant(0, 0), 0, "")
    scrape = parse(
        Renderer().render(bare, ExpositionFormat.OPENMETRICS), ExpositionFormat.OPENMETRICS
    )
    assert "wattspan_agent_ticks_total" in {name for name, _ in scrape}


def test_series_drawn_twice_is_written_once() -> None:
    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        yield ("a",), 1
        yield ("b",), 2
        yield ("a",), 3

    metric = Metric("x", Instrument.GAUGE, "", "Help.", ("l",), draw)
    scrape = parse(
        Renderer([metric]).render(full_host(), ExpositionFormat.TEXT), ExpositionFormat.TEXT
    )
    assert sorted(scrape.values()) == [1, 2]


@pytest.mark.parametrize(("unit", "written"), [("", "+Inf"), ("W", "+Inf"), ("1", "+Inf")])
def test_infinite_figure_of_any_unit_is_written_as_such(unit: str, written: str) -> None:
    def draw(_snapshot: Snapshot) -> Iterator[Sample]:
        yield (), float("inf")

    metric = Metric("test.figure", Instrument.GAUGE, unit, "A figure.", (), draw)
    scrape = Renderer([metric]).render(full_host(), ExpositionFormat.TEXT).decode()
    assert scrape.endswith(f" {written}\n")


def test_cached_lines_follow_the_processes() -> None:
    renderer = Renderer()
    sizes = []
    for generation in range(40):
        rows = tuple(process(1000 * generation + n, "sh", "", {}, {CPU: n}) for n in range(100))
        renderer.render(replace(full_host(), processes=rows), ExpositionFormat.TEXT)
        sizes.append(renderer.kept)
    fixed = Renderer()
    fixed.render(replace(full_host(), processes=()), ExpositionFormat.TEXT)
    assert max(sizes) <= fixed.kept + 2 * 102 + CACHE_SLACK


def test_reused_renderer_output_equals_a_new_one() -> None:
    renderer = Renderer()
    row = full_host().processes[0]
    for joules in (1, 2, 3):
        grown = ProcessRow(row.info, {CPU: Microjoules(joules * 10**6 + 1)}, {})
        snapshot = replace(full_host(), processes=(grown,))
        used = renderer.render(snapshot, ExpositionFormat.TEXT)
        assert used == Renderer().render(snapshot, ExpositionFormat.TEXT)


@formats
def test_kept_text_equals_a_new_one_after_changes_of_any_field(form: ExpositionFormat) -> None:
    chosen = Random(37)
    hosts = [full_host(), busy_host(), serving_host(), Snapshot(Instant(0, NOON), 0, "node7")]
    renderer, shown = Renderer(), hosts[0]
    for _ in range(120):
        for field in chosen.sample(fields(Snapshot), 2):
            part = getattr(chosen.choice(hosts), field.name)
            if field.name == "stats":  # one of its fields alone
                (name,) = (one.name for one in chosen.sample(fields(AgentStats), 1))
                part = replace(shown.stats, **{name: getattr(part, name)})
            elif field.name in ("domains", "health", "gpus") and len(part) == len(
                before := getattr(shown, field.name)
            ):
                kept = chosen.randrange(len(part) + 1)  # some rows change
                part = (*before[:kept], *part[kept:])
            shown = replace(shown, **{field.name: part})
        assert renderer.render(shown, form) == Renderer().render(shown, form)


def test_metric_is_drawn_again_only_after_a_change_of_what_it_reads() -> None:
    drawn: list[int] = []

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        drawn.append(snapshot.stats.processes)
        yield (str(snapshot.emulated),), snapshot.stats.processes

    renderer = Renderer([Metric("x", Instrument.GAUGE, "", "Help.", ("emulated",), draw)])
    host = full_host()
    louder = tuple(replace(one, energy=Microjoules(one.energy + 1)) for one in host.domains)
    for snapshot in (
        host,
        replace(host, sequence=8),
        replace(host, domains=louder, stats=replace(host.stats, ticks=11)),
        replace(host, stats=replace(host.stats, processes=1)),
        replace(host, domains=host.domains[1:], stats=replace(host.stats, processes=1)),
    ):
        renderer.render(snapshot, ExpositionFormat.TEXT)
    assert drawn == [412, 1, 1]


# --------------------------------------------------------------------------- values and labels


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (123_456_789, 6, "123.456789"),
        (0, 6, "0"),
        (1, 6, "0.000001"),
        (999_999, 6, "0.999999"),
        (5_000_000, 6, "5"),
        (-1_500, 3, "-1.500"),
        (2**63 * 10**6 + 1, 6, "9223372036854775808.000001"),
        (42, 0, "42"),
        (-3, 0, "-3"),
        (0.25, 0, "0.25"),
        (1e-9, 0, "1e-09"),
        (float("nan"), 0, "NaN"),
        (float("inf"), 0, "+Inf"),
        (float("-inf"), 0, "-Inf"),
    ],
)
def test_numbers_are_written_exactly(value: float, decimals: int, text: str) -> None:
    assert format_number(value, decimals) == text


@pytest.mark.parametrize("label", ["", "python", "ünïcode ✓", "two\nlines\tand a tab", "x" * 128])
def test_ordinary_label_is_unchanged(label: str) -> None:
    assert sanitize(label) == label


@pytest.mark.parametrize("label", ["x" * 129, "a\x1b[31mred", "nul\0", "\udcff not UTF-8", "\x9b"])
def test_invalid_label_is_sanitised_and_marked(label: str) -> None:
    fit = sanitize(label)
    assert fit.encode().decode().isprintable()
    assert len(fit) <= MAX_LABEL
    assert fit[-9] == "~"


def test_two_unfit_labels_stay_two() -> None:
    assert sanitize("x" * 200 + "a") != sanitize("x" * 200 + "b")
    assert sanitize("a\x01") != sanitize("a\x02")


def test_label_values_are_escaped() -> None:
    assert escape('a"b\\c\nd') == r"a\"b\\c\nd"
