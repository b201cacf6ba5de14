"""All faults of a host at once, with balanced totals in every snapshot.

Ten minutes of it by ``WATTSPAN_ENDURANCE=600``; a shorter run of the same kind in every
``make test-all``.
"""

import os
import threading
from pathlib import Path

import pytest
from testbed.live_host import LiveAgent, churn
from testbed.simulated_host import imbalances, steps_back

from wattspan.model import GapReason, HwType

pytestmark = pytest.mark.alone

SECONDS = float(os.environ.get("WATTSPAN_ENDURANCE", "60"))
CHURN = 100  # short-lived processes a second, at the very least


def test_snapshots_balance_through_churn_wraps_resets_and_losses(
    tmp_path: Path,
) -> None:
    agent = LiveAgent("two-socket-h100", tmp_path)
    for zone in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1", "intel-rapl:1:0"):
        agent.host.ask(do="fault", zone=zone, fault="brink")
    with agent as live:
        live.host.start_jobs()
        wrong: list[str] = []
        seen = watch(live, wrong)
        with seen:
            started = churn(SECONDS * 0.25, live.clock)
            live.host.ask(do="fault", zone="intel-rapl:0", fault="reset")
            started += churn(SECONDS * 0.15, live.clock)
            live.host.ask(do="fault", zone="intel-rapl:1:0", fault="vanish")
            live.host.ask(do="fault", gpu=1, fault="lost", on=True)
            started += churn(SECONDS * 0.25, live.clock)
            live.host.ask(do="fault", zone="intel-rapl:1:0", fault="reappear")
            live.host.ask(do="fault", gpu=1, fault="lost", on=False)
            started += churn(SECONDS * 0.35, live.clock)
        live.stop()
        last = live.agent.view()

        print(f"{seen.snapshots} snapshots, {started} processes in {SECONDS:.0f} s")
        assert wrong == []
        assert seen.snapshots > SECONDS  # two a second are published
        assert started > SECONDS * CHURN
        gaps = {a.domain.id: a.gaps for a in last.domains}
        assert GapReason.RESET in gaps["rapl:package-0"]
        assert GapReason.ABSENT in gaps["rapl:package-1/dram"] or SECONDS < 50
        gpu = last.gpus[1].domain_id
        assert set(gaps[gpu]) & {GapReason.ABSENT, GapReason.LOST}
        assert gaps["rapl:package-1"] == {}
        assert all(account.present for account in last.domains)
        assert {row.hw_type for row in (a.domain for a in last.domains)} == {
            HwType.CPU, HwType.GPU, HwType.MEMORY,
        }  # fmt: skip
        truth = live.host.ask(do="truth")
        # A package that had no gap lost no joule to all this, its wraps included.
        account = last.account("rapl:package-1")
        assert account.energy <= truth["zones"]["intel-rapl:1"]
        assert account.energy > 0.9 * truth["zones"]["intel-rapl:1"]


class watch:  # noqa: N801 - reads as a verb where it is used
    """Look at every snapshot that is published, in a thread of its own."""

    def __init__(self, live: LiveAgent, wrong: list[str]) -> None:
        self._live, self._wrong = live, wrong
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.snapshots = 0

    def _look(self) -> None:
        last = self._live.agent.view()
        while not self._stop.wait(0.05):
            snapshot = self._live.agent.view()
            if snapshot.sequence != last.sequence:
                self.snapshots += 1
                self._wrong += imbalances(snapshot) + steps_back(last, snapshot)
                last = snapshot

    def __enter__(self) -> "watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
