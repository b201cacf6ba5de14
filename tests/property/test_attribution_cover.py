"""For any domains that appear, vanish and fall silent: no joule counts twice, no counter steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattspan.attribution.cover import PRESENCE, Cover, decide, overlap, thing_of
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    HwType,
    Instant,
    Microjoules,
    Provenance,
    Reading,
    Thing,
    ThingKind,
    Tick,
)

TICK = 100 * MILLISECOND


@dataclass(frozen=True)
class Meter:
    """A domain with the parts of the hardware that it truly measures, 10 W each."""

    domain: Domain
    parts: frozenset[str]
    period: int  # ticks between two readings
    lag: int  # ticks

    @property
    def watts(self) -> int:
        return 10 * len(self.parts)


def meter(
    source: str,
    name: str,
    thing: Thing | None,
    parts: str,
    provenance: Provenance = Provenance.MEASURED,
    *,
    kind: HwType = HwType.CPU,
    resource: str | None = None,
    pci: str = "",
    period: int = 1,
    lag: int = 0,
) -> Meter:
    domain = Domain(
        f"{source}:{name}", kind, name, source, provenance, resource=resource, pci=pci,
        measures=thing,
    )  # fmt: skip
    return Meter(domain, frozenset(parts.split()), period, lag)


SOCKET, MEMORY, BOARD = ThingKind.SOCKET, ThingKind.MEMORY, ThingKind.BOARD
DERIVED, ESTIMATED = Provenance.DERIVED, Provenance.ESTIMATED
METERS = (
    meter("rapl", "package-0", Thing(SOCKET, 0), "c0 i0", resource="cpu:0"),
    meter("rapl", "package-1", Thing(SOCKET, 1), "c1"),
    meter("rapl", "dram", Thing(MEMORY, 0), "m0", kind=HwType.MEMORY),
    meter("rapl", "psys", Thing(ThingKind.PLATFORM, 0), "c0 i0 c1 m0 vr", period=2),
    meter("rapl-mmio", "package-0", Thing(SOCKET, 0), "c0 i0"),
    meter("hwmon", "cores", Thing(SOCKET, 0, part=("hwmon", "cores")), "c0", DERIVED),
    meter("hwmon", "io", Thing(SOCKET, 0, part=("hwmon", "io")), "i0", DERIVED),
    meter("hwmon", "all", Thing(SOCKET), "c0 i0 c1", DERIVED, period=3),
    meter("hwmon", "board", Thing(BOARD, pci="0000:0c:00.0"), "g", DERIVED, kind=HwType.GPU),
    meter("gpu", "0", None, "g", kind=HwType.GPU, resource="gpu:0", pci="0000:0c:00.0", lag=21),
    meter("gpu", "tile", Thing(BOARD, pci="0000:0c:00.0", part=("gpu", "0")), "g", lag=13),
    meter("module", "0", Thing(ThingKind.MODULE, 0), "c0 i0 m0 g", lag=7, period=5),
    meter("estimate", "package-0", Thing(SOCKET, 0), "c0 i0", ESTIMATED, period=10),
    meter("estimate", "package-1", Thing(SOCKET, 1), "c1", ESTIMATED, period=10),
    meter("estimate", "dram", Thing(MEMORY), "m0", ESTIMATED, kind=HwType.MEMORY, period=10),
    meter("plugin", "cpu", None, "c0 i0", resource="cpu:0", period=4),
    meter("bmc", "node", None, "c0 i0 c1 m0 g vr", kind=HwType.ENCLOSURE, period=30),
)
SOURCES = sorted({one.domain.source for one in METERS})


class World:
    """The meters of a host, its cover and its ledger; ``counted`` are the intervals that count."""

    def __init__(self, meters: list[Meter]) -> None:
        self.meters = {one.domain.id: one for one in meters}
        self.silent: set[str] = set()
        self.unlisted: set[str] = set()
        self.cover = Cover()
        self.ledger = Ledger(LedgerSettings())
        self.ticks = 1000
        self.counted: dict[str, list[tuple[int, int]]] = {key: [] for key in self.meters}
        self._last: dict[str, int] = {}
        self._listed: dict[str, tuple[Domain, ...]] = {}
        self._total = 0

    def reading(self, one: Meter) -> Reading | None:
        key, at = one.domain.id, (self.ticks - one.lag) * TICK
        if key in self.silent or key in self.unlisted or self.ticks % one.period:
            return None
        return Reading(key, Instant(at, at), Microjoules(one.watts * at // 1000))

    def turn(self) -> None:
        self.ticks += 1
        now = Instant(self.ticks * TICK, self.ticks * TICK)
        listed: dict[str, tuple[Domain, ...]] = {}
        for one in self.meters.values():
            own = (one.domain,) if one.domain.id not in self.unlisted else ()
            listed[one.domain.source] = (*listed.get(one.domain.source, ()), *own)
        for source, domains in listed.items():
            if self._listed.get(source) != domains:
                self._listed[source] = domains
        readings = [one for m in self.meters.values() if (one := self.reading(m)) is not None]
        changed = self.cover.update(now.mono, self._listed, {one.domain_id for one in readings})
        tick = Tick(now, {name: self.cover.domains[name] for name in changed}, readings, (), (), ())
        before = {one.domain.id: one.counted for one in self.ledger.snapshot(now, "h").domains}
        attributed = self.ledger.apply(tick)
        after = self.ledger.snapshot(now, "h")
        settled = dict.fromkeys(self.meters, 0)
        for interval in (attribution.interval for attribution in attributed):
            settled[interval.domain_id] += interval.energy
            self.counted[interval.domain_id].append((interval.start.mono, interval.end.mono))
        for account in after.domains:
            key = account.domain.id
            grown = account.counted - before.get(key, 0) - settled[key]
            new = next((one.at.mono for one in readings if one.domain_id == key), None)
            if grown:
                assert new is not None, "energy without a reading"
                start = self._last[key]
                energy = self.meters[key].watts * (new - start) // 1000
                assert grown == energy, "a part of an interval"
                self.counted[key].append((start, new))
        self._last |= {one.domain_id: one.at.mono for one in readings}
        total = sum(account.counted for account in after.summed)
        assert total >= self._total, "the host's counter has fallen"
        self._total = total
        self.check_members()

    def check_members(self) -> None:
        members = [one for own in self.cover.domains.values() for one in own if one.in_cover]
        for one, other in combinations(members, 2):
            assert not overlap(thing_of(self.listed(one)), thing_of(self.listed(other)))

    def listed(self, domain: Domain) -> Domain:
        return self.meters[domain.id].domain

    def check_intervals(self) -> None:
        parts = frozenset().union(*(one.parts for one in self.meters.values()))
        for part in parts:
            of_part = sorted(
                interval
                for key, intervals in self.counted.items()
                if part in self.meters[key].parts
                for interval in intervals
            )
            for one, following in pairwise(of_part):
                assert one[1] <= following[0], f"{part} was counted twice"


CHOSEN = st.lists(
    st.sampled_from(METERS), min_size=1, max_size=7, unique_by=lambda one: one.domain.id
)
EVENTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # ticks before it
        st.sampled_from(("silent", "unlisted", "source")),
        st.integers(0, 20),
    ),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=settings().max_examples - 15)  # ten in `make test`
@given(CHOSEN, EVENTS)
def test_no_part_of_the_hardware_is_counted_twice(
    meters: list[Meter], events: list[tuple[int, str, int]]
) -> None:
    world = World(meters)
    for ticks, kind, number in events:
        for _ in range(ticks):
            world.turn()
        chosen = meters[number % len(meters)]
        ids = {chosen.domain.id}
        if kind == "source":
            ids = {one.domain.id for one in meters if one.domain.source == chosen.domain.source}
        state = world.silent if kind == "silent" else world.unlisted
        state.symmetric_difference_update(ids)
    for _ in range((PRESENCE + 6 * SECOND) // TICK):
        world.turn()
    world.check_intervals()
    readable = {m.domain.id for m in meters} - world.silent - world.unlisted
    listed = [m.domain for m in meters if m.domain.id not in world.unlisted]
    fresh = {key for key, one in decide(listed, readable).items() if one.in_cover}
    members = {one.id for own in world.cover.domains.values() for one in own if one.in_cover}
    assert members == fresh, "the cover depends on its history"


@given(st.permutations(METERS), st.sets(st.sampled_from(METERS)))
def test_cover_does_not_depend_on_the_order_of_domains(
    order: list[Meter], silent: set[Meter]
) -> None:
    readable = {one.domain.id for one in METERS if one not in silent}
    first = decide([one.domain for one in METERS], readable)
    assert decide([one.domain for one in order], readable) == first


@given(CHOSEN, st.sets(st.integers(0, 6)))
def test_every_outsider_overlaps_with_a_member_and_every_choice_is_explained(
    meters: list[Meter], silent: set[int]
) -> None:
    domains = [replace(one.domain, why="a reason") for one in meters]
    readable = {one.id for number, one in enumerate(domains) if number not in silent}
    decided = decide(domains, readable)
    members = [thing_of(one) for one in domains if decided[one.id].in_cover]
    for domain in domains:
        if not decided[domain.id].in_cover:
            assert any(overlap(thing_of(domain), member) for member in members)
            assert decided[domain.id].why.startswith("a reason; ")


THINGS = st.builds(
    Thing,
    st.sampled_from(ThingKind),
    st.none() | st.integers(0, 2),
    st.sampled_from(("", "0000:01:00.0", "0000:02:00.0")),
    st.sampled_from(((), ("a", "x"), ("a", "x", "y"), ("a", "z"), ("b", "x"))),
)


@given(THINGS, THINGS)
def test_overlap_is_symmetric_and_holds_of_a_thing_itself(one: Thing, other: Thing) -> None:
    assert overlap(one, one)
    assert overlap(one, other) is overlap(other, one)
