"""Tuners below imposed limits: the tuner and the core of the capper on simulated boards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from testbed.capper_bench import Bench, Board, W
from testbed.tuned_host import Host, held, quick

from wattspan.config import CapsSettings, TunedJobSettings
from wattspan.config.tables import FixedCapSettings
from wattspan.model import SECOND, CapKey, CapRow, DecisionReason
from wattspan.ports import CapTotals
from wattspan.util.unix_sockets import PeerCredentials

JOBS = "job0/train_step", "job1/train_step"
SETTINGS = quick(job=tuple(TunedJobSettings(*one.split("/"), kind="steps") for one in JOBS))
ROOT, HOUR = PeerCredentials(10, 0), 3600 * SECOND


def fixed(watts: int) -> CapsSettings:
    return CapsSettings(fixed=(FixedCapSettings(device="*", watts=watts),))


class CoreCaps:
    """Implements ports.Caps by the core of a capper, which turns whenever it is asked.

    Firmware raises limits to ``least``; ``ceilings`` are all that were shown.
    """

    totals = CapTotals()

    def __init__(self, folder: Path, settings: CapsSettings, least: int = 0) -> None:
        self.bench, self.least, self.ceilings = Bench(folder), least, set[int | None]()
        self.bench.actuator.boards = {f"GPU-{n}": Board(700 * W) for n in range(2)}
        self.bench.actuator.after = self.written
        self.bench.start()
        self.host = Host(2, settings=SETTINGS, clock=self.bench.clock, caps=lambda clock: self)
        self.desk = self.bench.desk(settings)
        self.desk.turn()

    def written(self, key: CapKey) -> None:
        board = self.bench.actuator.boards[key.device]
        self.host.gpu(key.device).cap = board.stands = max(board.stands, self.least)

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        self.desk.turn()
        if renew:
            self.bench.manager.renew(1)
        rows = self.bench.manager.rows()
        self.ceilings.update(row.ceiling for row in rows)
        return rows

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        self.bench.manager.hold(1, job, caps, why)
        return self.bench.manager.rows()

    def release(self, job: str = "") -> None:
        self.bench.manager.release(1, job)

    def close(self) -> None:
        """Nothing is open."""

    def tune(self, *jobs: str, seconds: float = 3600) -> Host:
        """The host once all ``jobs`` have a setting, each on a board of its own, or later."""
        for number, job in enumerate(jobs):
            self.host.train(job.split("/")[0], number)
        self.host.run(seconds, until=lambda: all(held(self.host, job) for job in jobs))
        return self.host


@pytest.mark.parametrize("jobs", [JOBS[:1], pytest.param(JOBS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [CapsSettings(budget_watts=1200), fixed(600)])
def test_imposed_limit_is_the_reference_until_another_one_is_imposed(
    settings: CapsSettings, jobs: tuple[str, ...], tmp_path: Path
) -> None:
    core = CoreCaps(tmp_path, settings)
    host = core.tune(*jobs)
    assert {host.row(job).decision.reason for job in jobs} == {DecisionReason.CERTIFIED}
    assert core.ceilings == {600 * W}
    core.desk.ceilings.request(1100 * W, "why", HOUR, ROOT)
    host.run(5)
    assert {watts for job in jobs for watts in host.row(job).original.values()} == {550 * W}


def test_fixed_cap_below_the_range_of_the_tuner_leaves_no_room(tmp_path: Path) -> None:
    core = CoreCaps(tmp_path, fixed(300))
    assert core.tune(JOBS[0], seconds=120).row(JOBS[0]).decision.reason is DecisionReason.NO_ROOM
    assert core.bench.stands == [300 * W] * 2


def test_limit_that_the_operator_lowers_before_a_cap_is_the_reference(tmp_path: Path) -> None:
    core = CoreCaps(tmp_path, CapsSettings())
    core.tune(JOBS[0], seconds=1)
    core.bench.actuator.boards["GPU-0"].stands = core.host.gpus[0].cap = 600 * W
    core.host.run(15)
    assert core.host.row(JOBS[0]).original == {"GPU-0": 600 * W}


def test_limit_that_firmware_raises_is_the_lowest_that_is_tried(tmp_path: Path) -> None:
    decided = CoreCaps(tmp_path, CapsSettings(), least=600 * W).tune(JOBS[0]).book.decided
    assert decided[-1].decision.reason is DecisionReason.CERTIFIED
    assert DecisionReason.FOREIGN_WRITER not in {one.decision.reason for one in decided}
