"""For any events of a host: the energy of its cover is priced or counted as unpriced, exactly.

At this rate each microjoule weighs a billionth, so that the weight can be read off as energy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from testbed.simulated_host import DOMAINS, GPU, PACKAGE, World

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.footprint.cost import KILOWATT_HOUR, CoverEnergy, RateAccumulator
from wattspan.model import SECOND, Checkpoint, Footprint, RatedEnergy, RateOrigin, Snapshot

loads = st.dictionaries(st.integers(1, 6), st.integers(1, 100), max_size=4)
turns = st.fixed_dictionaries(
    {
        "nanoseconds": st.sampled_from([SECOND // 10, SECOND, 7 * SECOND]),
        "loads": loads,
        "gpu_loads": loads,
        "dying": st.lists(st.integers(1, 6), max_size=2).map(tuple),
        "gpu_usage_comes": st.booleans(),
    }
)
accidents = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.just("reset"), st.sampled_from([PACKAGE.id, GPU.id])),
    st.tuples(st.just("gone"), st.sampled_from(["rapl", "nvml"])),
    st.tuples(st.just("pass"), st.integers(1, 90)),
    st.tuples(st.sampled_from(["restart", "reboot", "crash"]), st.just("")),
)


class Host:
    """A ledger with priced snapshots that continues from its last checkpoint."""

    def __init__(self) -> None:
        self.boots = 0
        self.world = World(Ledger(LedgerSettings(), boot_id="0"))
        self.kept: Checkpoint | None = None
        self._weigh()

    def _weigh(self) -> None:
        before = self.kept.footprint.cost if self.kept else None
        self.scale = RateAccumulator("X", RateOrigin.METRIC, before)
        self.cover = CoverEnergy(self.kept.accounts if self.kept else ())

    def show(self, snapshot: Snapshot, *, known: bool) -> RatedEnergy:
        """A snapshot as the poller publishes it: weighed, closed and kept."""
        rate = KILOWATT_HOUR if known else None
        weighed = self.scale.add(self.cover.spent(snapshot.domains), rate)
        snapshot = replace(snapshot, footprint=Footprint(cost=weighed))
        self.kept = self.world.ledger.checkpoint(snapshot)
        return weighed

    def happen(self, accident: tuple[str, Any] | None) -> None:
        match accident:
            case None:
                return
            case ("reset", domain):
                self.world.reset(domain)
            case ("gone", source):
                self.world.apply(domains={source: []})
                self.world.apply(domains=DOMAINS)
            case ("pass", seconds):
                self.world.clock.advance(seconds)
            case (how, _):
                self.boots += how == "reboot"
                now = self.world.clock.monotonic()
                boot_id = str(self.boots)
                self.world.ledger = Ledger(
                    LedgerSettings(), checkpoint=self.kept, boot_id=boot_id, now=now
                )
                self.world.apply(domains=DOMAINS)
                self._weigh()


@given(st.lists(st.tuples(turns, accidents, st.booleans()), min_size=2, max_size=25))
def test_cost_covers_all_energy_through_resets_restarts_and_crashes(
    story: list[tuple[dict[str, Any], tuple[str, Any] | None, bool]],
) -> None:
    host = Host()
    last = RatedEnergy("X", RateOrigin.METRIC)
    for turn, accident, known in story:
        for pid in {*turn["loads"], *turn["gpu_loads"]} - set(host.world.alive):
            host.world.born(pid)
        snapshot = host.world.turn(**turn)
        weighed = host.show(snapshot, known=known)
        assert weighed.total + weighed.unknown == sum(a.energy for a in snapshot.cover)
        assert weighed.total >= last.total
        assert weighed.unknown >= last.unknown
        assert known or weighed.total == last.total
        assert not known or weighed.unknown == last.unknown
        last = weighed
        host.happen(accident)
