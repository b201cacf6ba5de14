"""The watts of the live page's flow: energy over the time that it is of, whenever it was booked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from testbed.snapshots import CPU, GPU, J, account, process

from wattspan.model import SECOND, DomainAccount, GapReason, Instant, Snapshot
from wattspan_exporters.page import build_document
from wattspan_exporters.page.history import STEP, PageHistory

BUSY, IDLE, NOBODY = 80, 15, 5
"""Watts that a device of these hosts always draws."""

BEGIN = 1000
PERIOD = STEP // SECOND

Late = Callable[[int], float]
"""Settlement delay in seconds at each second; None without settled energy."""


def always(seconds: float) -> Late:
    return lambda _: seconds


def growing(second: int) -> float:
    """A device that is settled one second late, and later and later five."""
    return min(5.0, 1.0 + max(0, second - BEGIN - 20) / 2)


def shrinking(second: int) -> float:
    return 6.0 - growing(second)


def at(second: float, asleep: float = 0) -> Instant:
    mono, slept = round(second * SECOND), round(asleep * SECOND)
    return Instant(mono, 10**18 + mono + slept, slept)


def device(name: str, late: float, now: Instant, gap: float = 0) -> DomainAccount:
    """Energy of these devices since boot, except in its gap."""
    settled = Instant(now.mono - round(late * SECOND), now.wall, now.asleep)
    lasted = settled.mono / SECOND - max(0, gap - now.asleep / SECOND)
    kind = GPU if name.startswith("gpu") else CPU
    split = (BUSY, IDLE, NOBODY)
    one = account(name, kind, name, None, (0, 0, 0))
    consumers, idle, nobody = (round(watts * lasted * J) for watts in split)
    return replace(
        one, energy=consumers + idle + nobody, consumers=consumers, idle=idle,
        unattributed=nobody, settled=settled,
        gaps={GapReason.SUSPEND: round(gap * SECOND)} if gap else {},
    )  # fmt: skip


def host(now: Instant, *accounts: DomainAccount) -> Snapshot:
    row = process(1, "worker", "pod", {}, {})
    energy = {
        kind: sum(one.consumers for one in accounts if one.domain.hw_type is kind)
        for kind in (CPU, GPU)
    }
    return Snapshot(now, now.mono, "host", accounts, (replace(row, energy=energy),))


def seen(memory: PageHistory, snapshot: Snapshot) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(build_document(snapshot, b"{}", memory))
    return told


def watched(seconds: int, **late: Late) -> list[dict[str, Any]]:
    """The page's data in each second of a host with these devices."""
    memory, told = PageHistory(), []
    for second in range(BEGIN, BEGIN + seconds):
        now = at(second)
        devices = (device(name, lag(second), now) for name, lag in late.items())
        memory.record(host(now, *devices))
        devices = (device(name, lag(second), now) for name, lag in late.items())
        told.append(seen(memory, host(now, *devices)))
    return told


def watts(flow: Mapping[str, Any]) -> dict[str, float | None]:
    return {node["name"]: node["watts"] for node in flow["nodes"]}


@pytest.mark.parametrize("late", [always(0), always(3), growing, shrinking])
@pytest.mark.parametrize("flow", ["now", "hour"])
def test_steady_device_power_is_independent_of_settlement_delay(late: Late, flow: str) -> None:
    for told in watched(60, cpu=late)[2:]:
        assert told[flow]["watts"] == 100
        assert watts(told[flow]) == {
            "cpu": 100, "CPU": 80, "idle": 15, "unattributed": 5, "pod": 80, "worker": 80,
        }  # fmt: skip


def test_devices_settled_at_different_times_have_separate_power() -> None:
    for told in watched(60, cpu=always(0.2), gpu=growing, gpu2=shrinking)[2:]:
        now = told["now"]
        assert now["watts"] == pytest.approx(300)
        assert {name: watts(now)[name] for name in ("cpu", "gpu", "gpu2")} == {
            "cpu": 100, "gpu": 100, "gpu2": 100,
        }  # fmt: skip
        assert watts(now)["worker"] == pytest.approx(240)
        (cpu, gpu) = (
            sum(link["watts"] for link in now["links"] if link["source"] == source)
            for source in ("t:cpu", "t:gpu")
        )
        assert (cpu, gpu) == (pytest.approx(80), pytest.approx(160))


def test_joules_are_those_that_were_settled() -> None:
    told = watched(60, cpu=growing)
    assert told[29]["hour"]["joules"] == 100 * (29 - (growing(BEGIN + 29) - 1))


def test_gap_does_not_lower_current_power() -> None:
    memory = PageHistory()
    for second in range(BEGIN, BEGIN + 40):
        gap = min(4.0, max(0.0, second - BEGIN - 30))
        snapshot = host(at(second), device("cpu", 0, at(second), gap))
        memory.record(snapshot)
        assert second < BEGIN + 2 or seen(memory, snapshot)["now"]["watts"] == 100
    hour = seen(memory, snapshot)["hour"]
    assert hour["watts"] == pytest.approx(100 * (39 - 4) / 39, rel=1e-4), "where it went in all"


def test_suspend_does_not_lower_power() -> None:
    memory = PageHistory()
    for second in range(BEGIN, BEGIN + 40):
        asleep = 600 if second >= BEGIN + 32 else 0
        now = at(second, asleep)
        snapshot = host(now, device("cpu", 0, now, asleep + 1 if asleep else 0))
        memory.record(snapshot)
    assert seen(memory, snapshot)["now"]["watts"] == pytest.approx(100)
    (series,) = seen(memory, snapshot)["power"]["series"]
    assert set(series["watts"]) == {100, None}


def test_power_is_unknown_before_one_settled_second() -> None:
    fresh = watched(1, cpu=always(1))[0]["now"]
    assert fresh["watts"] is None
    assert watts(fresh) == {"cpu": None}
    memory = PageHistory()
    memory.record(host(at(1), device("cpu", 0, at(1))))
    half = seen(memory, host(at(1.5), device("cpu", 0, at(1.5))))["now"]
    assert (half["joules"], half["watts"]) == (50, None)
    assert set(watts(half).values()) == {None}


def test_new_device_has_power_after_one_settled_second() -> None:
    memory = PageHistory()
    for second in range(BEGIN, BEGIN + 30):
        now = at(second)
        comes = device("gpu", 0, now)
        if second < BEGIN + 12:
            comes = account("gpu", GPU, "gpu", None, (0, 0, 0))
        snapshot = host(now, device("cpu", 0, now), comes)
        memory.record(snapshot)
        told = seen(memory, snapshot)["now"]
        known = second > BEGIN + 3 * PERIOD
        if second >= BEGIN + 12:
            assert watts(told)["cpu"] == 100
            assert (watts(told)["gpu"] is not None) == (watts(told)["GPU"] is not None) == known
            assert (told["watts"] is not None) == known, "a sum that lacks a part is a wrong sum"
    assert told["watts"] == pytest.approx(200)


def test_device_power_is_known_two_seconds_after_start() -> None:
    memory = PageHistory()
    told = {}
    for second in range(BEGIN + 1, BEGIN + 5):
        cpu = device("cpu", 0, at(second))
        snapshot = host(at(second), replace(cpu, settled=None) if second == BEGIN + 1 else cpu)
        memory.record(snapshot)
        told[second - BEGIN] = seen(memory, snapshot)["now"]["watts"]
    assert told == {1: None, 2: None, 3: 100, 4: 100}


def test_known_powers_are_a_lower_bound_of_the_sum() -> None:
    memory = PageHistory()
    for second in range(BEGIN, BEGIN + 60):
        board = account("gpu", GPU, "gpu", None, (0, 0, 0))
        never = replace(board, measured=False, silent=True)
        snapshot = host(at(second), device("cpu", 0, at(second)), never)
        memory.record(snapshot)
    told = seen(memory, snapshot)
    for flow in ("now", "hour"):
        assert (told[flow]["watts"], told[flow]["least_watts"]) == (None, 100)
        assert told[flow]["bounded"] is True


def test_energy_is_a_lower_bound_while_a_gap_is_in_the_period() -> None:
    memory = PageHistory()
    for second in range(BEGIN, BEGIN + 40):
        now = at(second)
        one = device("cpu", 0, now)
        lost = {GapReason.LOST: 4 * SECOND} if second >= BEGIN + 15 else {}
        snapshot = host(now, replace(one, gaps=lost))
        memory.record(snapshot)
    told = seen(memory, snapshot)
    assert (told["now"]["bounded"], told["hour"]["bounded"]) == (False, True)
    assert told["now"]["least_watts"] == told["now"]["watts"]


def test_total_power_excludes_only_removed_devices() -> None:
    def last(**changes: object) -> float | None:
        memory = PageHistory()
        for second in range(BEGIN, BEGIN + 60):
            still = device("gpu", second - BEGIN, at(second))
            snapshot = host(at(second), device("cpu", 0, at(second)), replace(still, **changes))  # type: ignore[arg-type]
            memory.record(snapshot)
        power: float | None = seen(memory, snapshot)["now"]["watts"]
        return power

    assert last() is None
    assert last(present=False) == 100
