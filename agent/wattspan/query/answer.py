"""Answers: what the past says of a stretch of time, as plain facts for JSON.

Joules are numbers; what is not known is null, never 0. Devices are disjoint, so they add up to
the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wattspan.model import Consumer, Domain, HwType, Provenance
from wattspan.ports import EnergyQueries
from wattspan.query.grid import Grid
from wattspan.spans.values import IntervalEnergy

Facts = dict[str, Any]


FINEST = Grid(0)


def energy(
    past: EnergyQueries,
    start: int,
    end: int,
    consumer: Consumer | None = None,
    *,
    family: bool = False,
    grid: Grid = FINEST,
) -> Facts:
    """What the host, its devices, and a process spent from ``start`` to ``end``.

    Devices are told by the cells of ``grid``, those that it hides.
    """
    # Taken before the figures: what settles in between makes them better than is claimed.
    settled = past.settled(consumer)
    domains = in_order(past.domains().values())
    coarse = any(map(grid.hides, domains))
    if coarse:
        settled = min(settled, grid.down(past.settled()))
    devices = [
        (
            domain,
            grid.device(past, domain, start, end)
            if grid.hides(domain)
            else past.device(domain.id, start, end),
        )
        for domain in domains
    ]
    idle = {
        domain.id: grid.idle(past, domain, start, end)
        if grid.hides(domain)
        else past.idle(domain.id, start, end)
        for domain in domains
    }
    provenance = provenances(domains)
    return {
        "start_mono_ns": start,
        "end_mono_ns": end,
        "seconds": (end - start) / 1e9,
        "settled_mono_ns": settled,
        "complete": settled >= end,
        "device_resolution_seconds": grid.size / 1e9 if coarse else None,
        "emulated": Provenance.EMULATED in provenance.values(),
        "provenance": provenance,
        "host": _host(devices, start, end),
        "devices": [
            _device(domain, spent, idle[domain.id], end - start) for domain, spent in devices
        ],
        "process": None
        if consumer is None
        else _process(consumer, past.process(consumer, start, end), end - start),
        "family": None
        if consumer is None or not family
        else _process(consumer, past.process(consumer, start, end, family=True), end - start),
    }


def in_order(domains: Iterable[Domain]) -> list[Domain]:
    """By kind and name, so that answers are alike whichever source was quickest."""
    kinds = list(HwType)
    return sorted(domains, key=lambda domain: (kinds.index(domain.hw_type), domain.name))


def provenances(domains: Iterable[Domain]) -> dict[HwType, Provenance]:
    """How the figures of each kind were obtained: as the least trustworthy of its domains."""
    found: dict[HwType, Provenance] = {}
    for domain in domains:
        found[domain.hw_type] = domain.provenance.worse(
            found.get(domain.hw_type, domain.provenance)
        )
    return found


def _host(devices: list[tuple[Domain, IntervalEnergy]], start: int, end: int) -> Facts:
    """The devices' sum by kind; covered is what the least covered device was."""
    energy: dict[HwType, int | None] = {}
    doubt: dict[HwType, int] = {}
    for domain, spent in devices:
        kind = domain.hw_type
        known = _known(spent.energy, spent, end - start).get(kind)
        energy.setdefault(kind, None)
        if known is not None:
            energy[kind] = (energy[kind] or 0) + known
            doubt[kind] = doubt.get(kind, 0) + spent.uncertainty.get(kind, 0)
    covered = min((spent.covered for _, spent in devices), default=0)
    return _figures(energy, doubt, covered, end - start)


def _device(domain: Domain, spent: IntervalEnergy, idle: int | None, length: int) -> Facts:
    kind = domain.hw_type
    return {
        "hw_id": domain.id,
        "hw_type": kind,
        "hw_name": domain.name,
        "provenance": domain.provenance,
        "joules": _joules(_known(spent.energy, spent, length).get(kind)),
        "uncertainty_joules": _joules(_known(spent.uncertainty, spent, length).get(kind)),
        "idle_joules": _joules(idle),
        **_coverage(spent.covered, length),
    }


def _process(consumer: Consumer, spent: IntervalEnergy, length: int) -> Facts:
    known = _known(spent.energy, spent, length)
    doubt = _known(spent.uncertainty, spent, length)
    return {
        "pid": consumer.pid,
        "started": consumer.started,
        **_figures(known, doubt, spent.covered, length),
    }


def _known(
    figures: Mapping[HwType, int], spent: IntervalEnergy, length: int
) -> Mapping[HwType, int]:
    """Nothing, where nothing was measured: a sum over no interval is no zero."""
    return figures if spent.covered > 0 or length == 0 else {}


def _figures(
    energy: Mapping[HwType, int | None], doubt: Mapping[HwType, int], covered: int, length: int
) -> Facts:
    return {
        "joules": {kind: _joules(amount) for kind, amount in energy.items()},
        "uncertainty_joules": {kind: _joules(amount) for kind, amount in doubt.items()},
        **_coverage(covered, length),
    }


def _coverage(covered: int, length: int) -> Facts:
    return {
        "covered_seconds": covered / 1e9,
        "coverage": min(1.0, covered / length) if length else 1.0,
    }


def _joules(microjoules: int | None) -> float | None:
    return None if microjoules is None else microjoules / 1e6
