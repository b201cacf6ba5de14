"""Whether a zone belongs to the cover, and why: one rule a kind, one clause a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.sources.mirrors import Pair
from wattspan.sources.zones import Kind, Place, natural


class Verdict(NamedTuple):
    in_cover: bool
    why: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """All there is to know when one zone is judged.

    ``domain_of`` maps each place to the id of the domain that stands for it; the other zones
    with the same place are its duplicates. ``vendor`` is ``"intel"``, ``"amd"`` or None.
    """

    domain_of: Mapping[Place, str]
    mirrors: frozenset[Pair]
    vendor: str | None

    def of_kind(self, *kinds: Kind) -> list[Place]:
        return sorted((p for p in self.domain_of if p.kind in kinds), key=lambda p: natural(p.path))

    def at(self, path: str) -> str | None:
        return next((d for place, d in self.domain_of.items() if place.path == path), None)

    def original(self, identity: str) -> str | None:
        """The first domain that shows the same counter as ``identity``, if another one does."""
        here = set(self.domain_of.values())  # of two dies, the first may have gone offline
        others = (a for a, b in self.mirrors if b == identity and a in here)
        return min(others, key=natural, default=None)

    @property
    def counts_packages(self) -> bool:
        return any(p.kind in {Kind.PACKAGE, Kind.DIE} for p in self.domain_of)


def judge(identity: str, place: Place, context: Context) -> Verdict:
    """The verdict on the domain ``identity`` at ``place``."""
    first = context.domain_of[place]
    if first != identity:
        return Verdict(False, f"shows the counter of {first} through another interface", first)
    original = context.original(identity)
    if original is not None:
        return Verdict(False, f"shows the same counter as {original}", original)
    return _RULES[place.kind](place, context)


def _package(place: Place, context: Context) -> Verdict:
    return Verdict(
        True, f"socket {place.socket}'s own counter, cores and uncore included", _platform(context)
    )


def _die(place: Place, context: Context) -> Verdict:
    package = context.at(f"package-{place.socket}")
    if package is not None:
        return Verdict(False, f"part of {package}", package)
    why = f"die {place.die} of socket {place.socket}, a counter of its own"
    return Verdict(True, why, _platform(context))


def _dram(place: Place, context: Context) -> Verdict:
    whole = context.at(f"package-{place.socket}/dram") if place.die is not None else None
    if whole is not None:
        return Verdict(False, f"part of {whole}", whole)
    platforms = context.of_kind(Kind.PLATFORM)
    if platforms and not context.counts_packages:
        platform = context.domain_of[platforms[0]]
        return Verdict(False, f"{platform} may contain it, and counts in its place", platform)
    if place.above:
        return Verdict(True, f"memory has a counter of its own: {place.above} does not contain it")
    return Verdict(True, "memory has a counter of its own, outside every package")


def _core(place: Place, context: Context) -> Verdict:
    above = context.at(place.above)
    if context.vendor == "amd":
        # The register is per core, and the driver reads it on the package's first CPU only.
        why = f"one core's counter, not the sum of the socket's cores; {above} contains it"
        return Verdict(False, why, above)
    return Verdict(False, _inside(above, "the cores"), above)


def _uncore(place: Place, context: Context) -> Verdict:
    above = context.at(place.above)
    return Verdict(False, _inside(above, "mostly the integrated graphics"), above)


def _platform_rule(place: Place, context: Context) -> Verdict:
    platforms = context.of_kind(Kind.PLATFORM)
    if context.counts_packages:
        why = "contains the packages and parts of the board that differ by vendor"
        return Verdict(False, why)
    if place != platforms[0]:
        first = context.domain_of[platforms[0]]
        return Verdict(False, f"it is not known what it shares with {first}", first)
    return Verdict(True, "the whole platform, and no package has a counter")


def _other(place: Place, context: Context) -> Verdict:
    if place.above:
        above = context.at(place.above)
        return Verdict(False, _inside(above, f"{place.path.rpartition('/')[2]!r}"), above)
    others = context.of_kind(Kind.OTHER)
    tops = [other for other in others if not other.above]
    if len(tops) == 1 and not context.counts_packages and not context.of_kind(Kind.PLATFORM):
        return Verdict(True, f"the only counter here, though {place.path!r} says not of what")
    return Verdict(False, f"it is not known what {place.path!r} measures and what it contains")


def _inside(above: str | None, what: str) -> str:
    return f"{what}, contained in {above}" if above else f"{what}, without a package to stand in"


def _platform(context: Context) -> str | None:
    """The platform counter that contains every package, where there is exactly one."""
    platforms = context.of_kind(Kind.PLATFORM)
    return context.domain_of[platforms[0]] if len(platforms) == 1 else None


_RULES: dict[Kind, Callable[[Place, Context], Verdict]] = {
    Kind.PACKAGE: _package,
    Kind.DIE: _die,
    Kind.DRAM: _dram,
    Kind.CORE: _core,
    Kind.UNCORE: _uncore,
    Kind.PLATFORM: _platform_rule,
    Kind.OTHER: _other,
}
