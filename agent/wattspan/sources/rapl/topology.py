"""Powercap zones and the things that they measure, by which the cover chooses among them.

Pure. A zone is known by the kernel's ``name``, its place in the tree and its control type, never
by its directory: directory ids are hexadecimal numbers in order of registration, and change when
a package is plugged or a driver is loaded again.

Containment: ``package`` contains ``core`` and ``uncore``; ``dram`` is a child directory with a
counter of its own, outside the package; ``psys`` contains the packages and much of the board. A
die is part of its package, unless all dies show one and the same counter. The MMIO interface
shows the MSR interface's counters a second time.

Mirrors: some processors have one energy counter for the package and let every die read it; the
kernel then shows a zone for each die, and their sum counts everything twice or four times. Names
do not distinguish these from dies with counters of their own. Values do: read in turns, a, b, a,
b, a, one counter gives one non-decreasing sequence, within the joule that it can gain meanwhile.
Two counters of 262 kJ do so by chance about once in a hundred thousand hosts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

from wattspan.model import (
    CPU_TIME,
    CPU_TIME_PROXY,
    MILLISECOND,
    Domain,
    HwType,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    Provenance,
    Thing,
    ThingKind,
)
from wattspan.util.text import natural_key


@dataclass(frozen=True, slots=True)
class Zone:
    """One zone as the kernel shows it.

    ``directory`` is the kernel's name for it (``intel-rapl:0:1``), ``name`` the content of its
    ``name`` file (``dram``). ``max_range`` is ``max_energy_range_uj``; None if it is missing or
    invalid. ``max_power`` is the largest power of its constraints. ``samples`` are counter values
    taken in rounds over all zones, for the detection of mirrors.
    """

    directory: str
    name: str
    max_range: int | None = None
    max_power: Milliwatts | None = None
    samples: tuple[int, ...] = ()

    @property
    def control_type(self) -> str:
        return self.directory.partition(":")[0]

    @property
    def parent(self) -> str | None:
        """The directory of the zone above; None for a zone directly under its control type."""
        above = self.directory.rpartition(":")[0]
        return above if ":" in above else None


class ZoneKind(StrEnum):
    """The subject of a zone's counter, as far as its name shows it."""

    PACKAGE = "package"
    DIE = "die"
    CORE = "core"
    UNCORE = "uncore"
    DRAM = "dram"
    PLATFORM = "psys"
    OTHER = "other"


_PACKAGE = re.compile(r"package-(\d+)")
_DIE = re.compile(r"package-(\d+)-die-(\d+)")
_PLATFORM = re.compile(r"psys(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class ZoneLocation:
    """The place of a zone in the hardware: ``path`` is its names from the top, ``package-0/dram``.

    Zones of different control types that show the same counter have equal places.
    """

    path: str
    kind: ZoneKind
    socket: int | None = None
    die: int | None = None

    @classmethod
    def of(cls, directory: str, zones: Mapping[str, Zone]) -> ZoneLocation | None:
        """The place of ``directory``; None if a zone above it is not among ``zones``."""
        names: list[str] = []
        above: str | None = directory
        while above is not None:
            zone = zones.get(above)
            if zone is None:
                return None
            names.insert(0, zone.name)
            above = zone.parent
        kind, socket, die = _parse_top_level(names[0])
        if len(names) > 1:
            kind = _SUBZONE_KINDS.get(names[-1], ZoneKind.OTHER)
        return cls("/".join(names), kind, socket, die)

    @property
    def above(self) -> str:
        """The path of the zone above; empty at the top."""
        return self.path.rpartition("/")[0]

    def resource(self, sockets: Mapping[int, int | None]) -> str | None:
        """The stream of usage by which its energy is charged; None for a package without CPUs.

        ``sockets`` has the number of the socket of each package; others have their id.
        """
        charged_by_socket = self.kind in {ZoneKind.PACKAGE, ZoneKind.DIE, ZoneKind.DRAM}
        if not charged_by_socket or self.socket is None:
            return "cpu"
        number = sockets.get(self.socket, self.socket)
        return None if number is None else f"cpu:{number}"


_SUBZONE_KINDS = {"core": ZoneKind.CORE, "uncore": ZoneKind.UNCORE, "dram": ZoneKind.DRAM}


def _parse_top_level(name: str) -> tuple[ZoneKind, int | None, int | None]:
    """Kind, socket and die of a zone directly under its control type."""
    if match := _DIE.fullmatch(name):
        return ZoneKind.DIE, int(match[1]), int(match[2])
    if match := _PACKAGE.fullmatch(name):
        return ZoneKind.PACKAGE, int(match[1]), None
    if match := _PLATFORM.fullmatch(name):
        # The kernel numbers the platform counter of every package but the first.
        return ZoneKind.PLATFORM, int(match[1] or 0), None
    return _SUBZONE_KINDS.get(name, ZoneKind.OTHER), None, None


MirrorPair = tuple[str, str]  # ids of two domains; the first represents both

_TOLERANCE = 1_000_000  # microjoules: some 3 ms at 350 W, far longer than the rounds take


def is_same_counter(first: Sequence[int], second: Sequence[int]) -> bool:
    """True if samples taken in turns (first, second, first, second, ...) are of one counter.

    One undisturbed sequence a <= b <= a' is enough: a writer that is not atomic over both zones (an
    emulated host) may spoil one. A counter that is still at zero proves nothing.
    """
    turns = [value for pair in zip(first, second, strict=False) for value in pair]
    return any(
        0 < low <= between <= high <= low + _TOLERANCE
        for low, between, high in zip(turns, turns[1:], turns[2:], strict=False)
    )


def find_mirrors(zones: Iterable[tuple[str, ZoneLocation, Zone]]) -> frozenset[MirrorPair]:
    """The pairs among ``zones`` (domain id, place, zone) that show one counter.

    Only zones in different dies of one socket with the same name are compared: no other zones are
    mirrored in any known hardware, and every comparison can be wrong by chance.
    """
    ordered = sorted(
        (entry for entry in zones if entry[1].die is not None),
        key=lambda entry: (entry[1].socket, entry[1].die, entry[1].path),
    )
    return frozenset(
        (identity, other_identity)
        for (identity, place, zone), (other_identity, other_place, other) in combinations(
            ordered, 2
        )
        if _comparable(place, other_place) and is_same_counter(zone.samples, other.samples)
    )


def _comparable(one: ZoneLocation, other: ZoneLocation) -> bool:
    return (
        one.socket == other.socket
        and one.die != other.die
        and one.kind is other.kind
        and one.kind in {ZoneKind.DIE, ZoneKind.DRAM}
    )


class ZoneMeaning(NamedTuple):
    """The thing that a zone measures, the zone that contains or repeats it, and one clause.

    A zone that is not ``summed`` has a part of a thing that others have as a whole, or an unknown
    one.
    """

    thing: Thing | None
    why: str
    parent: str | None = None
    summed: bool = True


@dataclass(frozen=True, slots=True)
class ZoneContext:
    """The other zones.

    ``domain_of`` maps each place to the id of its representative domain; the other zones with the
    same place are its duplicates. ``vendor`` is ``"intel"``, ``"amd"`` or None.
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

    def original(self, identity: str) -> ZoneLocation | None:
        """The place of the first domain that shows the same counter, if it is not ``identity``."""
        places = {domain_id: place for place, domain_id in self.domain_of.items()}
        # The first of two dies may have gone offline.
        others = (a for a, b in self.mirrors if b == identity and a in places)
        first = min(others, key=natural_key, default=None)
        return None if first is None else places[first]


def meaning_of_zone(identity: str, place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    """The meaning of the domain ``identity`` at ``place``."""
    first = context.domain_of[place]
    original = context.original(first)
    meaning = _RULES[place.kind](original or place, context)
    if original is not None:
        other = context.domain_of[original]
        meaning = meaning._replace(why=f"shows the same counter as {other}", parent=other)
    if first != identity:
        why = f"shows the counter of {first} through another interface"
        meaning = meaning._replace(why=why, parent=first)
    return meaning


def _package_rule(place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    why = f"socket {place.socket}'s own counter, cores and uncore included"
    return ZoneMeaning(Thing(ThingKind.SOCKET, place.socket), why, _platform_of(place, context))


def _die_rule(place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    why = f"die {place.die} of socket {place.socket}, a counter of its own"
    above = context.at(f"package-{place.socket}") or _platform_of(place, context)
    return ZoneMeaning(Thing(ThingKind.SOCKET, place.socket, part=_die(place)), why, above)


def _dram_rule(place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    whole = context.at(f"package-{place.socket}/dram") if place.die is not None else None
    why = "memory has a counter of its own, outside every package"
    if place.above:
        why = f"memory has a counter of its own: {place.above} does not contain it"
    return ZoneMeaning(Thing(ThingKind.MEMORY, place.socket, part=_die(place)), why, whole)


def _die(place: ZoneLocation) -> tuple[str, ...]:
    return () if place.die is None else (NAME, f"die-{place.die}")


def _contained_rule(place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    above = context.at(place.above)
    if place.kind is ZoneKind.CORE and context.vendor == "amd":
        # The register is per core, and the driver reads it on the package's first CPU only.
        why = f"one core's counter, not the sum of the socket's cores; {above} contains it"
    else:
        part = _PARTS.get(place.kind) or repr(place.path.rpartition("/")[2])
        where = f"contained in {above}" if above else "without a package that contains it"
        why = f"{part}, {where}"
    return ZoneMeaning(None, why, above, summed=False)


def _platform_rule(place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    why = "the packages and parts of the board that differ by vendor"
    return ZoneMeaning(Thing(ThingKind.PLATFORM, place.socket), why)


def _other_rule(place: ZoneLocation, context: ZoneContext) -> ZoneMeaning:
    if place.above:
        return _contained_rule(place, context)
    tops = [other for other in context.of_kind(ZoneKind.OTHER) if not other.above]
    if len(tops) > 1:
        why = f"the subject and the contents of {place.path!r} are unknown"
        return ZoneMeaning(None, why, summed=False)
    thing = Thing(ThingKind.PLATFORM, part=(NAME, place.path))
    return ZoneMeaning(thing, f"{place.path!r} does not name its subject")


def _platform_of(place: ZoneLocation, context: ZoneContext) -> str | None:
    """The platform counter that contains a package: the only one, or that of its socket."""
    platforms = context.of_kind(ZoneKind.PLATFORM)
    if len(platforms) > 1:
        platforms = [one for one in platforms if one.socket == place.socket]
    return context.domain_of[platforms[0]] if len(platforms) == 1 else None


_PARTS = {ZoneKind.CORE: "the cores", ZoneKind.UNCORE: "mostly the integrated graphics"}
_RULES: dict[ZoneKind, Callable[[ZoneLocation, ZoneContext], ZoneMeaning]] = {
    ZoneKind.PACKAGE: _package_rule,
    ZoneKind.DIE: _die_rule,
    ZoneKind.DRAM: _dram_rule,
    ZoneKind.CORE: _contained_rule,
    ZoneKind.UNCORE: _contained_rule,
    ZoneKind.PLATFORM: _platform_rule,
    ZoneKind.OTHER: _other_rule,
}

NAME = "rapl"
_COUNTER_STEPS = 2**32  # RAPL energy status is a 32-bit field, on every part so far


@dataclass(frozen=True, slots=True)
class ZoneTopology:
    """All zones: every zone's domain, the mirrored pairs, and the zones without a place.

    ``domain_of`` maps directories to domain ids. ``orphans`` are directories without a place,
    because a zone above them has none. ``without_cpus`` are domains of packages without CPUs.
    """

    domains: tuple[Domain, ...]
    domain_of: Mapping[str, str]
    mirrors: frozenset[MirrorPair] = frozenset()
    orphans: tuple[str, ...] = ()
    without_cpus: frozenset[str] = frozenset()


def resolve_topology(
    zones: Iterable[Zone],
    *,
    provenance: Provenance = Provenance.MEASURED,
    vendor: str | None = None,
    mirrors: frozenset[MirrorPair] = frozenset(),
    resolution: int = MILLISECOND,
    model: str = "",
    sockets_of: Callable[[Collection[int]], Mapping[int, int | None]] = lambda _: {},
) -> ZoneTopology:
    """The domains behind ``zones``, with the things that they measure.

    The result does not depend on the order of ``zones`` nor on their directory ids, as far as names
    distinguish the zones. ``mirrors`` are pairs of domain ids already known to show one counter:
    the knowledge outlives the time at which both could be compared. ``resolution`` is the interval
    of the counters' moves: about a millisecond on a real host. ``model`` is that of the processor.
    ``sockets_of`` returns the number of the socket of each package, None of one without CPUs.
    """
    by_directory = {zone.directory: zone for zone in zones}
    placed = {
        directory: place
        for directory in by_directory
        if (place := ZoneLocation.of(directory, by_directory)) is not None
    }
    sockets = sockets_of({one.socket for one in placed.values() if one.socket is not None})
    domain_of = _domain_ids(placed, by_directory)
    firsts = _preferred_zones(placed, domain_of)
    pairs = mirrors | find_mirrors(
        (domain_of[directory], placed[directory], by_directory[directory])
        for directory in firsts.values()
    )
    context = ZoneContext(
        domain_of={place: domain_of[directory] for place, directory in firsts.items()},
        mirrors=pairs,
        vendor=vendor,
    )

    def domain(directory: str) -> Domain:
        zone, place, identity = by_directory[directory], placed[directory], domain_of[directory]
        meaning = meaning_of_zone(identity, place, context)
        modulus = modulus_of(zone.max_range)
        unknown = "" if modulus else "; its range is unknown, so a wrap shows as a reset"
        resource = place.resource(sockets) if meaning.summed else None
        return Domain(
            id=identity,
            hw_type=_HW_TYPE.get(place.kind, HwType.CPU),
            name=place.path,
            source=NAME,
            provenance=provenance,
            in_cover=meaning.summed,
            parent=meaning.parent,
            resource=resource,
            method=_METHOD.get(place.kind, CPU_TIME_PROXY) if resource else "none",
            max_power=_max_power(place.kind, zone.max_power or 0),
            modulus=modulus,
            resolution=Nanoseconds(resolution),
            why=meaning.why + unknown,
            model=model,
            measures=_numbered(meaning.thing, sockets),
            moves_with=_moves_with(place, context, sockets),
        )

    return ZoneTopology(
        domains=tuple(sorted(map(domain, placed), key=lambda domain: natural_key(domain.id))),
        domain_of=domain_of,
        mirrors=pairs,
        orphans=tuple(sorted(by_directory.keys() - placed.keys(), key=natural_key)),
        without_cpus=frozenset(
            domain_of[directory] for directory, one in placed.items() if not one.resource(sockets)
        ),
    )


def _numbered(thing: Thing | None, sockets: Mapping[int, int | None]) -> Thing | None:
    """``thing`` with the number of its socket, by which other sources name it, for the id."""
    if thing is None or thing.socket is None:
        return thing
    number = sockets.get(thing.socket)
    return thing if number is None else thing._replace(socket=number)


def _moves_with(
    place: ZoneLocation, context: ZoneContext, sockets: Mapping[int, int | None]
) -> str:
    """The usage that must show in the counter at ``place``; "" if none does.

    Graphics may be off, and the core's counter of AMD is that of one core.
    """
    if place.kind in (ZoneKind.UNCORE, ZoneKind.OTHER):
        return ""
    if place.kind is ZoneKind.CORE and context.vendor == "amd":
        return ""
    number = None if place.socket is None else sockets.get(place.socket, place.socket)
    return "cpu" if number is None or place.kind is ZoneKind.PLATFORM else f"cpu:{number}"


def modulus_of(max_range: int | None) -> Microjoules | None:
    """The modulus at which a counter wraps to zero: one step beyond its largest value.

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
    """The representative of all zones with one place: MSR and TPMI before MMIO."""
    firsts: dict[ZoneLocation, str] = {}

    def rank(directory: str) -> tuple[object, ...]:
        name = domain_of[directory]
        return (not name.startswith("rapl:"), natural_key(name))

    for directory in sorted(placed, key=rank):
        firsts.setdefault(placed[directory], directory)
    return firsts


_MAX_POWER = {
    # Higher power is implausible. Far above what any part draws: the largest server
    # processors are specified for some 500 W and peak at twice that.
    ZoneKind.PACKAGE: 1_500_000,
    ZoneKind.DIE: 1_500_000,
    ZoneKind.CORE: 1_500_000,
    ZoneKind.UNCORE: 1_500_000,
    ZoneKind.DRAM: 500_000,
    ZoneKind.PLATFORM: 5_000_000,
    ZoneKind.OTHER: 5_000_000,
}


def _max_power(kind: ZoneKind, claimed: int) -> Milliwatts:
    """The largest plausible power: generous, and more so where the part itself claims more.

    A limit beyond every part claims nothing: boards write 4096 W for "unlimited", or leave noise.
    """
    most = _MAX_POWER[kind]
    return Milliwatts(max(most, 4 * claimed if claimed <= most else 0))


_HW_TYPE = {ZoneKind.DRAM: HwType.MEMORY, ZoneKind.PLATFORM: HwType.ENCLOSURE}
# Memory traffic per process requires performance counters. Without them DRAM is
# charged by CPU time, and its method is labelled as a proxy.
_METHOD = {ZoneKind.PACKAGE: CPU_TIME, ZoneKind.DIE: CPU_TIME}
