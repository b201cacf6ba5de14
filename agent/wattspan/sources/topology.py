"""Which of a host's powercap zones may be summed: a disjoint cover, explained in words.

Pure. A zone is known by what the kernel says of it (its ``name``, its place in the tree, its
control type), never by its directory: directory ids are hexadecimal numbers given out in order
of registration, and move when a package is plugged or a driver is loaded again.

What contains what: ``package`` contains ``core`` and ``uncore``; ``dram`` is a child directory
with a counter of its own, outside the package; ``psys`` contains the packages and much of the
board. A die is part of its package, unless all dies show one and the same counter. The MMIO
interface shows the MSR interface's counters a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wattspan.model import (
    MILLISECOND,
    Domain,
    HwType,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    Provenance,
)
from wattspan.sources.mirrors import Pair, find_mirrors
from wattspan.sources.verdicts import Context, Verdict, judge
from wattspan.sources.zones import Kind, Place, Zone, natural

_COUNTER_STEPS = 2**32  # RAPL energy status is a 32-bit field, on every part so far


@dataclass(frozen=True, slots=True)
class Topology:
    """What the zones are: every zone's domain, the pairs that mirror, the zones without a name.

    ``domain_of`` maps directories to domain ids. ``orphans`` are directories that cannot be
    placed because a zone above them cannot.
    """

    domains: tuple[Domain, ...]
    domain_of: Mapping[str, str]
    mirrors: frozenset[Pair] = frozenset()
    orphans: tuple[str, ...] = ()


def resolve(
    zones: Iterable[Zone],
    *,
    source: str = "rapl",
    provenance: Provenance = Provenance.MEASURED,
    vendor: str | None = None,
    mirrors: frozenset[Pair] = frozenset(),
    resolution: int = MILLISECOND,
) -> Topology:
    """The domains behind ``zones``, with the cover chosen and every choice explained.

    The answer does not depend on the order of ``zones`` nor on their directory ids, as far as
    names tell the zones apart. ``mirrors`` are pairs of domain ids already known to show one
    counter: knowledge that outlives the moment when both could be compared. ``resolution`` is how
    often their counters move: every millisecond or so, on a real host.
    """
    by_directory = {zone.directory: zone for zone in zones}
    placed = {
        directory: place
        for directory in by_directory
        if (place := Place.of(directory, by_directory)) is not None
    }
    domain_of = _name_all(placed, by_directory)
    firsts = _first_of_each(placed, domain_of)
    pairs = mirrors | find_mirrors(
        (domain_of[directory], placed[directory], by_directory[directory])
        for directory in firsts.values()
    )
    context = Context(
        domain_of={place: domain_of[directory] for place, directory in firsts.items()},
        mirrors=pairs,
        vendor=vendor,
    )
    domains = [
        _domain(
            by_directory[directory],
            placed[directory],
            judge(domain_of[directory], placed[directory], context),
            domain_of[directory],
            source,
            provenance,
            resolution,
        )
        for directory in placed
    ]
    return Topology(
        domains=tuple(sorted(domains, key=lambda domain: natural(domain.id))),
        domain_of=domain_of,
        mirrors=pairs,
        orphans=tuple(sorted(by_directory.keys() - placed.keys(), key=natural)),
    )


def modulus_of(max_range: int | None) -> Microjoules | None:
    """Where a counter wraps to zero: one step beyond the largest value it can show.

    The kernel publishes the range as the unit times (2**32 - 1), so the counter's full turn is
    range * 2**32 / (2**32 - 1).
    """
    if max_range is None or max_range <= 0:
        return None
    step = (2 * max_range + _COUNTER_STEPS - 1) // (2 * (_COUNTER_STEPS - 1))  # rounded
    return Microjoules(max_range + max(1, step))


def _name_all(placed: Mapping[str, Place], zones: Mapping[str, Zone]) -> dict[str, str]:
    """A domain id for each directory: control type and names, which survive renumbering."""
    children = [zone.parent for zone in zones.values()]

    def rank(directory: str) -> tuple[object, ...]:
        # Two zones of one name in one control type (an MSR and a TPMI driver at once): the
        # fuller one comes first, and the directory decides only between equals.
        zone = zones[directory]
        fullness = (-children.count(directory), -(zone.max_range or 0))
        return (*fullness, natural(directory))

    names: dict[str, str] = {}
    for directory in sorted(placed, key=rank):
        prefix = zones[directory].control_type.removeprefix("intel-")
        plain = f"{prefix}:{placed[directory].path}"
        taken, name, again = set(names.values()), plain, 1
        while name in taken:
            again += 1
            name = f"{plain}#{again}"
        names[directory] = name
    return names


def _first_of_each(placed: Mapping[str, Place], domain_of: Mapping[str, str]) -> dict[Place, str]:
    """Of all zones that claim one place, the one that stands for it: MSR and TPMI before MMIO."""
    firsts: dict[Place, str] = {}

    def rank(directory: str) -> tuple[object, ...]:
        name = domain_of[directory]
        return (not name.startswith("rapl:"), natural(name))

    for directory in sorted(placed, key=rank):
        firsts.setdefault(placed[directory], directory)
    return firsts


_MOST_POWER = {
    # No reading above it is believed. Far above what any part draws: the largest server
    # processors are specified for some 500 W and peak at twice that.
    Kind.PACKAGE: 1_500_000,
    Kind.DIE: 1_500_000,
    Kind.CORE: 1_500_000,
    Kind.UNCORE: 1_500_000,
    Kind.DRAM: 500_000,
    Kind.PLATFORM: 5_000_000,
    Kind.OTHER: 5_000_000,
}


def _most_power(kind: Kind, specified: Milliwatts | None) -> Milliwatts:
    """The plausibility ceiling: generous, and more so where the part itself claims more."""
    return Milliwatts(max(_MOST_POWER[kind], 4 * (specified or 0)))


def _domain(
    zone: Zone,
    place: Place,
    verdict: Verdict,
    identity: str,
    source: str,
    provenance: Provenance,
    resolution: int,
) -> Domain:
    modulus = modulus_of(zone.max_range)
    why = verdict.why
    if modulus is None:
        why += "; its range is unknown, so a wrap shows as a reset"
    return Domain(
        id=identity,
        hw_type=_HW_TYPE.get(place.kind, HwType.CPU),
        name=place.path,
        source=source,
        provenance=provenance,
        in_cover=verdict.in_cover,
        parent=verdict.parent,
        resource=place.resource if verdict.in_cover else None,
        method=_METHOD.get(place.kind, "cpu-time-proxy") if verdict.in_cover else "none",
        max_power=_most_power(place.kind, zone.max_power),
        modulus=modulus,
        resolution=Nanoseconds(resolution),
        why=why,
    )


_HW_TYPE = {Kind.DRAM: HwType.MEMORY, Kind.PLATFORM: HwType.ENCLOSURE}
# Memory traffic per process is not to be had without performance counters, so DRAM is charged
# by CPU time as well, and says that this is a stand-in.
_METHOD = {Kind.PACKAGE: "cpu-time", Kind.DIE: "cpu-time"}
