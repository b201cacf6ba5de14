"""An emulated host with a board of each vendor: one agent reads both, one capper sets both."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.capper_process import CapperProcess
from testbed.live_host import LiveAgent, percent
from testbed.simulated_host import imbalances
from testbed.waiting import eventually

from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.model import CapKey, HwType, Knob

WINDOW = 4.0
PROFILE = "h100-mi300x"


def test_agent_charges_the_users_of_both_vendors(tmp_path: Path) -> None:
    with LiveAgent(PROFILE, tmp_path) as live:

        def idle_known() -> bool:
            found = [one for one in live.agent.view().domains if one.domain.hw_type is HwType.GPU]
            return len(found) == 2 and all(one.idle_power for one in found)

        eventually(idle_known, "the idle power of both boards is known", 60)
        pids = [live.burn(0, nice=19), live.burn(0, nice=19)]
        for gpu, pid in enumerate(pids):
            live.host.ask(do="attach", gpu=gpu, pid=pid, load=0.6)
        live.rest(3)
        start = live.clock.monotonic()
        live.rest(WINDOW)
        end = live.clock.monotonic()
        before, after = live.host.ask(do="truth", at=[start, end])["at"]

        def settled() -> bool:
            marks = [one.settled for one in live.agent.view().domains if one.domain.resource]
            return all(mark is not None and mark.mono > end for mark in marks)

        eventually(settled, "usage of the window has arrived", 30)
        live.stop()
        view = live.agent.view()
        assert imbalances(view) == []
        boards = [one.domain for one in view.domains if one.domain.hw_type is HwType.GPU]
        assert {board.source for board in boards} == {"nvml", "amdsmi"}
        assert all(board.in_cover for board in boards)
        for gpu, pid in enumerate(pids):
            truth = [world["gpus"][gpu]["processes"].get(str(pid), 0) for world in (before, after)]
            spent = live.spent(pid, HwType.GPU, start, end)
            assert percent(spent, truth[1] - truth[0]) == pytest.approx(0, abs=5.0), gpu


def test_capper_limits_and_restores_the_boards_of_both_vendors(tmp_path: Path) -> None:
    with EmulatedHost(profile_named(PROFILE)) as host, CapperProcess(host, tmp_path) as capper:
        client = capper.ready().client()

        def limits() -> dict[CapKey, int | None]:
            states = [row.state for row in client.rows()]
            return {one.key: one.requested for one in states if one.key.knob is Knob.GPU_POWER}

        originals = limits()
        assert sorted(one or 0 for one in originals.values()) == [700_000, 750_000]
        wanted = dict.fromkeys(originals, 600_000)
        client.hold("job", wanted, "a test")
        eventually(lambda: limits() == wanted, "both are limited")
        client.release("job")
        eventually(lambda: limits() == originals, "the original limits are back")
        client.close()
        assert capper.end() == 0, capper.said
