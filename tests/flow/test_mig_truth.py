"""The whole agent on the emulated host h100-mig: instances, processes and their truth."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.live_host import LiveAgent, percent
from testbed.simulated_host import imbalances
from testbed.waiting import eventually

from wattspan.model import DomainAccount, HwType, Provenance

WINDOW = 3.0


def boards(live: LiveAgent) -> list[DomainAccount]:
    """The account of the board, and those of its instances."""
    found = [one for one in live.agent.view().domains if one.domain.hw_type is HwType.GPU]
    return sorted(found, key=lambda one: one.domain.parent is not None)


def test_processes_of_mig_instances_are_charged_their_energy(tmp_path: Path) -> None:
    with LiveAgent("h100-mig", tmp_path) as live:
        eventually(lambda: boards(live) and boards(live)[0].idle_power, "idle power is known", 60)
        pids = live.host.start_jobs()
        eventually(lambda: sum(one.consumers > 0 for one in boards(live)[1:]) == 3, "charges", 60)
        live.rest(1.5)
        start = live.clock.monotonic()
        live.rest(WINDOW)
        end = live.clock.monotonic()
        before, after = live.host.ask(do="truth", at=[start, end])["at"]

        def settled() -> bool:
            mark = boards(live)[0].settled
            return mark is not None and mark.mono > end

        eventually(settled, "usage of the window has arrived", 30)
        live.stop()
        assert imbalances(live.agent.view()) == []
        board, *parts = boards(live)
        assert board.domain.method == "mig-gpm"
        assert [one.domain.name.rpartition(", ")[2] for one in parts] == [
            "3g.40gb 1",
            "2g.20gb 2",
            "1g.10gb 3",
            "1g.10gb 4",
        ]
        assert {one.domain.provenance for one in parts} == {Provenance.EMULATED}
        assert all(one.energy == one.consumers + one.idle + one.unattributed for one in parts)
        assert sum(one.energy for one in parts) <= board.energy
        for name, pid in pids.items():
            truth = [world["gpus"][0]["processes"].get(str(pid), 0) for world in (before, after)]
            spent = live.spent(pid, HwType.GPU, start, end)
            if name == "resident":
                assert spent == 0
            else:
                assert percent(spent, truth[1] - truth[0]) == pytest.approx(0, abs=3.0), name
