"""The cover: one measurement of each physical thing, so that no joule is summed twice.

A source states of each domain the thing that it measures, and whether it may be summed at all. Two
things *overlap* if a joule of one may be a joule of the other; members of the cover never overlap.
Candidates are taken in this order, each unless it overlaps with one that was taken before:

1. A domain with readings before a domain without: a denied or frozen counter measures nothing.
   Without another measurement of its thing it stays a member, whose energy is unknown.
2. A sensor before a model of load.
3. Parts of the machine (sockets, boards, memory) before what contains them: a superchip's module,
   the platform, the node. Memory comes last, because a platform may contain it. A module that is
   the only measurement of its GPU, and so knows users, is like a board.
4. A whole before its parts, which may leave out some of it.
5. A counter before integrated power, and one socket before all sockets.
6. A domain with known users before a domain without, and then the order of ids.

The decision depends on the present domains and their readings alone, not on their order in time.
:class:`Cover` makes it again whenever they change. A member with readings leaves at a reading, and
its successor joins afterwards: in between, the thing is not counted, and never counted twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from wattspan.model import (
    SECOND,
    Domain,
    GpuStatus,
    HwType,
    Provenance,
    Thing,
    ThingKind,
)

PRESENCE = 10 * SECOND
"""A domain without a reading for longer has none, as in the ledger, where the time is a gap."""

_AGGREGATES = (ThingKind.MODULE, ThingKind.PLATFORM, ThingKind.NODE)
_SIZES = {kind: size for size, kind in enumerate(_AGGREGATES, start=1)}
_LEVELS = {kind: level for level, kind in enumerate((*_AGGREGATES, ThingKind.MEMORY), start=1)}
_SOCKET = re.compile(r"cpu(?::(\d+))?", re.ASCII)
_OWN_THINGS = {HwType.CPU: ThingKind.SOCKET, HwType.MEMORY: ThingKind.MEMORY}


def thing_of(domain: Domain) -> Thing:
    """The thing that ``domain`` measures; by its address, type and resource if it does not say.

    An enclosure is the whole machine. Other domains of one source are different things, and those
    of a processor are parts of the socket by which they are charged.
    """
    if domain.measures is not None:
        return domain.measures._replace(pci=_address(domain.measures.pci))
    if domain.pci:
        return Thing(ThingKind.BOARD, pci=_address(domain.pci))
    if domain.hw_type is HwType.ENCLOSURE and domain.in_cover:
        return Thing(ThingKind.NODE)
    named = _SOCKET.fullmatch(domain.resource or "")
    socket = int(named[1]) if named is not None and named[1] else None
    kind = _OWN_THINGS.get(domain.hw_type, ThingKind.SUPPLY)
    return Thing(kind, socket, part=(domain.source, domain.id))


def _address(pci: str) -> str:
    """One form of a PCI address: libraries write ``00000000:0C:00.0``."""
    space, separator, rest = pci.lower().partition(":")
    return f"{space[-4:] if space.startswith('0000') else space}{separator}{rest}"


def overlap(one: Thing, other: Thing) -> bool:
    """True if a joule of one thing may be a joule of the other."""
    kinds = (one.kind, other.kind)
    if ThingKind.NODE in kinds or ThingKind.PLATFORM in kinds:
        return one.kind is not other.kind or _nested(one.part, other.part)
    if one.kind is other.kind:
        return _same_place(one, other) and _nested(one.part, other.part)
    shared = ThingKind.MEMORY in kinds and (one.memory or other.memory)
    return (shared or ThingKind.MODULE in kinds) and _may_be(one.socket, other.socket)


def _same_place(one: Thing, other: Thing) -> bool:
    if one.kind is ThingKind.BOARD:
        return "" in (one.pci, other.pci) or one.pci == other.pci
    return _may_be(one.socket, other.socket)


def _may_be(socket: int | None, other: int | None) -> bool:
    return None in (socket, other) or socket == other


def _nested(part: Sequence[str], other: Sequence[str]) -> bool:
    """True unless both are parts by the same scheme, and neither contains the other."""
    if part[:1] != other[:1]:
        return True
    return all(a == b for a, b in zip(part, other, strict=False))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A domain as its source lists it, and its readings."""

    domain: Domain
    thing: Thing
    present: bool  # it has readings

    @classmethod
    def of(cls, domain: Domain, present: AbstractSet[str]) -> Candidate:
        return cls(domain, thing_of(domain), domain.id in present)

    @property
    def modelled(self) -> bool:
        return self.domain.modelled or self.domain.provenance is Provenance.ESTIMATED

    @property
    def precedence(self) -> tuple[object, ...]:
        """The sort key: the first one counts."""
        domain, thing = self.domain, self.thing
        return (
            not self.present,
            self.modelled,
            0 if domain.resource and thing.kind is ThingKind.MODULE else _LEVELS.get(thing.kind, 0),
            len(thing.part),
            domain.provenance.rank,
            thing.kind is not ThingKind.BOARD and thing.socket is None,
            domain.resource is None,
            _natural_key(domain.id),
        )

    def reason_against(self, member: Candidate) -> str:
        """The clause for ``doctor`` by which ``member`` is counted instead."""
        name, same = member.domain.id, self.thing == member.thing
        if not self.present and member.present:
            return f"it has no reading, and {name} has"
        if same and self.domain.provenance is member.domain.provenance:
            return f"{name} measures the same {self.thing}"
        if same or (self.modelled and not member.modelled):
            what = f"the same {self.thing}" if same else f"the {member.thing}"
            return f"{name} measures {what}, and is {member.domain.provenance}"
        return f"it {self._relation(member.thing)} {name}, which is counted instead"

    def _relation(self, other: Thing) -> str:
        mine, theirs = (_SIZES.get(thing.kind, 0) for thing in (self.thing, other))
        if mine == theirs and bool(self.thing.part) is bool(other.part):
            return "may overlap with"
        if mine > theirs or (mine == theirs and other.part):
            return "may contain"
        return "may be contained in"


def _natural_key(identity: str) -> tuple[tuple[tuple[int, str], ...], ...]:
    """A sort key that puts ``rapl`` before ``rapl-mmio``, and ``package-2`` before ``10``."""
    return tuple(
        tuple(
            (int(part), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", segment)
        )
        for segment in identity.split(":")
    )


def choose(candidates: Iterable[Candidate]) -> dict[str, Candidate]:
    """The members of the cover, by id."""
    members: dict[str, Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.precedence):
        if one.domain.in_cover and _rival(one, members.values()) is None:
            members[one.domain.id] = one
    return members


def _rival(one: Candidate, members: Iterable[Candidate]) -> Candidate | None:
    """The first member that overlaps with ``one``; one that measures the same thing first."""
    found = [member for member in members if overlap(one.thing, member.thing)]
    return next((member for member in found if member.thing == one.thing), next(iter(found), None))


def decide(
    domains: Iterable[Domain], present: AbstractSet[str], members: AbstractSet[str] | None = None
) -> dict[str, Domain]:
    """``domains`` by id, with the cover chosen and every choice explained.

    ``present`` are the ids of the domains that have readings. ``members`` are the ids of the cover;
    by default they are chosen.
    """
    candidates = [Candidate.of(domain, present) for domain in domains]
    chosen = choose(candidates)
    if members is not None:
        chosen = {one.domain.id: one for one in candidates if one.domain.id in members}
    return {
        one.domain.id: _member(one, candidates)
        if one.domain.id in chosen
        else _outsider(one, _rival(one, chosen.values()))
        for one in candidates
    }


def _member(one: Candidate, candidates: Iterable[Candidate]) -> Domain:
    """The domain of a member; charged by the users that another domain of its thing knows."""
    domain = one.domain
    if domain.resource is not None:
        return domain
    for other in candidates:
        if other.thing == one.thing and other.present and other.domain.resource is not None:
            lent = other.domain
            return replace(
                domain,
                resource=lent.resource,
                method=lent.method,
                usage_step=lent.usage_step,
                why=f"{domain.why}; charged by the users that {lent.source} knows".lstrip("; "),
            )
    return domain


def _outsider(one: Candidate, rival: Candidate | None) -> Domain:
    domain = one.domain
    if not domain.in_cover:
        return domain
    reason = "" if rival is None else one.reason_against(rival)
    why = "; ".join(filter(None, (domain.why, reason)))
    return replace(domain, in_cover=False, resource=None, method="none", why=why)


class CoverEntry(NamedTuple):
    """A member of the cover, the thing that it measures, and the domains that it replaces."""

    thing: Thing
    member: Domain
    others: tuple[Domain, ...]


def explain(decided: Iterable[Domain], listed: Mapping[str, Domain]) -> list[CoverEntry]:
    """The cover among ``decided`` domains, for readers; ``listed`` are those of the sources."""
    domains = list(decided)
    candidates = {one.id: Candidate.of(listed[one.id], frozenset()) for one in domains}
    members = [candidates[one.id] for one in domains if one.in_cover]
    others: dict[str, list[Domain]] = {member.domain.id: [] for member in members}
    for one in domains:
        candidate = candidates[one.id]
        outsider = not one.in_cover and candidate.domain.in_cover
        if outsider and (rival := _rival(candidate, members)) is not None:
            others[rival.domain.id].append(one)
    return [
        CoverEntry(candidates[one.id].thing, one, tuple(others[one.id]))
        for one in domains
        if one.in_cover
    ]


class Cover:
    """The cover of a host in the course of time. For one thread."""

    def __init__(self) -> None:
        self._listed: dict[str, tuple[Domain, ...]] = {}
        self._read: dict[str, int] = {}  # the time of the last reading, of domains that have any
        self._wanted: frozenset[str] = frozenset()
        self.members: frozenset[str] = frozenset()
        """The ids of the domains that count."""
        self._owned: dict[str, tuple[str, Domain]] = {}  # the source of an id, and its domain
        self._things: dict[str, Thing] = {}
        self._rests: dict[str, int] = {}
        self._decided: dict[str, tuple[Domain, ...]] = {}
        self._stand_ins: dict[str, str] = {}  # the member that measures the thing of an outsider
        self.foreign: dict[str, frozenset[str]] = {}
        """The ids that a source lists and another source owns."""

    @property
    def domains(self) -> Mapping[str, tuple[Domain, ...]]:
        """The decided domains of each source; the same tuple while nothing has changed."""
        return self._decided

    def update(
        self,
        now: int,
        listed: Mapping[str, tuple[Domain, ...]],
        read: AbstractSet[str],
    ) -> frozenset[str]:
        """Decide anew at the monotonic time ``now``; returns the sources with changed domains.

        ``listed`` are the domains of all sources, the same tuples while they have not changed.
        An id belongs to the first source that lists it. ``read`` are the ids of the domains with
        a reading in this tick.
        """
        changed = any(self._listed.get(source) is not own for source, own in listed.items())
        changed |= len(listed) != len(self._listed)
        appeared = not self._read.keys() >= read
        self._read |= dict.fromkeys(read, now)
        lost = [
            key for key, at in self._read.items() if now - at > PRESENCE + self._rests.get(key, 0)
        ]
        for key in lost:
            del self._read[key]
        if changed or appeared or lost:
            self._listed = dict(listed)
            self._choose()
        members = self._moved(read)
        if members == self.members and not (changed or appeared or lost):
            return frozenset()
        self.members = members
        return self._decide()

    def statuses(self, found: Sequence[GpuStatus]) -> tuple[GpuStatus, ...]:
        """The statuses without a second one of a board."""
        if not self._stand_ins:
            return tuple(found)
        known = {status.domain_id for status in found}
        return tuple(one for one in found if self._stand_ins.get(one.domain_id) not in known)

    def _choose(self) -> None:
        self._owned = {}
        for source, domains in self._listed.items():
            for domain in domains:
                self._owned.setdefault(domain.id, (source, domain))
        present = self._read.keys()
        candidates = [Candidate.of(domain, present) for _, domain in self._owned.values()]
        self._things = {one.domain.id: one.thing for one in candidates}
        self._rests = {one.domain.id: one.domain.rest for one in candidates if one.domain.rest}
        self.foreign = {
            source: foreign
            for source, domains in self._listed.items()
            if (foreign := frozenset(d.id for d in domains if self._owned[d.id][0] != source))
        }
        self._wanted = frozenset(choose(candidates))

    def _moved(self, read: AbstractSet[str]) -> frozenset[str]:
        """The members after this tick: some may have to wait for a reading of a predecessor."""
        if self.members == self._wanted:
            return self.members
        stay = {
            key
            for key in self.members
            if key in self._wanted
            or (key in self._things and key in self._read and key not in read)
        }
        held = [self._things[key] for key in stay]
        joining = {
            key
            for key in self._wanted - stay
            if not any(overlap(self._things[key], thing) for thing in held)
        }
        return frozenset(stay | joining)

    def _decide(self) -> frozenset[str]:
        owned = [domain for _, domain in self._owned.values()]
        decided = decide(owned, self._read.keys(), self.members)
        counted = {self._things[key]: key for key in self.members}
        self._stand_ins = {
            key: counted[thing]
            for key, thing in self._things.items()
            if key not in self.members and thing in counted
        }
        before, self._decided = self._decided, {}
        for source, domains in self._listed.items():
            own = tuple(decided[one.id] for one in domains if self._owned[one.id][0] == source)
            known = before.get(source)
            self._decided[source] = known if known == own else own
        return frozenset(
            source for source, own in self._decided.items() if own is not before.get(source)
        )
