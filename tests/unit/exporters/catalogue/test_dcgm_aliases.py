"""DCGM's names, for dashboards that exist."""

import re
from dataclasses import replace

import pytest
from testbed.exporting import serving
from testbed.requirements import ROOT
from testbed.scrapes import GOLDEN, Series, full_host, parse, value
from testbed.snapshots import GPU

from wattspan.model import (
    Domain,
    DomainAccount,
    GpuStatus,
    HwType,
    Microjoules,
    Milliwatts,
    Provenance,
    Snapshot,
)
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.gpu import DCGM
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

POWER, ENERGY = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"


def board(
    index: int, provenance: Provenance = Provenance.MEASURED, **known: object
) -> tuple[DomainAccount, GpuStatus]:
    uuid = f"gpu:GPU-{index}{index}"
    domain = Domain(uuid, GPU, f"H100 {index}", "nvml", provenance, resource=uuid)
    at = full_host().at
    status = replace(GpuStatus(uuid, at, index=index, model="NVIDIA H100"), **known)  # type: ignore[arg-type]
    return DomainAccount(domain, energy=Microjoules(90_520_000_999)), status


def host(*boards: tuple[DomainAccount, GpuStatus]) -> Snapshot:
    accounts, statuses = zip(*boards, strict=True)
    return replace(full_host(), domains=tuple(accounts), gpus=tuple(statuses))


def aliases(snapshot: Snapshot, form: ExpositionFormat = ExpositionFormat.TEXT) -> str:
    return Renderer(DCGM).render(snapshot, form).decode()


def series(snapshot: Snapshot) -> dict[Series, float]:
    """According to OpenMetrics: of its text, prometheus-client's parser changes the names of
    counters."""
    return parse(
        aliases(snapshot, ExpositionFormat.OPENMETRICS).encode(), ExpositionFormat.OPENMETRICS
    )


def test_power_is_in_watts_and_energy_in_millijoules_with_dcgms_labels() -> None:
    found = series(host(board(0, power_average=Milliwatts(611_500))))
    labels = {
        "gpu": "0", "UUID": "GPU-00", "device": "nvidia0", "modelName": "NVIDIA H100",
        "Hostname": "node7", "hostname": "node7", "provenance": "measured",
    }  # fmt: skip
    assert {name: dict(pairs) for name, pairs in found} == {POWER: labels, ENERGY: labels}
    assert value(found, POWER) == 611.5
    assert value(found, ENERGY) == 90_520_000


@pytest.mark.parametrize(
    ("name", "known", "told"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", {"temperature_celsius": 61}, 61),
        ("DCGM_FI_DEV_GPU_UTIL", {"utilisation": 0.57}, 57),
        ("DCGM_FI_DEV_MEM_COPY_UTIL", {"memory_utilisation": 0.29}, 29),
        ("DCGM_FI_DEV_FB_USED", {"memory_used": 63 * 2**30 + 2**20 - 1}, 64_512),
        ("DCGM_FI_DEV_FB_FREE", {"memory_used": 63 * 2**30, "memory_total": 80 * 2**30}, 17_408),
        ("DCGM_FI_DEV_SM_CLOCK", {"sm_clock_hz": 1_755_000_000}, 1_755),
        ("DCGM_FI_DEV_MEM_CLOCK", {"memory_clock_hz": 2_619_000_000}, 2_619),
    ],
)
def test_gauges_are_in_the_units_of_dcgms_exporter(
    name: str, known: dict[str, object], told: int
) -> None:
    """Degrees, percent, MiB and MHz, with the labels that power has."""
    snapshot = host(board(0, power_average=Milliwatts(1), **known))
    found = series(snapshot)
    assert value(found, name) == told
    assert {labels for of, labels in found if of == name} == {
        labels for of, labels in found if of == POWER
    }
    (line,) = (each for each in aliases(snapshot).splitlines() if each.startswith(f"{name}{{"))
    assert line.endswith(f"}} {told}")


def test_partially_known_memory_has_no_free_value() -> None:
    found = series(host(board(0, memory_used=2**30), board(1, memory_total=2**30)))
    assert "DCGM_FI_DEV_FB_FREE" not in {name for name, _ in found}


@pytest.mark.parametrize("asked", ["DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_FB_FREE"])
def test_variables_of_the_nvidia_dashboard_name_every_gpu(asked: str) -> None:
    """Queries of dashboard 12239: label_values(..., Hostname) and label_values(..., gpu)."""
    known = {"temperature_celsius": 40, "memory_used": 0, "memory_total": 2**30}
    found = series(host(board(0, **known), board(1, **known)))
    chosen = [dict(labels) for name, labels in found if name == asked]
    assert {(each["Hostname"], each["gpu"]) for each in chosen} == {("node7", "0"), ("node7", "1")}


def test_how_to_lists_exactly_the_served_metrics() -> None:
    page = (ROOT / "docs" / "how-to" / "dcgm-names.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(DCGM_[A-Z_]+)` \|", page, re.MULTILINE)
    assert listed == [metric.series for metric in DCGM]


def test_types_are_those_of_dcgms_exporter() -> None:
    text = aliases(host(board(0, power_average=Milliwatts(1))))
    assert f"# TYPE {POWER} gauge" in text
    assert f"# TYPE {ENERGY} counter" in text
    assert f"\n{ENERGY}{{gpu=" in text


def test_openmetrics_can_be_parsed_with_a_counter_that_does_not_end_in_total() -> None:
    document = aliases(host(board(0, power_average=Milliwatts(1))), ExpositionFormat.OPENMETRICS)
    assert value(parse(document.encode(), ExpositionFormat.OPENMETRICS), ENERGY) == 90_520_000
    assert "# UNIT" not in document


def test_average_power_is_preferred_to_instant_power() -> None:
    both = host(board(0, power_average=Milliwatts(1000), power_instant=Milliwatts(2000)))
    late = host(board(0, power_instant=Milliwatts(2000)))
    assert value(series(both), POWER) == 1
    assert value(series(late), POWER) == 2


def test_unknown_figures_have_no_series_and_no_sentinel() -> None:
    snapshot = host(board(0), board(1, power_average=Milliwatts(5)))
    found = series(snapshot)
    assert [dict(pairs)["gpu"] for name, pairs in found if name == POWER] == ["1"]


def test_removed_gpu_has_no_power_and_keeps_its_energy() -> None:
    account, status = board(0, power_average=Milliwatts(5), temperature_celsius=40)
    found = series(host((replace(account, present=False), status)))
    assert [name for name, _ in found] == [ENERGY]


def test_board_split_by_mig_is_one_series() -> None:
    account, status = board(0, mig=True, power_average=Milliwatts(300_000), utilisation=0.5)
    part = replace(
        account.domain, id="MIG-1", in_cover=False, parent=account.domain.id, resource=None
    )
    snapshot = host((account, status), (DomainAccount(part), replace(status, domain_id="MIG-1")))
    found = series(snapshot)
    assert sorted(name for name, _ in found) == ["DCGM_FI_DEV_GPU_UTIL", POWER, ENERGY]


def test_emulated_gpu_is_labelled() -> None:
    snapshot = host(board(0, Provenance.EMULATED, power_average=Milliwatts(5)))
    labels = [dict(pairs) for _, pairs in series(snapshot)]
    assert {each["provenance"] for each in labels} == {"emulated"}


def test_other_hardware_has_no_gpu_metrics() -> None:
    snapshot = replace(full_host(), gpus=(GpuStatus("intel-rapl:0", full_host().at),))
    assert {a.domain.hw_type for a in snapshot.domains} > {HwType.GPU}
    assert aliases(snapshot) == ""


def test_hostile_host_name_stays_in_its_labels() -> None:
    snapshot = replace(host(board(0)), host='a"b\\\nc')
    assert len(series(snapshot)) == 1


def test_alias_hides_no_metric_of_the_catalogue() -> None:
    assert not {m.series for m in DCGM} & {m.series for m in CATALOGUE}


@pytest.mark.parametrize("form", list(ExpositionFormat))
def test_scrape_is_unchanged_without_the_dcgm_setting(form: ExpositionFormat) -> None:
    golden = GOLDEN[form].read_bytes().removesuffix(b"# EOF\n")
    with serving(exemplars="all") as served:
        body = served.ask(Accept=form.value).body
    assert body.startswith(golden)
    assert b"DCGM" not in body


def test_dcgm_metrics_are_added_to_our_own() -> None:
    with serving(aliases=["dcgm"]) as served:
        served.snapshot = host(board(3, power_average=Milliwatts(70_000)))
        found = parse(served.ask().body, ExpositionFormat.TEXT)
    assert value(found, POWER, gpu="3") == 70
    assert value(found, "hw_energy_joules_total", hw_id="gpu:GPU-33") == 90_520.000999
