"""Metrics of tuning and caps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from testbed.scrapes import full_host, parse, value
from testbed.snapshots import GPU, account
from testbed.tuned import TRACKED

from wattspan.model import (
    CapKey,
    CapperFigures,
    CapRow,
    DecisionReason,
    Knob,
    KnobState,
    Microjoules,
    Move,
    Provenance,
    Snapshot,
    TuningAccounts,
    TuningRow,
    TuningState,
)
from wattspan.util.text import MAX_JOB_NAME
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import Labels
from wattspan_exporters.catalogue.tuning import RELEASES, name_label
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

METRICS = {metric.series: metric for metric in CATALOGUE}
HELD, POWER = "trainer/train_step", Knob.GPU_POWER


def drawn(series: str, snapshot: Snapshot) -> dict[Labels, int | float]:
    samples = list(METRICS[series].draw(snapshot))
    assert len(dict(samples)) == len(samples), f"{series}: a series twice"
    return dict(samples)


def with_rows(*rows: TuningRow) -> Snapshot:
    return replace(full_host(), tuning=replace(full_host().tuning, rows=rows))


def with_caps(*caps: CapRow) -> Snapshot:
    return replace(full_host(), tuning=replace(full_host().tuning, caps=caps))


def held() -> TuningRow:
    return full_host().tuning.rows[0]


def test_log_records_are_counted_where_there_is_a_collector() -> None:
    told, nobody = full_host(), replace(full_host(), tuning=TuningAccounts("apply"))
    assert drawn("wattspan_logs_forwarded_total", told) == {(): 88}
    assert drawn("wattspan_logs_forward_drops_total", told) == {("queue_full",): 3}
    assert drawn("wattspan_logs_forwarded_total", nobody) == {}


# --------------------------------------------------------------------------------------- jobs


def test_held_job_has_budget_slowdown_and_bounds() -> None:
    scrape = parse(
        Renderer().render(full_host(), ExpositionFormat.OPENMETRICS), ExpositionFormat.OPENMETRICS
    )
    figures = {
        "budget_ratio": 0.05,
        "confidence_ratio": 0.95,
        "slowdown_ratio": 0.027,
        "slowdown_bound_ratio": 0.0391,
        "held_slowdown_ratio": 0.031,
        "held_slowdown_bound_ratio": 0.044,
        "saving_ratio": 0.182,
        "saved_joules_total": 900.000007,
        "saved_estimate_joules": 1250.000001,
        "exploration_seconds_total": 11.000000009,
        "lost_seconds": 40.0,
        "allowance_seconds": 81.0,
        "pairs": 46,
        "units_total": 5210,
        "commit_seconds": 412.0,
    }
    for name, figure in figures.items():
        assert value(scrape, f"wattspan_autotune_{name}", job=HELD, knob="gpu_power") == figure


def test_unknown_job_values_are_absent() -> None:
    (_, declined, _) = full_host().tuning.rows
    for name in ("slowdown_ratio", "slowdown_bound_ratio", "saving_ratio", "saved_estimate_joules",
                 "lost_seconds", "commit_seconds"):  # fmt: skip
        jobs = {labels[0] for labels in drawn(f"wattspan_autotune_{name}", full_host())}
        assert jobs == {HELD}, name
    assert declined.saved_low is None
    assert len(drawn("wattspan_autotune_saved_bound_joules", full_host())) == 2


def test_savings_interval_may_be_negative() -> None:
    bounds = drawn("wattspan_autotune_saved_bound_joules", full_host())
    assert bounds == {
        (HELD, POWER, "lower", "derived"): -4_000_000,
        (HELD, POWER, "upper", "derived"): 1_500_000_000,
    }
    text = Renderer().render(full_host(), ExpositionFormat.TEXT).decode()
    assert 'bound="lower",provenance="derived"} -4\n' in text


def test_saved_energy_is_the_lower_bound() -> None:
    unlucky = replace(held(), saved=Microjoules(-5), saved_low=Microjoules(-9))
    saved = drawn("wattspan_autotune_saved_joules_total", with_rows(unlucky))
    assert saved == {(HELD, POWER, "derived"): 900_000_007}


def test_job_is_in_one_state_and_every_other_is_zero() -> None:
    states = drawn("wattspan_autotune_state", with_rows(held()))
    assert states == {
        (HELD, POWER, state): int(state is TuningState.HOLDING) for state in TuningState
    }


def test_decisions_are_counted_by_action_and_reason() -> None:
    counts = drawn("wattspan_autotune_decisions_total", with_rows(held()))
    assert {labels[2:]: count for labels, count in counts.items() if count} == {
        (Move.PROBE, DecisionReason.SCREENING): 7,
        (Move.HOLD, DecisionReason.CERTIFIED): 2,
        (Move.RELEASE, DecisionReason.OVER_BUDGET): 1,
    }


def test_release_is_counted_from_zero_so_that_the_first_is_seen() -> None:
    fresh = replace(held(), decisions={})
    counts = drawn("wattspan_autotune_decisions_total", with_rows(fresh))
    assert counts == {(HELD, POWER, Move.RELEASE, reason): 0 for reason in RELEASES}


def test_current_decision_has_a_reason_label() -> None:
    told = drawn("wattspan_autotune_decision_info", full_host())
    assert {labels[2:] for labels in told} == {
        ("hold", "certified"),
        ("decline", "no_signal"),
        ("probe", "certifying"),
    }


def test_two_knobs_of_one_job_are_two_series_of_everything() -> None:
    both = with_rows(held(), replace(held(), knob=Knob.CPU_POWER))
    tuned = [metric for metric in CATALOGUE if "job" in metric.attributes]
    assert len(tuned) > 15
    for metric in tuned:
        alone = len(drawn(metric.series, with_rows(held())))
        assert len(drawn(metric.series, both)) == 2 * alone, metric.series


@pytest.mark.parametrize(
    "name", ["a\nb", "x\x1b[31m", "\u202eevil", "j" * 101, "é" * 5_000, "tab\t", "\ud800"]
)
def test_arbitrary_job_name_becomes_a_short_printable_label(name: str) -> None:
    fit = name_label(name)
    assert fit.isprintable()
    assert len(fit) <= MAX_JOB_NAME
    assert fit != name
    assert name_label(name + "!") != fit


@pytest.mark.parametrize("name", ["trainer/train_step", "日本", "", "j" * MAX_JOB_NAME])
def test_valid_job_name_is_kept_as_label(name: str) -> None:
    assert name_label(name) == name


def test_saved_energy_has_the_provenance_of_its_devices() -> None:
    emulated = account("GPU-9", GPU, "H100", 1.0, (1, 1, 1), Provenance.EMULATED)
    host = with_rows(replace(held(), devices=("GPU-0", "GPU-9")))
    host = replace(host, domains=(*host.domains, emulated))
    assert {labels[2] for labels in drawn("wattspan_autotune_saved_joules_total", host)} == {
        "emulated"
    }


def test_job_with_unknown_devices_has_the_provenance_of_its_actuator_kind() -> None:
    host = with_rows(replace(held(), devices=()), replace(held(), knob=Knob.CPU_POWER, devices=()))
    said = {labels[1]: labels[2] for labels in drawn("wattspan_autotune_saving_ratio", host)}
    assert said == {"gpu_power": "derived", "cpu_power": "measured"}


# --------------------------------------------------------------------------------------- caps


def test_cap_metric_is_the_minimum_of_lease_and_ceiling() -> None:
    key = CapKey(POWER, "GPU-0")
    low = CapRow(KnobState(key, ""), wanted=500_000, ceiling=400_000, holder="budget")
    only = CapRow(KnobState(key._replace(device="GPU-1"), ""), ceiling=300_000, holder="budget")
    assert drawn("wattspan_cap_power_watts", with_caps(low, only)) == {
        ("GPU-0", POWER, "budget"): 400_000,
        ("GPU-1", POWER, "budget"): 300_000,
    }


def test_clock_metric_is_in_hertz_and_power_in_watts() -> None:
    scrape = parse(Renderer().render(full_host(), ExpositionFormat.TEXT), ExpositionFormat.TEXT)
    assert value(scrape, "wattspan_cap_clock_hertz", hw_id="GPU-0", holder="operator") == 1.5e9
    assert value(scrape, "wattspan_cap_power_watts", hw_id="GPU-0") == 560
    assert value(scrape, "wattspan_clock_limit_hertz", hw_id="GPU-0", limit="maximum") == 1.98e9


def test_foreign_or_unsettable_limit_is_not_reported_as_held() -> None:
    state = KnobState(CapKey(POWER, "GPU-0"), "")
    foreign = CapRow(state, wanted=1, holder="job", foreign=True)
    locked = CapRow(state, wanted=1, holder="job", usable=False)
    for row in (foreign, locked, CapRow(state, wanted=1), CapRow(state, holder="job")):
        assert drawn("wattspan_cap_power_watts", with_caps(row)) == {}
    assert drawn("wattspan_cap_foreign", with_caps(foreign)) == {("GPU-0", POWER): 1}
    assert drawn("wattspan_cap_usable", with_caps(locked)) == {("GPU-0", POWER): 0}


def test_package_and_gpu_limits_and_originals_use_one_metric() -> None:
    limits = drawn("wattspan_power_limit_watts", full_host())
    assert {limit: mw for (device, limit), mw in limits.items() if device == "intel-rapl:0"} == {
        "original": 250_000,
        "minimum": 0,
        "default": 250_000,
        "maximum": 250_000,
        "requested": 180_000,
        "enforced": 180_000,
    }
    gpu = {limit: mw for (device, limit), mw in limits.items() if device == "GPU-0"}
    assert gpu["original"] == 700_000
    assert gpu["ceiling"] == 600_000
    assert gpu["requested"] == 650_000  # the GPU's own figure, once


def test_unconfigured_capper_has_no_series_and_a_lost_one_is_down() -> None:
    nobody = replace(full_host(), tuning=TuningAccounts())
    gone = replace(
        full_host(), tuning=TuningAccounts("apply", capper=CapperFigures(False, "", writes=3))
    )
    for series in ("wattspan_capper_up", "wattspan_capper_writes_total"):
        assert drawn(series, nobody) == {}
    assert drawn("wattspan_capper_up", gone) == {(): 0}
    assert drawn("wattspan_capper_writes_total", gone) == {(): 3}


def test_host_without_tuning_exports_only_the_mode() -> None:
    untuned = replace(full_host(), tuning=TuningAccounts())
    names = [metric.series for metric in CATALOGUE if ".autotune." in metric.name]
    assert [name for name in names if drawn(name, untuned)] == ["wattspan_autotune_mode_info"]
    assert drawn("wattspan_autotune_mode_info", untuned) == {("off",): 1}


def test_awkward_job_can_be_read_back_from_a_scrape() -> None:
    document = Renderer().render(full_host(), ExpositionFormat.OPENMETRICS).decode()
    families = openmetrics_parser.text_string_to_metric_families(document)
    jobs = {
        sample.labels["job"]
        for family in families
        for sample in family.samples
        if "job" in sample.labels
    }
    awkward = name_label(full_host().tuning.rows[1].job)
    assert jobs == {HELD, awkward, "llm/chat"}
    assert awkward.startswith('quo"te\\back\ufffdline')


# ------------------------------------------------------------------------------- load tracking


def test_tracked_job_has_its_load_and_misses_and_no_slowdown_budget() -> None:
    snapshot = with_rows(held(), TRACKED)
    labels = TRACKED.job, Knob.GPU_CLOCK
    misses = drawn("wattspan_autotune_slo_miss_ratio", snapshot)
    assert misses == {(*labels, "ttft_p99"): 0.005}  # no latency between tokens is known yet
    loads = drawn("wattspan_autotune_load_ratio", snapshot)
    assert loads == {labels: pytest.approx(1 / 2.8)}
    assert drawn("wattspan_autotune_budget_ratio", snapshot) == {(HELD, POWER): 0.05}


def test_tracked_job_has_its_requests_in_flight_and_the_end_of_its_load_bin() -> None:
    labels, snapshot = (TRACKED.job, Knob.GPU_CLOCK), with_rows(held(), TRACKED)
    assert drawn("wattspan_autotune_load_requests", snapshot) == {labels: TRACKED.load.load}
    assert drawn("wattspan_autotune_load_bin", snapshot) == {labels: TRACKED.load.bin_bound}


def test_original_setting_of_a_tracked_job_has_no_load_ratio() -> None:
    assert TRACKED.load is not None
    for headroom in (None, 0.0):
        load = replace(TRACKED.load, headroom=headroom)
        snapshot = with_rows(replace(TRACKED, load=load))
        assert drawn("wattspan_autotune_load_ratio", snapshot) == {}
