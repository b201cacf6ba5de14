"""The choice of one measurement of each thing, its reasons, and its changes in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattspan.attribution.cover import PRESENCE, Cover, decide, explain, overlap, thing_of
from wattspan.model import (
    SECOND,
    Domain,
    GpuStatus,
    HwType,
    Instant,
    Nanoseconds,
    Provenance,
    Thing,
    ThingKind,
)

SOCKET, MEMORY, BOARD, SUPPLY = (
    ThingKind.SOCKET,
    ThingKind.MEMORY,
    ThingKind.BOARD,
    ThingKind.SUPPLY,
)
MODULE, PLATFORM, NODE = ThingKind.MODULE, ThingKind.PLATFORM, ThingKind.NODE
MEASURED, DERIVED, ESTIMATED = Provenance.MEASURED, Provenance.DERIVED, Provenance.ESTIMATED
PCI = "0000:0c:00.0"
AT = Instant(SECOND, SECOND)


def domain(
    key: str,
    thing: Thing | None = None,
    provenance: Provenance = MEASURED,
    kind: HwType = HwType.CPU,
    *,
    pci: str = "",
    resource: str | None = None,
    modelled: bool = False,
) -> Domain:
    source = key.partition(":")[0]
    return Domain(
        key, kind, key, source, provenance, pci=pci, resource=resource, measures=thing,
        modelled=modelled, why="a fact",
    )  # fmt: skip


PACKAGE = domain("rapl:package-0", Thing(SOCKET, 0), resource="cpu:0")
MMIO = domain("rapl-mmio:package-0", Thing(SOCKET, 0))
PSYS = domain("rapl:psys", Thing(PLATFORM, 0), kind=HwType.ENCLOSURE)
DRAM = domain("rapl:dram", Thing(MEMORY, 0), kind=HwType.MEMORY)
DIE = domain("rapl:package-0-die-0", Thing(SOCKET, 0, part=("rapl", "die-0")))
RAIL = domain("hwmon:cores", Thing(SOCKET, 0, part=("hwmon", "cores")), DERIVED)
IO = domain("hwmon:io", Thing(SOCKET, 0, part=("hwmon", "io")), DERIVED)
ALL = domain("hwmon:all", Thing(SOCKET), DERIVED)
GUESS = domain("estimate:package-0", Thing(SOCKET, 0), ESTIMATED, modelled=True)
BOARD_BY_LIBRARY = domain("gpu:1", None, DERIVED, HwType.GPU, pci=PCI, resource="gpu:1")
BOARD_BY_SENSOR = domain("hwmon:ppt", Thing(BOARD, pci=PCI), DERIVED, HwType.GPU)
SUPERCHIP = domain("gpu:1/module", Thing(MODULE), MEASURED, HwType.ENCLOSURE)
WALL = domain("wall:0", None, MEASURED, HwType.ENCLOSURE)


@pytest.mark.parametrize(
    ("member", "outsider", "why"),
    [
        (PACKAGE, GUESS, "rapl:package-0 measures the same socket 0, and is measured"),
        (PACKAGE, MMIO, "rapl:package-0 measures the same socket 0"),
        (PACKAGE, PSYS, "it may contain rapl:package-0, which is counted instead"),
        (PACKAGE, DIE, "it may be contained in rapl:package-0, which is counted instead"),
        (PACKAGE, ALL, "it may overlap with rapl:package-0, which is counted instead"),
        (PSYS, GUESS, "rapl:psys measures the platform 0, and is measured"),
        (PSYS, DRAM, "it may be contained in rapl:psys, which is counted instead"),
        (RAIL, GUESS, "hwmon:cores measures the socket 0 cores, and is derived"),
        (ALL, RAIL, "it may be contained in hwmon:all, which is counted instead"),
        (
            replace(PACKAGE, provenance=DERIVED),
            DIE,
            "it may be contained in rapl:package-0, which is counted instead",
        ),
        (DIE, RAIL, "it may overlap with rapl:package-0-die-0, which is counted instead"),
        (BOARD_BY_LIBRARY, BOARD_BY_SENSOR, f"gpu:1 measures the same board {PCI}"),
        (BOARD_BY_LIBRARY, SUPERCHIP, "it may contain gpu:1, which is counted instead"),
        (ALL, SUPERCHIP, "it may contain hwmon:all, which is counted instead"),
        (SUPERCHIP, PSYS, "it may contain gpu:1/module, which is counted instead"),
        (BOARD_BY_LIBRARY, WALL, "it may contain gpu:1, which is counted instead"),
        (WALL, GUESS, "wall:0 measures the node, and is measured"),
    ],
    ids=lambda value: value.id if isinstance(value, Domain) else "",
)
def test_pair_counts_once_with_a_reason(member: Domain, outsider: Domain, why: str) -> None:
    for order in ((member, outsider), (outsider, member)):
        decided = decide(order, {member.id, outsider.id})
        assert decided[member.id] == member
        assert decided[outsider.id] == replace(
            outsider, in_cover=False, resource=None, method="none", why=f"a fact; {why}"
        )


def test_domain_without_readings_gives_way_and_returns_to_the_cover() -> None:
    assert not decide([PACKAGE, GUESS], {GUESS.id})[PACKAGE.id].in_cover
    why = decide([PACKAGE, GUESS], {GUESS.id})[PACKAGE.id].why
    assert why == "a fact; it has no reading, and estimate:package-0 has"
    assert decide([PACKAGE], set()) == {PACKAGE.id: PACKAGE}


@pytest.mark.parametrize(
    "both",
    [
        (RAIL, IO),
        (PACKAGE, DRAM),
        (PACKAGE, domain("rapl:package-1", Thing(SOCKET, 1))),
        (PACKAGE, BOARD_BY_LIBRARY),
        (BOARD_BY_LIBRARY, domain("gpu:2", pci="0000:0d:00.0", kind=HwType.GPU)),
        (domain("x:1", kind=HwType.GPU), domain("x:2", kind=HwType.GPU)),
        (domain("x:1", resource="cpu:0"), domain("x:2", resource="cpu:0")),
        (domain("x:1", resource="cpu:0"), domain("y:1", resource="cpu:1")),
    ],
    ids=lambda both: f"{both[0].id} {both[1].id}",
)
def test_disjoint_things_are_both_counted(both: tuple[Domain, Domain]) -> None:
    assert all(one.in_cover for one in decide(both, {one.id for one in both}).values())


def test_domain_that_its_source_never_sums_stays_outside() -> None:
    core = replace(domain("rapl:core"), in_cover=False)
    assert decide([core, PACKAGE], {core.id, PACKAGE.id})[core.id] is core


def test_member_without_users_is_charged_by_the_users_that_a_library_knows() -> None:
    counter = replace(BOARD_BY_SENSOR, provenance=MEASURED)
    library = replace(BOARD_BY_LIBRARY, method="gpu-sm-utilisation")
    decided = decide([counter, library], {counter.id, library.id})
    assert not decided[library.id].in_cover
    member = decided[counter.id]
    assert (member.resource, member.method) == ("gpu:1", "gpu-sm-utilisation")
    assert member.why == "a fact; charged by the users that gpu knows"


@pytest.mark.parametrize("pci", ["0000:0c:00.0", "00000000:0C:00.0", "0000:0C:00.0"])
def test_address_of_a_board_is_compared_in_one_form(pci: str) -> None:
    assert thing_of(replace(BOARD_BY_LIBRARY, pci=pci)) == Thing(BOARD, pci=PCI)
    assert thing_of(domain("x:1", Thing(BOARD, pci=pci))) == Thing(BOARD, pci=PCI)


def test_address_in_another_pci_domain_is_another_board() -> None:
    first, second = Thing(BOARD, pci=PCI), Thing(BOARD, pci="0009:0c:00.0")
    assert not overlap(first, second)
    assert thing_of(domain("x:1", pci="10000:01:00.0")).pci == "10000:01:00.0"


def test_things_of_different_kinds_are_apart_unless_one_contains_the_other() -> None:
    assert not overlap(Thing(SOCKET, 0), Thing(SUPPLY, part=("x", "1")))
    assert overlap(Thing(MODULE, 0), Thing(SOCKET, 0))
    assert not overlap(Thing(MODULE, 0), Thing(SOCKET, 1))
    assert overlap(Thing(NODE), Thing(SUPPLY))


def test_cover_is_explained_by_thing() -> None:
    listed = {one.id: one for one in (PACKAGE, MMIO, GUESS, DRAM)}
    entries = explain(decide(listed.values(), listed.keys()).values(), listed)
    assert [(str(one.thing), one.member.id) for one in entries] == [
        ("socket 0", "rapl:package-0"),
        ("memory 0", "rapl:dram"),
    ]
    assert [one.id for one in entries[0].others] == ["rapl-mmio:package-0", "estimate:package-0"]


# ------------------------------------------------------------------------- in the course of time


class Time:
    """A cover of a few sources, and the ids of its members after each turn."""

    def __init__(self, **listed: tuple[Domain, ...]) -> None:
        self.listed, self.cover, self.now = dict(listed), Cover(), 0

    def turn(self, *read: Domain, seconds: float = 0.1) -> set[str]:
        self.now += round(seconds * SECOND)
        self.cover.update(self.now, self.listed, {one.id for one in read})
        own = self.cover.domains.values()
        return {one.id for domains in own for one in domains if one.in_cover}


def test_member_leaves_at_its_next_reading_and_the_successor_joins_then() -> None:
    time = Time(estimate=(GUESS,), rapl=(PACKAGE,))
    assert time.turn(GUESS) == {GUESS.id}
    assert time.turn(PACKAGE) == {GUESS.id}
    assert time.turn(PACKAGE) == {GUESS.id}
    assert time.turn(PACKAGE, GUESS) == {PACKAGE.id}


def test_lost_member_is_replaced_after_the_patience() -> None:
    time = Time(estimate=(GUESS,), rapl=(PACKAGE,))
    assert time.turn(PACKAGE, GUESS) == {PACKAGE.id}
    assert time.turn(GUESS, seconds=PRESENCE / SECOND) == {PACKAGE.id}
    assert time.turn(GUESS) == {GUESS.id}


def test_resting_member_is_replaced_after_its_rest_and_the_patience() -> None:
    time = Time(estimate=(GUESS,), rapl=(replace(PACKAGE, rest=Nanoseconds(33 * SECOND)),))
    assert time.turn(PACKAGE, GUESS) == {PACKAGE.id}
    assert time.turn(GUESS, seconds=PRESENCE / SECOND + 33) == {PACKAGE.id}
    assert time.turn(GUESS) == {GUESS.id}


def test_unlisted_member_is_replaced_at_once() -> None:
    time = Time(estimate=(GUESS,), rapl=(PACKAGE,))
    time.turn(PACKAGE, GUESS)
    time.listed["rapl"] = ()
    assert time.turn() == {GUESS.id}


def test_domains_are_the_same_tuple_until_they_change() -> None:
    time = Time(estimate=(GUESS,), rapl=(PACKAGE,))
    time.turn(PACKAGE, GUESS)
    before = dict(time.cover.domains)
    assert time.cover.update(time.now + 1, time.listed, {PACKAGE.id}) == frozenset()
    time.listed["estimate"] = (GUESS, DRAM)
    assert time.cover.update(time.now + 2, time.listed, set()) == {"estimate"}
    assert time.cover.domains["rapl"] is before["rapl"]


def test_id_belongs_to_the_first_source_that_lists_it() -> None:
    time = Time(rapl=(PACKAGE,), plugin=(replace(PACKAGE, source="plugin"), DRAM))
    time.turn(PACKAGE, DRAM)
    assert time.cover.foreign == {"plugin": {PACKAGE.id}}
    assert time.cover.domains["plugin"] == (DRAM,)


def test_status_of_a_board_is_shown_once() -> None:
    shim = replace(BOARD_BY_LIBRARY, id="nvml:1", resource="nvml:1")
    other = domain("gpu:2", kind=HwType.GPU, pci="0000:0d:00.0")
    time = Time(gpu=(BOARD_BY_LIBRARY, other), nvml=(shim,))
    statuses = [GpuStatus(one.id, AT) for one in (BOARD_BY_LIBRARY, other, shim)]
    time.turn(BOARD_BY_LIBRARY, shim)
    assert time.cover.statuses(statuses) == tuple(statuses[:2])
    assert time.cover.statuses(statuses[2:]) == tuple(statuses[2:])
    time.listed["nvml"] = ()
    time.turn()
    assert time.cover.statuses(statuses[:2]) == tuple(statuses[:2])
