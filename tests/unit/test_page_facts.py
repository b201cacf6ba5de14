"""What the live page is told."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from support.scrapes import full_host
from support.snapshots import busy_host, serving_host
from wattspan.model import (
    AgentStats,
    Decision,
    DecisionReason,
    Footprint,
    Instant,
    Knob,
    Microjoules,
    Milliwatts,
    Move,
    RatedEnergy,
    RateOrigin,
    Snapshot,
    TuningAccounts,
    TuningRow,
    TuningState,
)
from wattspan_exporters.page import document
from wattspan_exporters.page.document_builder import build_document
from wattspan_exporters.page.history import PageHistory

REFERENCE = Path(__file__).parents[2] / "docs/reference/page.md"


def told(snapshot: Snapshot, memory: PageHistory | None = None, age: int = 0) -> dict[str, Any]:
    body = build_document(snapshot, memory or PageHistory(), "1.2.3", age)
    msgspec.json.decode(body, type=document.LiveDocument, strict=True)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no number")

    answer: dict[str, Any] = json.loads(body, parse_constant=refuse)
    return answer


@pytest.mark.parametrize("snapshot", [full_host(), busy_host(), serving_host()])
def test_everything_is_as_it_is_declared(snapshot: Snapshot) -> None:
    facts = told(snapshot, age=400_000_000)
    assert facts["host"] == snapshot.host
    assert facts["at"] == round(snapshot.at.wall / 1e9, 3)
    assert facts["age"] == 0.4
    assert facts["version"] == "1.2.3"


def test_a_bare_host_says_that_nothing_is_known() -> None:
    facts = told(Snapshot(Instant(0, 0), 0, ""))
    empty = {"seconds": 0.0, "joules": 0.0, "watts": None, "nodes": [], "links": []}
    assert facts["now"] == empty
    assert facts["hour"] is None
    assert facts["since"] is None
    assert facts["devices"] == facts["spans"] == facts["health"] == []
    assert facts["power"]["series"] == []
    assert facts["footprint"] == {"cost": None, "carbon": None}


def test_devices_are_the_cover_and_what_is_unknown_is_null() -> None:
    devices = {device["id"]: device for device in told(busy_host())["devices"]}
    assert "intel-rapl:0:0" not in devices  # lies within another
    gpu, cpu = devices["GPU-0"], devices["intel-rapl:0"]
    assert (gpu["watts"], gpu["limit_watts"], gpu["limit_default_watts"]) == (612.3, 700.0, None)
    assert (gpu["utilisation"], gpu["celsius"], gpu["throttling"]) == (0.97, 61, ["sw_power_cap"])
    assert (cpu["utilisation"], cpu["celsius"], cpu["limit_watts"]) == (None, None, None)
    assert cpu["throttling"] is None, "nobody could be asked"
    assert cpu["joules"] == 12_421
    assert devices["GPU-1"]["gaps"] == {"lost": 3.2}
    assert devices["GPU-1"]["gap_seconds"] == 3.2


@pytest.mark.parametrize("reasons", [None, ()])
def test_what_slows_a_gpu_down_is_nothing_or_not_known(reasons: tuple[str, ...] | None) -> None:
    host = busy_host()
    gpu = replace(host.gpus[0], throttling=reasons)
    devices = {device["id"]: device for device in told(replace(host, gpus=(gpu,)))["devices"]}
    assert devices["GPU-0"]["throttling"] == (None if reasons is None else [])


def test_spans_are_told_with_what_one_call_and_one_token_cost() -> None:
    memory, host = PageHistory(), serving_host()
    before = replace(host, at=Instant(host.at.mono - 10**9, host.at.wall - 10**9))
    memory.look(replace(before, spans=replace(host.spans, rows=())))
    spans = {span["name"]: span for span in told(host, memory)["spans"]}
    assert next(iter(spans)) == "train_step"
    chat = spans["chat gpt-oss"]
    assert chat["joules"] == 3930
    assert chat["calls"] == 912
    assert chat["joules_per_call"] == pytest.approx(3930 / 912)
    assert chat["joules_per_token"] == pytest.approx(3930 / 118_404)
    assert chat["seconds_per_call"] == pytest.approx(1333 / 912)
    assert spans["train_step"]["joules_per_token"] is None


def tuned(**changes: object) -> Snapshot:
    row = TuningRow(
        "trainer/step", "trainer", "step", Knob.GPU_POWER, TuningState.HOLDING,
        Decision(Move.HOLD, DecisionReason.CERTIFIED, "Hold 320 W: it saves.", {"GPU-0": 320_000}),
        Instant(0, 1_700_000_000 * 10**9), 0.05, 0.95,
        devices=("GPU-0",), applied=True, slowdown=0.03, slowdown_bound=0.04, saving=0.18,
        saved=Microjoules(5_000_000), saved_surely=Microjoules(3_000_000),
        original={"GPU-0": 700_000},
    )  # fmt: skip
    row = replace(row, **changes)  # type: ignore[arg-type]
    return replace(busy_host(), tuning=TuningAccounts("apply", (row,), capper=True))


def job(**changes: object) -> dict[str, Any]:
    (row,) = told(tuned(**changes))["tuning"]["jobs"]
    assert isinstance(row, dict)
    return row


def test_a_job_is_told_in_its_knobs_unit_with_its_sentence() -> None:
    row = job()
    assert (row["setting"], row["original"], row["unit"]) == (320, 700, "W")
    assert (row["slowdown"], row["bound"], row["saving"]) == (0.03, 0.04, 0.18)
    assert (row["saved_surely_joules"], row["saved_joules"]) == (3, 5)
    assert row["sentence"] == "Hold 320 W: it saves."
    assert row["at"] == 1_700_000_000
    clock = job(knob=Knob.GPU_CLOCK, original={"GPU-0": 1980})
    assert (clock["original"], clock["unit"]) == (1980, "MHz")


def test_advice_is_no_setting_and_devices_that_differ_have_none() -> None:
    assert job(applied=False)["setting"] is None
    assert job(original={"GPU-0": 700_000, "GPU-1": 500_000})["original"] is None


@pytest.mark.parametrize("value", [nan, inf, -inf, None])
def test_what_is_no_number_is_unknown(value: float | None) -> None:
    row = job(slowdown=value, slowdown_bound=value, saving=value)
    assert row["slowdown"] is row["bound"] is row["saving"] is None


def test_failures_are_told_as_sentences_of_bounded_length() -> None:
    (source,) = told(busy_host())["health"]
    assert source["failures"] == [
        "Cannot read /sys/class/powercap/intel-rapl:1/energy_uj: permission denied. "
        "Give the service CAP_DAC_READ_SEARCH."
    ]
    host = busy_host()
    long = replace(host.health[0].failures[0], cause="x\x1b" * 10_000)
    hostile = replace(host, health=(replace(host.health[0], failures=(long,) * 100),))
    (source,) = told(hostile)["health"]
    assert len(source["failures"]) == 8
    assert all(len(text) <= 400 and "\x1b" not in text for text in source["failures"])


def test_the_agents_own_cpu_time_is_a_fraction_of_a_core() -> None:
    memory, host = PageHistory(), busy_host()
    then = Instant(host.at.mono - 4 * 10**9, host.at.wall - 4 * 10**9)
    memory.look(replace(host, at=then, stats=AgentStats(then, cpu_seconds=1.0)))
    host = replace(host, stats=AgentStats(then, cpu_seconds=1.02, rss_bytes=5, ticks=7))
    agent = told(host, memory)["agent"]
    assert agent["cpu"] == pytest.approx(0.005)
    assert (agent["rss_bytes"], agent["ticks"]) == (5, 7)
    assert told(Snapshot(Instant(0, 0), 0, ""))["agent"]["cpu"] is None


def test_money_and_carbon_are_told_by_the_hour_at_the_present_power() -> None:
    cost = RatedEnergy(
        "EUR", RateOrigin.CONSTANT, 300_000_000, 12_500_000_000, Microjoules(7_000_000)
    )
    carbon = RatedEnergy("g", RateOrigin.METRIC)
    host = replace(busy_host(), footprint=Footprint(cost, carbon))
    told_of = told(host)["footprint"]
    watts = sum(account.power or 0 for account in host.cover) / 1000
    assert told_of["cost"]["per_hour"] == pytest.approx(0.3 * watts / 1000)
    assert (told_of["cost"]["total"], told_of["cost"]["unknown_joules"]) == (12.5, 7)
    assert told_of["carbon"]["rate"] is told_of["carbon"]["per_hour"] is None
    blind = replace(host.domains[0], power=None)
    half = replace(host, domains=(blind, *host.domains[1:]))
    assert told(half)["footprint"]["cost"]["per_hour"] is None


def test_unprintable_and_long_names_are_fit_to_be_shown() -> None:
    host = busy_host()
    domain = replace(host.domains[0].domain, name="\ud800" + "n" * 9999)
    hostile = replace(host, host="\x00" * 500, domains=(replace(host.domains[0], domain=domain),))
    body = build_document(hostile, PageHistory(), "1", 0)
    assert len(body) < 10_000
    assert b"\\u0000" not in body


def test_a_power_that_is_unknown_is_null() -> None:
    host = busy_host()
    blind = replace(host.domains[0], power=None, idle_power=Milliwatts(5500))
    device = told(replace(host, domains=(blind, *host.domains[1:])))["devices"][0]
    assert device["watts"] is None
    assert device["idle_watts"] == 5.5


def structs() -> list[type]:
    return [
        struct
        for struct in vars(document).values()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        and struct is not msgspec.Struct
    ]  # fmt: skip


def test_every_field_is_in_the_reference() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    for struct in structs():
        for name in get_type_hints(struct):
            assert f"`{name}`" in page, f"{struct.__name__}.{name}"
