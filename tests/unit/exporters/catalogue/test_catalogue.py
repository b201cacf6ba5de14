"""The catalogue: names, labels, and the samples of a snapshot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from scripts import metrics_reference
from testbed.scrapes import full_host
from testbed.snapshots import CPU, GPU, MEMORY, account, busy_host, process

from wattspan.model import (
    Consumer,
    DevicePod,
    DomainAccount,
    EngineRow,
    Footprint,
    GapReason,
    HostRequests,
    HwType,
    Instant,
    Microjoules,
    PayerInfo,
    ProcessRow,
    Provenance,
    RatedEnergy,
    RateOrigin,
    Remainder,
    Snapshot,
)
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import (
    Instrument,
    Labels,
    bound_texts,
    counters,
    declarations,
    prometheus_name,
)

COUNTER, GAUGE, UPDOWN = Instrument.COUNTER, Instrument.GAUGE, Instrument.UPDOWN
METRICS = {metric.series: metric for metric in CATALOGUE}
ENERGY_OF_PROCESSES = "wattspan_process_energy_joules_total"


def drawn(series: str, snapshot: Snapshot) -> dict[Labels, int | float]:
    samples = list(METRICS[series].draw(snapshot))
    assert len(dict(samples)) == len(samples), f"{series}: a series twice"
    return dict(samples)


# -------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "unit", "instrument", "series"),
    [
        ("hw.energy", "J", COUNTER, "hw_energy_joules_total"),
        ("hw.power", "W", GAUGE, "hw_power_watts"),
        ("hw.host.energy", "J", COUNTER, "hw_host_energy_joules_total"),
        ("hw.host.power", "W", GAUGE, "hw_host_power_watts"),
        ("hw.gpu.utilization", "1", GAUGE, "hw_gpu_utilization_ratio"),
        ("hw.gpu.memory.usage", "By", UPDOWN, "hw_gpu_memory_usage_bytes"),
        ("hw.gpu.io", "By", COUNTER, "hw_gpu_io_bytes_total"),
        ("hw.cpu.speed", "Hz", GAUGE, "hw_cpu_speed_hertz"),
        ("process.cpu.time", "s", COUNTER, "process_cpu_time_seconds_total"),
        ("wattspan.process.energy", "J", COUNTER, "wattspan_process_energy_joules_total"),
        ("wattspan.group.energy", "J", COUNTER, "wattspan_group_energy_joules_total"),
        ("wattspan.idle.energy", "J", COUNTER, "wattspan_idle_energy_joules_total"),
        ("wattspan.unattributed.energy", "J", COUNTER, "wattspan_unattributed_energy_joules_total"),
        ("wattspan.power.limit", "W", GAUGE, "wattspan_power_limit_watts"),
        ("wattspan.source.up", "", GAUGE, "wattspan_source_up"),
        ("wattspan.spans", "{span}", COUNTER, "wattspan_spans_total"),
        ("wattspan.span.tokens", "{token}", COUNTER, "wattspan_span_tokens_total"),
        ("fs.read", "By/s", GAUGE, "fs_read_bytes_per_second"),
        ("rate", "1/s", GAUGE, "rate_per_second"),
        ("queue--length..now", "{item}", UPDOWN, "queue_length_now"),
        ("jobs.total", "", COUNTER, "jobs_total"),
        ("total.jobs", "", COUNTER, "jobs_total"),
        ("hit.ratio", "1", GAUGE, "hit_ratio"),
        ("share", "1", COUNTER, "share_total"),
        ("wait.seconds", "s", GAUGE, "wait_seconds"),
        ("2nd.try", "", GAUGE, "_2nd_try"),
        ("wind", "kn", GAUGE, "wind_kn"),
        ("wattspan.host.cost", "{currency}", COUNTER, "wattspan_host_cost_total"),
        ("wattspan.energy.price", "{currency}/kWh", GAUGE, "wattspan_energy_price_per_kwh"),
        (
            "wattspan.carbon.intensity",
            "g/kWh",
            GAUGE,
            "wattspan_carbon_intensity_grams_per_kwh",
        ),
    ],
)
def test_names_are_translated_as_opentelemetry_does(
    name: str, unit: str, instrument: Instrument, series: str
) -> None:
    assert prometheus_name(name, unit, instrument) == series


def test_only_two_times_have_names_of_their_own() -> None:
    own = {
        metric.name: metric.series
        for metric in CATALOGUE
        if metric.series != prometheus_name(metric.name, metric.unit, metric.instrument)
    }
    assert own == {
        "wattspan.gap.time": "wattspan_gap_seconds_total",
        "wattspan.span.time": "wattspan_span_seconds_total",
    }


@pytest.mark.parametrize(
    ("name", "series", "labels"),
    [
        ("hw.energy", "hw_energy_joules_total", "hw_id hw_type hw_name hw_parent provenance"),
        ("hw.power", "hw_power_watts", "hw_id hw_type hw_name hw_parent provenance"),
        ("hw.host.energy", "hw_host_energy_joules_total", "provenance"),
        (
            "wattspan.process.energy",
            "wattspan_process_energy_joules_total",
            "hw_type pid command group provenance",
        ),
        (
            "wattspan.group.energy",
            "wattspan_group_energy_joules_total",
            "hw_type group_kind group provenance",
        ),
        ("wattspan.idle.energy", "wattspan_idle_energy_joules_total", "hw_id hw_type provenance"),
        (
            "wattspan.unattributed.energy",
            "wattspan_unattributed_energy_joules_total",
            "hw_id hw_type provenance",
        ),
        ("wattspan.gap.time", "wattspan_gap_seconds_total", "hw_id reason"),
        ("wattspan.power.limit", "wattspan_power_limit_watts", "hw_id limit"),
        ("wattspan.source.up", "wattspan_source_up", "source"),
        ("wattspan.autotune.slowdown", "wattspan_autotune_slowdown_ratio", "job knob"),
        ("wattspan.autotune.slowdown.bound", "wattspan_autotune_slowdown_bound_ratio", "job knob"),
        ("wattspan.autotune.budget", "wattspan_autotune_budget_ratio", "job knob"),
        ("wattspan.autotune.saved", "wattspan_autotune_saved_joules_total", "job knob provenance"),
        (
            "wattspan.autotune.decisions",
            "wattspan_autotune_decisions_total",
            "job knob move reason",
        ),
        ("wattspan.capper.up", "wattspan_capper_up", ""),
        ("wattspan.host.cost", "wattspan_host_cost_total", "currency origin provenance"),
        ("wattspan.host.carbon", "wattspan_host_carbon_grams_total", "origin provenance"),
        ("wattspan.energy.price", "wattspan_energy_price_per_kwh", "currency origin"),
        ("wattspan.carbon.intensity", "wattspan_carbon_intensity_grams_per_kwh", "origin"),
        (
            "wattspan.unweighed.energy",
            "wattspan_unweighed_energy_joules_total",
            "footprint provenance",
        ),
    ],
)
def test_names_that_dashboards_rely_on_stay(name: str, series: str, labels: str) -> None:
    assert METRICS[series].name == name
    assert METRICS[series].labels == tuple(labels.split())


def test_metric_names_are_unique() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    assert len(METRICS) == len(CATALOGUE)
    assert declarations().keys() <= {metric.name for metric in CATALOGUE}


def test_every_metric_is_described() -> None:
    page = metrics_reference.page()
    for metric in CATALOGUE:
        assert re.fullmatch(r'[A-Z][^"\\\n]*\.', metric.help), metric.series
        assert set(metric.attributes) <= metrics_reference.ATTRIBUTES.keys(), metric.series
        assert f"`{metric.series}`" in page


def test_every_described_attribute_is_used() -> None:
    used = {attribute for metric in CATALOGUE for attribute in metric.attributes}
    assert metrics_reference.ATTRIBUTES.keys() == used


def test_energy_and_power_have_a_provenance_label() -> None:
    settings = {"wattspan.power.limit", "wattspan.cap.power", "wattspan.host.power.ceiling"}
    for metric in CATALOGUE:
        setting = metric.name.startswith("wattspan.fleet.") or metric.name in settings
        if metric.unit in ("J", "W") and not setting:
            assert "provenance" in metric.attributes, metric.series
            column = metric.attributes.index("provenance")
            said = {labels[column] for labels in drawn(metric.series, full_host())}
            assert said <= set(Provenance), metric.series


def test_every_metric_can_be_drawn() -> None:
    for metric in (one for each in CATALOGUE for one in counters(each)):
        samples = dict(metric.draw(full_host()))
        assert samples, metric.series
        assert {len(labels) for labels in samples} == {len(metric.attributes)}, metric.series
        assert all(isinstance(label, str) for labels in samples for label in labels)


def test_host_without_counters_has_no_energy() -> None:
    bare = Snapshot(Instant(0, 0), 0, "bare")
    energies = [metric.series for metric in CATALOGUE if metric.unit in ("J", "W")]
    assert {series: samples for series in energies if (samples := drawn(series, bare))} == {}


def test_cost_and_carbon_of_unknown_energy_are_absent() -> None:
    board = account("vgpu", GPU, "vGPU", None, (0, 0, 0))
    silent = replace(board, measured=False, silent=True)
    euros = RatedEnergy("EUR", RateOrigin.CONSTANT, 300_000_000)
    grams = RatedEnergy("g", RateOrigin.CONSTANT, 400 * 10**9)
    amounts = ("wattspan_host_cost_total", "wattspan_host_carbon_grams_total")

    def found(*domains: DomainAccount, paid: int = 0) -> list[int | float]:
        footprint = Footprint(replace(euros, total=paid), replace(grams, total=paid))
        host = Snapshot(Instant(0, 0), 0, "host", domains=domains, footprint=footprint)
        return [value for series in amounts for value in drawn(series, host).values()]

    assert found() == found(silent) == []
    assert found(board) == [0, 0], "its energy is known to be 0"
    assert found(silent, account("p", CPU, "p", 1.0, (1, 0, 0)), paid=5) == [5, 5]
    assert found(silent, paid=5) == [5, 5], "of an earlier run"


# ---------------------------------------------------------------------------------- inference


def test_energy_of_requests_is_a_histogram_of_all_requests() -> None:
    metric = METRICS["wattspan_gen_ai_request_energy_joules"]
    energy = drawn("wattspan_gen_ai_token_energy_joules_total", full_host())
    requests = drawn("wattspan_gen_ai_requests_total", full_host())
    ((_, one),) = metric.histogram.draw(full_host())

    assert bound_texts(metric)[:3] == ("0.1", "0.3", "1")
    assert bound_texts(metric)[-2:] == ("10000", "+Inf")
    assert (one.observations, one.total) == (sum(requests.values()), sum(energy.values()))
    assert [*one.up_to, one.observations] == sorted((*one.up_to, one.observations))


def test_histogram_is_three_counters() -> None:
    metric = METRICS["wattspan_gen_ai_request_energy_joules"]
    buckets, total, count = counters(metric)
    series = "wattspan_gen_ai_request_energy_joules"
    assert [one.series for one in (buckets, total, count)] == [
        f"{series}_bucket",
        f"{series}_sum",
        f"{series}_count",
    ]
    drawn_buckets = dict(buckets.draw(full_host()))
    ((labels, observations),) = count.draw(full_host())
    assert drawn_buckets[*labels, "+Inf"] == observations
    assert {names[:-1] for names in drawn_buckets} == {labels}
    assert (total.unit, buckets.labels[-1]) == ("J", "le")


def test_model_of_an_engine_with_several_has_tokens_and_no_energy() -> None:
    host = full_host()
    rows = (EngineRow("chat", "", "o"), EngineRow("chat", "a", "o", None, {"output": 5}))
    host = replace(host, spans=replace(host.spans, engines=rows))
    energy = drawn("wattspan_gen_ai_engine_energy_joules_total", host)
    assert [labels[1] for labels in energy] == [""]
    tokens = drawn("wattspan_gen_ai_engine_tokens_total", host)
    assert tokens == {("chat", "a", "o", "output"): 5}


def test_other_metric_is_no_histogram() -> None:
    metric = METRICS["hw_energy_joules_total"]
    assert counters(metric) == (metric,)


def test_energy_of_requests_on_the_host_is_the_sum_of_its_parts() -> None:
    parts = drawn("wattspan_gen_ai_host_energy_joules_total", full_host())
    metric = METRICS["wattspan_gen_ai_request_host_energy_joules"]
    ((labels, one),) = metric.histogram.draw(full_host())
    assert {key[3:] for key in parts} == {
        ("cpu", "measured"), ("gpu", "derived"), ("idle", "derived"), ("memory", "measured"),
    }  # fmt: skip
    assert (one.total, labels[-1]) == (sum(parts.values()), "derived")


def test_unknown_energy_of_the_host_has_no_series() -> None:
    host = full_host()
    spans = replace(
        host.spans,
        inference=[replace(row, host=HostRequests()) for row in host.spans.inference],
        inference_host_idle={},
        engines=[replace(row, host=HostRequests()) for row in host.spans.engines],
    )
    host = replace(host, spans=spans)
    for name, metric in METRICS.items():
        if "_host_" in name and "gen_ai" in name:
            assert not [*metric.draw(host)], name
            assert metric.histogram is None or not [*metric.histogram.draw(host)]


# ------------------------------------------------------------------------------------ domains


def test_sum_without_parents_counts_every_joule_once() -> None:
    energies = drawn("hw_energy_joules_total", full_host())
    cover = sum(value for labels, value in energies.items() if labels[3] == "")
    assert [cover] == list(drawn("hw_host_energy_joules_total", full_host()).values())


def test_energy_from_outside_the_cover_is_a_series_of_its_own() -> None:
    first, *rest = full_host().domains
    moved = replace(first, energy=Microjoules(first.energy + 5), uncounted=Microjoules(5))
    for in_cover in (True, False):
        place = replace(first.domain, in_cover=in_cover, resource=None)
        snapshot = replace(full_host(), domains=(replace(moved, domain=place), *rest))
        energies = drawn("hw_energy_joules_total", snapshot)
        series = {labels[3]: value for labels, value in energies.items() if labels[0] == place.id}
        assert series == {"": first.energy, "outside-cover": 5}
        cover = sum(value for labels, value in energies.items() if labels[3] == "")
        assert [cover] == list(drawn("hw_host_energy_joules_total", snapshot).values())
        idle = drawn("wattspan_idle_energy_joules_total", snapshot)
        assert place.id in {labels[0] for labels in idle}, "a counter has ended"


def test_contained_domain_names_its_enclosing_domain() -> None:
    parents = {labels[0]: labels[3] for labels in drawn("hw_power_watts", full_host())}
    parents |= {labels[0]: labels[3] for labels in drawn("hw_energy_joules_total", full_host())}
    assert parents["intel-rapl:0"] == ""
    assert parents["intel-rapl:0:0"] == "intel-rapl:0"
    assert parents["intel-rapl:2"] == "outside-cover"


def test_unknown_power_is_absent_and_so_is_a_sum_with_it() -> None:
    *known, last = full_host().domains
    snapshot = replace(full_host(), domains=(*known, replace(last, power=None)))
    assert "GPU-1" not in {labels[0] for labels in drawn("hw_power_watts", snapshot)}
    assert drawn("hw_host_power_watts", snapshot) == {}
    assert drawn("hw_host_power_watts", busy_host()) == {("measured",): 818_500}


def test_removed_domain_keeps_its_counter() -> None:
    snapshot = full_host()
    assert drawn("wattspan_domain_up", snapshot)["intel-rapl:0:1",] == 0
    assert "intel-rapl:0:1" in {labels[0] for labels in drawn("hw_energy_joules_total", snapshot)}


def test_sum_has_the_weakest_provenance_of_its_parts() -> None:
    (host,) = drawn("hw_host_energy_joules_total", full_host())
    assert host == ("derived",)
    emulated = account("GPU-9", GPU, "H100", 1.0, (1, 1, 1), Provenance.EMULATED)
    mixed = replace(full_host(), domains=(*full_host().domains, emulated))
    (host,) = drawn("hw_host_energy_joules_total", mixed)
    assert host == ("emulated",)


def test_counter_keeps_the_weakest_provenance_of_its_energy() -> None:
    """The power of now has that of now."""
    package, *others = busy_host().domains
    package = replace(package, origin=Provenance.DERIVED)
    snapshot = replace(busy_host(), domains=(package, *others))

    def label(series: str) -> str:
        return next(labels[-1] for labels in drawn(series, snapshot) if "intel-rapl:0" in labels)

    assert label("hw_energy_joules_total") == "derived"
    assert label("wattspan_idle_energy_joules_total") == "derived"
    assert [*drawn("hw_host_energy_joules_total", snapshot)] == [("derived",)]
    assert label("hw_power_watts") == "measured"
    assert [*drawn("hw_host_power_watts", snapshot)] == [("measured",)]


def test_hardware_type_without_declaration_uses_its_domains() -> None:
    rows = drawn(ENERGY_OF_PROCESSES, full_host())  # the snapshot says nothing of memory
    assert {labels[4] for labels in rows if labels[0] == MEMORY} == {"measured"}


def test_gap_counters_exist_for_every_reason_at_the_first_scrape() -> None:
    gaps = drawn("wattspan_gap_seconds_total", full_host())
    of_package = {labels[1]: ns for labels, ns in gaps.items() if labels[0] == "intel-rapl:0"}
    assert of_package == dict.fromkeys(GapReason, 0) | {"suspend": 3_600_000_000_001}


def test_domains_that_are_only_counted_have_no_idle_energy() -> None:
    attributed = {labels[0] for labels in drawn("wattspan_idle_energy_joules_total", full_host())}
    assert attributed == {"intel-rapl:0", "intel-rapl:0:1", "GPU-0", "GPU-1"}


# -------------------------------------------------------------------------- processes, groups


@pytest.mark.parametrize("hw_type", [CPU, GPU, MEMORY])
def test_rows_and_other_sum_to_the_charged_energy(hw_type: str) -> None:
    snapshot = full_host()
    rows = drawn(ENERGY_OF_PROCESSES, snapshot)
    charged = sum(a.consumers for a in snapshot.cover if a.domain.hw_type == hw_type)
    assert sum(uj for labels, uj in rows.items() if labels[0] == hw_type) == charged


def test_other_is_one_row_of_each_hardware_type() -> None:
    rows = drawn(ENERGY_OF_PROCESSES, full_host())
    other = {labels: uj for labels, uj in rows.items() if labels[2] == "other"}
    assert other == {
        ("cpu", "", "other", "", "measured"): 0,
        ("memory", "", "other", "", "measured"): 899_999_999,
    }


def test_two_cgroups_of_short_lived_work_are_two_series() -> None:
    rows = tuple(
        ProcessRow(PayerInfo(Remainder(cgroup), "short-lived"), {CPU: Microjoules(uj)}, {})
        for cgroup, uj in (("/a", 1), ("/b", 2))
    )
    snapshot = replace(full_host(), processes=rows, other={})
    commands = {labels[1:3]: uj for labels, uj in drawn(ENERGY_OF_PROCESSES, snapshot).items()}
    assert commands == {("", "short-lived /a"): 1, ("", "short-lived /b"): 2}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_reused_pid_belongs_to_the_newer_process(order: tuple[int, int]) -> None:
    lives = [
        ProcessRow(PayerInfo(Consumer(42, started), "sh"), {CPU: Microjoules(uj)}, {})
        for started, uj in ((100, 9_000_000), (200, 3))
    ]
    snapshot = replace(full_host(), processes=tuple(lives[i] for i in order), other={})
    assert list(drawn(ENERGY_OF_PROCESSES, snapshot).values()) == [3]


def test_reused_pid_with_another_command_is_another_series() -> None:
    rows = (process(42, "sh", "", {}, {CPU: 1}), process(42, "awk", "", {}, {CPU: 2}))
    snapshot = replace(full_host(), processes=rows, other={})
    assert len(drawn(ENERGY_OF_PROCESSES, snapshot)) == 2


# --------------------------------------------------------------------------------------- GPUs


def test_unsupported_gpu_field_is_absent() -> None:
    for metric in CATALOGUE:
        if metric.name.startswith(("hw.gpu.", "wattspan.gpu.")) and "info" not in metric.name:
            identities = {labels[0] for labels in drawn(metric.series, full_host())}
            assert identities == {"GPU-0"}, metric.series


def test_divergence_is_relative_to_the_counter() -> None:
    (divergence,) = drawn("wattspan_gpu_energy_divergence_ratio", full_host()).values()
    assert divergence == pytest.approx(-0.01)


def test_throttle_reason_that_ended_reads_zero() -> None:
    reasons = drawn("wattspan_gpu_throttling", full_host())
    assert reasons == {("GPU-0", "hw_thermal"): 0, ("GPU-0", "sw_power_cap"): 1}


def test_unreadable_throttle_reasons_are_absent() -> None:
    host = full_host()
    mute = replace(host, gpus=tuple(replace(gpu, throttling=None) for gpu in host.gpus))
    assert drawn("wattspan_gpu_throttling", mute) == {}


def test_failing_source_is_itself_a_figure() -> None:
    unreadable = drawn("wattspan_source_unreadable", full_host())
    assert {trouble: count for (_, trouble), count in unreadable.items() if count} == {"denied": 1}
    assert len(unreadable) == 6


def test_pod_of_a_device_is_found_by_uuid_and_by_pci_address_once() -> None:
    host = full_host()
    board, *others = (one for one in host.domains if one.domain.hw_type is HwType.GPU)
    board = replace(board, domain=replace(board.domain, pci="0000:c1:00.0"))
    ids = (board.domain.id.removeprefix("gpu:"), "0000:c1:00.0", "0000:ff:00.0", "GPU-absent")
    pods = tuple(DevicePod(one, "ml", "a", "main") for one in ids)
    snapshot = replace(host, domains=(board, *others), device_pods=pods)
    assert drawn("wattspan_device_pod_info", snapshot) == {(board.domain.id, "ml", "a", "main"): 1}


def test_pod_of_a_device_is_that_of_its_counted_domain() -> None:
    host = full_host()
    board, *others = (one for one in host.domains if one.domain.hw_type is HwType.GPU)
    board = replace(board, domain=replace(board.domain, pci="0000:03:00.0"))
    outside = replace(board.domain, id="hwmon:xe/pkg", in_cover=False, resource=None)
    part = replace(board, domain=outside)
    pods = (DevicePod("0000:03:00.0", "ml", "a", "main"),)
    snapshot = replace(host, domains=(board, part, *others), device_pods=pods)
    assert drawn("wattspan_device_pod_info", snapshot) == {(board.domain.id, "ml", "a", "main"): 1}
