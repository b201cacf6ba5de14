"""For any host layout, its cover counts every joule once, and its ids are stable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
from testbed.covers import cover_of, decided

from wattspan.sources.rapl.topology import Zone, ZoneTopology, resolve_topology


@dataclass(frozen=True)
class Real:
    """A zone as the kernel shows it, and its true counter: names of hardware parts."""

    name: str
    parts: frozenset[str]
    samples: tuple[int, ...] = ()
    below: tuple[Real, ...] = ()
    control_type: str = "intel-rapl"


@dataclass(frozen=True)
class Machine:
    tops: tuple[Real, ...]
    packages: frozenset[str] = field(default_factory=frozenset)  # parts a cover must count


def sampled(origin: int, turn: int) -> tuple[int, ...]:
    """Three samples of a counter that started at ``origin``; ``turn`` orders them in a round."""
    return tuple(origin + 100 * turn_of + turn for turn_of in range(3))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Sockets of one or more dies, mirrored or not, with and without memory, psys and MMIO."""
    tops: list[Real] = []
    required: set[str] = set()
    counter = 1
    for socket in draw(st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True)):
        dies = draw(st.integers(1, 4))
        mirrored = dies > 1 and draw(st.booleans())
        memory, cores = draw(st.booleans()), draw(st.booleans())
        mmio = dies == 1 and draw(st.booleans())
        whole = frozenset(f"die {socket}.{die}" for die in range(dies))
        required |= whole
        shared = counter * 10**9
        for die in range(dies):
            counter += 1
            origin = shared if mirrored else counter * 10**9
            parts = whole if mirrored else frozenset({f"die {socket}.{die}"})
            below = []
            if memory:
                below.append(Real("dram", frozenset({f"dram {p}" for p in parts}),
                                  sampled(origin + 10**8, die)))  # fmt: skip
                required |= below[-1].parts
            if cores:
                below.append(Real("core", parts))
                below.append(Real("uncore", parts))
            name = f"package-{socket}" if dies == 1 else f"package-{socket}-die-{die}"
            top = Real(name, parts, sampled(origin, die), tuple(below))
            tops.append(top)
            if mmio:
                tops.append(replace(top, control_type="intel-rapl-mmio"))
    if draw(st.booleans()):
        tops.append(Real("psys", frozenset(required | {"board"})))
    return Machine(tuple(tops), frozenset(required))


def registered(machine: Machine, order: list[int]) -> tuple[list[Zone], dict[str, frozenset[str]]]:
    """The zones with directories in ``order``, and the true counter of each."""
    zones, parts = [], {}
    for number, index in enumerate(order):
        top = machine.tops[index]
        directory = f"{top.control_type}:{number:x}"
        zones.append(Zone(directory, top.name, 10**12, None, top.samples))
        parts[directory] = top.parts
        for position, real in enumerate(top.below):
            zones.append(Zone(f"{directory}:{position}", real.name, 10**12, None, real.samples))
            parts[f"{directory}:{position}"] = real.parts
    return zones, parts


def members(topology: ZoneTopology) -> list[str]:
    return sorted(cover_of(topology.domains))


MACHINE_AND_ORDER = machines().flatmap(
    lambda machine: st.tuples(st.just(machine), st.permutations(range(len(machine.tops))))
)


@given(MACHINE_AND_ORDER)
def test_cover_counts_every_part_exactly_once(case: tuple[Machine, list[int]]) -> None:
    machine, order = case
    zones, parts = registered(machine, order)
    topology = resolve_topology(zones)
    directory_of = {identity: directory for directory, identity in topology.domain_of.items()}
    counted = [part for member in members(topology) for part in parts[directory_of[member]]]
    assert sorted(counted) == sorted(machine.packages)


@given(MACHINE_AND_ORDER, st.randoms(use_true_random=False))
def test_ids_and_cover_survive_renumbering_and_order(
    case: tuple[Machine, list[int]], random: object
) -> None:
    machine, order = case
    zones, _ = registered(machine, order)
    again, _ = registered(machine, list(range(len(machine.tops))))
    random.shuffle(zones)  # type: ignore[attr-defined]
    assert resolve_topology(zones).domains == resolve_topology(again).domains


@given(MACHINE_AND_ORDER)
def test_cover_members_are_disjoint_and_only_they_are_charged(
    case: tuple[Machine, list[int]],
) -> None:
    machine, order = case
    domains = decided(resolve_topology(registered(machine, order)[0]).domains)
    for domain in domains.values():
        above = domain.parent
        seen = {domain.id}
        while above is not None:
            assert above in domains, "every parent is a domain itself"
            assert above not in seen, "nothing contains itself"
            assert not (domain.in_cover and domains[above].in_cover)
            seen.add(above)
            above = domains[above].parent
        assert (domain.resource is not None) == domain.in_cover
        assert domain.why


ZONES = st.builds(
    Zone,
    directory=st.from_regex(
        r"(intel-rapl|intel-rapl-mmio|x):[0-9a-f](:[0-3]){0,2}", fullmatch=True
    ),
    name=st.one_of(
        st.sampled_from(["package-0", "package-1", "package-0-die-0", "package-0-die-1"]),
        st.sampled_from(["psys", "psys-1", "core", "uncore", "dram", "soc", "package-", "0"]),
        st.text(st.characters(codec="ascii", exclude_characters="/"), min_size=1, max_size=12),
    ),
    max_range=st.none() | st.integers(-1, 2**63),
    max_power=st.none() | st.integers(0, 10**7),
    samples=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
)


@given(st.lists(ZONES, max_size=12, unique_by=lambda zone: zone.directory))
def test_zones_have_unique_ids_and_a_flat_cover(zones: list[Zone]) -> None:
    topology = resolve_topology(zones)
    ids = [domain.id for domain in topology.domains]
    assert len(set(ids)) == len(ids)
    assert sorted([*topology.domain_of, *topology.orphans]) == sorted(z.directory for z in zones)
    inside = {domain.id: domain.parent for domain in topology.domains}
    for member in members(topology):
        above = inside[member]
        while above is not None:
            assert above not in members(topology)
            above = inside[above]


@given(st.lists(ZONES, max_size=12, unique_by=lambda zone: zone.directory))
def test_known_mirrors_are_retained(zones: list[Zone]) -> None:
    first = resolve_topology(zones)
    blind = [replace(zone, samples=()) for zone in zones]
    again = resolve_topology(blind, mirrors=first.mirrors)
    assert members(again) == members(first)
