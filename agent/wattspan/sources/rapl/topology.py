"""Whether a zone belongs to the cover, and why: one rule a kind, one clause a verdict.

Which of a host's powercap zones may be summed: a disjoint cover, explained in words.

Pure. A zone is known by what the kernel says of it (its ``name``, its place in the tree, its
control type), never by its directory: directory ids are hexadecimal numbers given out in order
of registration, and move when a package is plugged or a driver is loaded again.

What contains what: ``package`` contains ``core`` and ``uncore``; ``dram`` is a child directory
with a counter of its own, outside the package; ``psys`` contains the packages and much of the
board. A die is part of its package, unless all dies show one and the same counter. The MMIO
interface shows the MSR interface's counters a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.model import (
    MILLISECOND,
    Domain,
    HwType,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    Provenance,
)
from wattspan.sources.rapl.zones import (
    MirrorPair,
    Zone,
    ZoneKind,
    ZoneLocation,
    find_mirrors,
    natural_key,
)


class CoverDecision(NamedTuple):
    in_cover: bool
    why: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class CoverContext:
    """All there is to know when one zone is judged.

    ``domain_of`` maps each place to the id of the domain that stands for it; the other zones
    with the same place are its duplicates. ``vendor`` is ``"intel"``, ``"amd"`` or None.
    """

    domain_of: Mapping[ZoneLocation, str]
    mirrors: frozenset[MirrorPair]
    vendor: str | None

    def of_kind(self, *kinds: ZoneKind) -> list[ZoneLocation]:
        return sorted(
            (p for p in self.domain_of if p.kind in kinds), key=lambda p: natural_key(p.path)
        )

    def at(self, path: str) -> str | None:
        return next((d for place, d in self.domain_of.items() if place.path == path), None)

    def original(self, identity: str) -> str | None:
        """The first domain that shows the same counter as ``identity``, if another one does."""
        here = set(self.domain_of.values())  # of two dies, the first may have gone offline
        others = (a for a, b in self.mirrors if b == identity and a in here)
        return min(others, key=natural_key, default=None)

    @property
    def counts_packages(self) -> bool:
        return any(p.kind in {ZoneKind.PACKAGE, ZoneKind.DIE} for p in self.domain_of)


def decide_cover(identity: str, place: ZoneLocation, context: CoverContext) -> CoverDecision:
    """The verdict on the domain ``identity`` at ``place``."""
    first = context.domain_of[place]
    if first != identity:
        return CoverDecision(
            False, f"shows the counter of {first} through another interface", first
        )
    original = context.original(identity)
    if original is not None:
        return CoverDecision(False, f"shows the same counter as {original}", original)
    return _RULES[place.kind](place, context)


def _package_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    return CoverDecision(
        True,
        f"socket {place.socket}'s own counter, cores and uncore included",
        _covering_platform(context),
    )


def _die_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    package = context.at(f"package-{place.socket}")
    if package is not None:
        return CoverDecision(False, f"part of {package}", package)
    why = f"die {place.die} of socket {place.socket}, a counter of its own"
    return CoverDecision(True, why, _covering_platform(context))


def _dram_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    whole = context.at(f"package-{place.socket}/dram") if place.die is not None else None
    if whole is not None:
        return CoverDecision(False, f"part of {whole}", whole)
    platforms = context.of_kind(ZoneKind.PLATFORM)
    if platforms and not context.counts_packages:
        platform = context.domain_of[platforms[0]]
        return CoverDecision(False, f"{platform} may contain it, and counts in its place", platform)
    if place.above:
        return CoverDecision(
            True, f"memory has a counter of its own: {place.above} does not contain it"
        )
    return CoverDecision(True, "memory has a counter of its own, outside every package")


def _core_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    above = context.at(place.above)
    if context.vendor == "amd":
        # The register is per core, and the driver reads it on the package's first CPU only.
        why = f"one core's counter, not the sum of the socket's cores; {above} contains it"
        return CoverDecision(False, why, above)
    return CoverDecision(False, _included_in(above, "the cores"), above)


def _uncore_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    above = context.at(place.above)
    return CoverDecision(False, _included_in(above, "mostly the integrated graphics"), above)


def _platform_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    platforms = context.of_kind(ZoneKind.PLATFORM)
    if context.counts_packages:
        why = "contains the packages and parts of the board that differ by vendor"
        return CoverDecision(False, why)
    if place != platforms[0]:
        first = context.domain_of[platforms[0]]
        return CoverDecision(False, f"it is not known what it shares with {first}", first)
    return CoverDecision(True, "the whole platform, and no package has a counter")


def _other_rule(place: ZoneLocation, context: CoverContext) -> CoverDecision:
    if place.above:
        above = context.at(place.above)
        return CoverDecision(
            False, _included_in(above, f"{place.path.rpartition('/')[2]!r}"), above
        )
    others = context.of_kind(ZoneKind.OTHER)
    tops = [other for other in others if not other.above]
    if len(tops) == 1 and not context.counts_packages and not context.of_kind(ZoneKind.PLATFORM):
        return CoverDecision(True, f"the only counter here, though {place.path!r} says not of what")
    return CoverDecision(
        False, f"it is not known what {place.path!r} measures and what it contains"
    )


def _included_in(above: str | None, what: str) -> str:
    return f"{what}, contained in {above}" if above else f"{what}, without a package to stand in"


def _covering_platform(context: CoverContext) -> str | None:
    """The platform counter that contains every package, where there is exactly one."""
    platforms = context.of_kind(ZoneKind.PLATFORM)
    return context.domain_of[platforms[0]] if len(platforms) == 1 else None


_RULES: dict[ZoneKind, Callable[[ZoneLocation, CoverContext], CoverDecision]] = {
    ZoneKind.PACKAGE: _package_rule,
    ZoneKind.DIE: _die_rule,
    ZoneKind.DRAM: _dram_rule,
    ZoneKind.CORE: _core_rule,
    ZoneKind.UNCORE: _uncore_rule,
    ZoneKind.PLATFORM: _platform_rule,
    ZoneKind.OTHER: _other_rule,
}

_COUNTER_STEPS = 2**32  # RAPL energy status is a 32-bit field, on every part so far


@dataclass(frozen=True, slots=True)
class ZoneTopology:
    """What the zones are: every zone's domain, the pairs that mirror, the zones without a name.

    ``domain_of`` maps directories to domain ids. ``orphans`` are directories that cannot be
    placed because a zone above them cannot.
    """

    domains: tuple[Domain, ...]
    domain_of: Mapping[str, str]
    mirrors: frozenset[MirrorPair] = frozenset()
    orphans: tuple[str, ...] = ()


def resolve_topology(
    zones: Iterable[Zone],
    *,
    source: str = "rapl",
    provenance: Provenance = Provenance.MEASURED,
    vendor: str | None = None,
    mirrors: frozenset[MirrorPair] = frozenset(),
    resolution: int = MILLISECOND,
) -> ZoneTopology:
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
        if (place := ZoneLocation.of(directory, by_directory)) is not None
    }
    domain_of = _domain_ids(placed, by_directory)
    firsts = _preferred_zones(placed, domain_of)
    pairs = mirrors | find_mirrors(
        (domain_of[directory], placed[directory], by_directory[directory])
        for directory in firsts.values()
    )
    context = CoverContext(
        domain_of={place: domain_of[directory] for place, directory in firsts.items()},
        mirrors=pairs,
        vendor=vendor,
    )
    domains = [
        _domain(
            by_directory[directory],
            placed[directory],
            decide_cover(domain_of[directory], placed[directory], context),
            domain_of[directory],
            source,
            provenance,
            resolution,
        )
        for directory in placed
    ]
    return ZoneTopology(
        domains=tuple(sorted(domains, key=lambda domain: natural_key(domain.id))),
        domain_of=domain_of,
        mirrors=pairs,
        orphans=tuple(sorted(by_directory.keys() - placed.keys(), key=natural_key)),
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


def _domain_ids(placed: Mapping[str, ZoneLocation], zones: Mapping[str, Zone]) -> dict[str, str]:
    """A domain id for each directory: control type and names, which survive renumbering."""
    children = [zone.parent for zone in zones.values()]

    def rank(directory: str) -> tuple[object, ...]:
        # Two zones of one name in one control type (an MSR and a TPMI driver at once): the
        # fuller one comes first, and the directory decides only between equals.
        zone = zones[directory]
        fullness = (-children.count(directory), -(zone.max_range or 0))
        return (*fullness, natural_key(directory))

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


def _preferred_zones(
    placed: Mapping[str, ZoneLocation], domain_of: Mapping[str, str]
) -> dict[ZoneLocation, str]:
    """Of all zones that claim one place, the one that stands for it: MSR and TPMI before MMIO."""
    firsts: dict[ZoneLocation, str] = {}

    def rank(directory: str) -> tuple[object, ...]:
        name = domain_of[directory]
        return (not name.startswith("rapl:"), natural_key(name))

    for directory in sorted(placed, key=rank):
        firsts.setdefault(placed[directory], directory)
    return firsts


_MAX_POWER = {
    # No reading above it is believed. Far above what any part draws: the largest server
    # processors are specified for some 500 W and peak at twice that.
    ZoneKind.PACKAGE: 1_500_000,
    ZoneKind.DIE: 1_500_000,
    ZoneKind.CORE: 1_500_000,
    ZoneKind.UNCORE: 1_500_000,
    ZoneKind.DRAM: 500_000,
    ZoneKind.PLATFORM: 5_000_000,
    ZoneKind.OTHER: 5_000_000,
}


def _max_power(kind: ZoneKind, specified: Milliwatts | None) -> Milliwatts:
    """The plausibility ceiling: generous, and more so where the part itself claims more."""
    return Milliwatts(max(_MAX_POWER[kind], 4 * (specified or 0)))


def _domain(
    zone: Zone,
    place: ZoneLocation,
    verdict: CoverDecision,
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
        max_power=_max_power(place.kind, zone.max_power),
        modulus=modulus,
        resolution=Nanoseconds(resolution),
        why=why,
    )


_HW_TYPE = {ZoneKind.DRAM: HwType.MEMORY, ZoneKind.PLATFORM: HwType.ENCLOSURE}
# Memory traffic per process is not to be had without performance counters, so DRAM is charged
# by CPU time as well, and says that this is a stand-in.
_METHOD = {ZoneKind.PACKAGE: "cpu-time", ZoneKind.DIE: "cpu-time"}
