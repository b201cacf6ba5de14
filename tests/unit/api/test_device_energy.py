"""Responses to queries of device energy from readings: ``/v1/energy?of=devices``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from testbed.constant_history import DRAM, GPU, PACKAGE, Asked, local_peer

from wattspan.api.energy import DEFAULT_WAIT, MAX_BODY_BYTES, MAX_IDS, MAX_PERIODS, TimeGrid
from wattspan.http.sockets import Peer
from wattspan.model import SECOND, GpuStatus, Instant
from wattspan.testing import ManualClock

ROOT = local_peer(9, 0)
STRANGER = local_peer(55, 2000)
BOARD = "NVIDIA H100 80GB HBM3"
INSTANCE = replace(GPU, id="gpu:MIG-3", name="GPU 0, 1g.10gb 3", in_cover=False, parent=GPU.id)
GONE = replace(PACKAGE, id="estimate:package-0", in_cover=False)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def by_id(told: dict[str, Any]) -> dict[str, Any]:
    return {device["hw_id"]: device for device in told["devices"]}


def with_gpu(asked: Asked) -> None:
    asked.past.known_domains = (PACKAGE, DRAM, GPU)
    asked.past.devices[GPU.id] = 300_000
    asked.past.gpus[GPU.id] = GpuStatus(
        GPU.id, Instant(asked.now, 0), model=BOARD, index=3, temperature_celsius=61
    )


def test_devices_have_energy_uncertainty_coverage_and_provenance(asked: Asked) -> None:
    told = asked.energy(2.0, of="devices", peer=ROOT)
    package = by_id(told)["package-0"]
    assert (package["joules"], package["uncertainty_joules"]) == (20.0, 0.2)
    assert (package["coverage"], package["provenance"]) == (1.0, "measured")
    assert (package["index"], package["uuid"]) == (0, None)
    assert package["known_mono_ns"] == asked.now
    assert told["complete"] is package["complete"] is True
    assert (told["seconds"], told["host_name"], told["emulated"]) == (2.0, "testhost", False)


def test_gpu_has_index_uuid_model_and_temperature(asked: Asked) -> None:
    with_gpu(asked)
    gpu = by_id(asked.energy(2.0, of="devices"))[GPU.id]
    assert (gpu["index"], gpu["uuid"], gpu["model"]) == (3, GPU.id, BOARD)
    assert (gpu["joules"], gpu["temperature_celsius"]) == (600.0, 61)


def test_asked_devices_only_are_answered(asked: Asked) -> None:
    told = asked.energy(2.0, of="devices", hw_id="package-1,dram-0,package-1", peer=ROOT)
    assert list(by_id(told)) == ["package-1", "dram-0"]


def test_unknown_device_is_not_found_with_a_suggestion(asked: Asked) -> None:
    sentence = asked.problem(404, of="devices", start="-1s", hw_id="package-0,pakage-1")
    assert "hw_id=pakage-1: the agent has no such device" in sentence
    assert "Did you mean 'package-1'?" in sentence


@pytest.mark.parametrize(
    ("query", "cause"),
    [
        ({"of": "processes"}, "only the energy of devices"),
        ({"of": "devices", "hw_id": ","}, "it names no device"),
        (
            {"of": "devices", "hw_id": ",".join(map(str, range(MAX_IDS + 1)))},
            "more than 256 devices",
        ),
        ({"of": "devices", "timeline": "yes"}, "neither yes nor no"),
        ({"of": "devices", "pid": "self"}, "there is no such parameter"),
        ({"of": "devices", "wait": "61s"}, "too long"),
        ({"of": "devices", "end": "mono:1"}, "before start"),
    ],
)
def test_invalid_query_is_refused(asked: Asked, query: dict[str, str], cause: str) -> None:
    assert cause in asked.problem(400, **{"start": "-1s", **query})


def test_answer_waits_for_the_reading_after_the_end(asked: Asked) -> None:
    end = asked.now + SECOND // 2
    asked.past.on_settled = [asked.now] * 3 + [end] * 20
    told = asked.energy(1.0, of="devices", end=f"mono:{end}", peer=ROOT)
    assert told["complete"] is True
    assert 0 < len(asked.pauses) <= 3


def test_answer_waits_for_no_silent_device(asked: Asked) -> None:
    asked.past.silenced = {PACKAGE.id, DRAM.id, "package-1"}
    told = asked.energy(1.0, of="devices", end=f"mono:{asked.now + SECOND}", peer=ROOT)
    assert asked.pauses == []
    assert told["complete"] is False
    assert {one["coverage"] for one in told["devices"]} == {0.5}
    assert {one["silent"] for one in told["devices"]} == {True}


def test_answer_comes_at_the_latest_after_the_wait(asked: Asked) -> None:
    told = asked.energy(1.0, of="devices", end=f"mono:{asked.now + 60 * SECOND}", peer=ROOT)
    assert told["complete"] is False
    assert sum(asked.pauses) == pytest.approx(DEFAULT_WAIT / SECOND)


def test_device_without_any_reading_is_unknown_and_not_zero(asked: Asked) -> None:
    asked.past.horizon = asked.now
    (package,) = asked.energy(2.0, of="devices", hw_id=PACKAGE.id, peer=ROOT)["devices"]
    assert package["joules"] is package["uncertainty_joules"] is None
    assert package["coverage"] == 0.0


def test_timeline_and_temperatures_come_on_request(asked: Asked) -> None:
    with_gpu(asked)
    plain = by_id(asked.energy(2.0, of="devices"))[GPU.id]
    assert "timeline" not in plain
    told = by_id(asked.energy(2.0, of="devices", timeline=1))[GPU.id]
    assert told["timeline"] == [[0, asked.now, pytest.approx(300.0 * asked.now / 1e9)]]
    assert told["temperatures"] == [[asked.now, 61]]


def test_other_users_receive_whole_cells_and_no_readings_of_cpus() -> None:
    asked = Asked(resolution=SECOND)
    with_gpu(asked)
    asked.past.until = asked.now + SECOND // 3
    told = asked.energy(1.5, of="devices", timeline=1, peer=STRANGER)
    package, gpu = by_id(told)[PACKAGE.id], by_id(told)[GPU.id]
    assert told["device_resolution_seconds"] == 1.0
    assert package["timeline"] is None
    assert asked.now % SECOND == 0
    assert (package["known_mono_ns"], gpu["known_mono_ns"]) == (asked.now, asked.past.until)
    assert package["joules"] == pytest.approx(15.0)
    assert gpu["timeline"] is not None
    assert by_id(asked.energy(1.5, of="devices", timeline=1, peer=ROOT))[PACKAGE.id]["timeline"]


@pytest.mark.parametrize(("peer", "known"), [(ROOT, None), (STRANGER, (STRANGER.pid,))])
def test_reader_knows_the_edges_of_own_windows(peer: Peer, known: object) -> None:
    asked = Asked(resolution=SECOND)
    with_gpu(asked)
    asked.energy(1.5, peer=peer)
    asked.energy(1.5, peer=peer, of="devices")
    assert set(asked.past.knowing) == ({known} if peer is ROOT else {known, True})
    asked.past.knowing.clear()
    asked.energy(1.5, peer=peer, of="devices", timeline=1, hw_id=GPU.id)
    assert asked.past.knowing == [known, known is not None]


def test_other_users_receive_whole_cells_of_mig_instances() -> None:
    """Their energy is that of their processes, which no driver reports."""
    asked = Asked(resolution=SECOND)
    with_gpu(asked)
    asked.past.known_domains = (*asked.past.known_domains, INSTANCE, GONE)
    asked.past.devices |= {INSTANCE.id: 50_000, GONE.id: 1_000}
    asked.past.until = asked.now + SECOND // 3
    for peer, known in ((STRANGER, asked.now), (ROOT, asked.past.until)):
        told = by_id(asked.energy(1.5, of="devices", parts=1, timeline=1, peer=peer))
        assert (told[INSTANCE.id]["timeline"] is None) is (peer is STRANGER)
        assert told[INSTANCE.id]["known_mono_ns"] == known
        assert told[GPU.id]["timeline"] is not None
        assert (told[INSTANCE.id]["parent"], told[INSTANCE.id]["index"]) == (GPU.id, 3)
        assert GONE.id not in told  # it has left the cover, and is no part
    powers = TimeGrid(SECOND).latest_powers(asked.past, asked.past) or {}
    assert powers[INSTANCE.id] == 50.0
    assert GPU.id not in powers


@pytest.mark.parametrize(
    ("name", "resource", "number"),
    [
        ("package-1", "cpu", 1),
        ("package-1-die-0", "cpu:0", 1),
        ("Esocket1", "cpu:1", 1),
        ("Chip 8", "cpu:1", 1),
        ("CPU power", "cpu", None),
        ("CPU power", None, None),
    ],
)
def test_package_has_the_number_of_its_name_or_its_cpus(
    asked: Asked, name: str, resource: str | None, number: int | None
) -> None:
    package = replace(PACKAGE, name=name, resource=resource)
    asked.past.known_domains = (package,)
    (told,) = asked.energy(1.0, of="devices", peer=ROOT)["devices"]
    assert told["index"] == number


def test_uncertainty_of_cells_contains_nothing_of_single_readings() -> None:
    asked = Asked(resolution=SECOND)
    with_gpu(asked)
    asked.past.horizon = asked.now - 2 * SECOND
    told = by_id(asked.energy(2.0, of="devices", peer=STRANGER))[PACKAGE.id]
    assert asked.past.asked_cells == {PACKAGE.id, DRAM.id}
    # 10 ms and the counter's step of 1 ms at either edge, of 20 J in 2 s
    assert told["uncertainty_joules"] == pytest.approx(20.0 * 0.022 / 2)


def many(asked: Asked, *periods: tuple[float, float], **query: Any) -> dict[str, Any]:
    """The answer for several periods, in seconds from now."""
    body = [[asked.now + round(edge * SECOND) for edge in period] for period in periods]
    response = asked.get(method="POST", body=json.dumps(body).encode(), **query)
    assert response.status == 200, response.body
    told = json.loads(response.body)
    assert isinstance(told, dict)
    return told


@pytest.mark.parametrize("peer", [ROOT, STRANGER])
def test_periods_of_one_request_have_the_figures_of_each_alone(peer: Peer) -> None:
    asked = Asked(resolution=SECOND)
    with_gpu(asked)
    periods = (-9.25, -7.5), (-5.0, -4.9), (-1.0, 3.0), (-2.0, -2.0)
    told = many(asked, *periods, of="devices", hw_id=f"dram-0,{GPU.id}", peer=peer)
    assert [one["hw_id"] for one in told["devices"]] == [GPU.id, "dram-0"]
    for (start, end), figures in zip(periods, told["windows"], strict=True):
        edges = {"end": f"mono:{asked.now + round(end * SECOND)}", "wait": "0s"}
        alone = asked.energy(-start, of="devices", hw_id=f"dram-0,{GPU.id}", peer=peer, **edges)
        assert figures == [
            [one["joules"], one["uncertainty_joules"], one["coverage"], one["complete"]]
            for one in alone["devices"]
        ]


def test_many_periods_wait_for_the_first_alone(asked: Asked) -> None:
    told = many(asked, (-2, -1), (-1, 50), of="devices", hw_id="dram-0", wait="5s")
    assert [figures[0][-1] for figures in told["windows"]] == [True, False]
    assert asked.pauses == []
    many(asked, (-1, 50), (-2, -1), of="devices", hw_id="dram-0", wait="5s")
    assert sum(asked.pauses) == pytest.approx(5)


class PassingClock(ManualClock):
    """A clock by which every reading takes a tenth of a second."""

    def monotonic(self) -> int:
        self.advance(0.1)
        return super().monotonic()


@pytest.mark.parametrize("query", [{"of": "devices", "hw_id": "dram-0"}, {"pid": "self"}])
def test_answer_that_takes_long_has_the_first_periods(query: dict[str, str]) -> None:
    asked = Asked(clock=PassingClock())
    periods = [(-2 - i, -1 - i) for i in range(100)]
    first = many(asked, *periods, **query)["windows"]
    assert 1 < len(first) < 20
    for size in (1, 3):
        assert many(asked, *periods[:size], **query)["windows"] == first[:size]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("", "truncated"),
        ("{}", "array"),
        ("[]", "length"),
        (json.dumps([[1, 2]] * (MAX_PERIODS + 1)), "length"),
        (" " * MAX_BODY_BYTES + "[[1, 2]]", "truncated"),
        ("[[1]]", "length"),
        ("[[1, 2.5]]", "int"),
        ("[[-1, 2]]", ">= 0"),
        (f"[[1, {2**63}]]", "int"),
        ("[[2, 1]]", "ends before its start"),
        ("[" * 50_000, "the body"),
    ],
)
@pytest.mark.parametrize("query", [{"of": "devices"}, {"pid": "self"}])
def test_bodies_without_periods_are_refused(
    asked: Asked, body: str, cause: str, query: dict[str, str]
) -> None:
    assert cause in asked.problem(400, method="POST", body=body.encode(), **query)
