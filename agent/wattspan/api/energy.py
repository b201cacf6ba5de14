"""Answers of ``/v1/energy``, and the coarse resolution of device energy for other users.

With ``of=devices``, nothing waits for the attribution to processes: the answer comes within about
a reading interval of the end of the period.

Finely sampled power reveals something about computations. Users who may not read the counters
get the energy of devices by the cells of one fixed grid, so that no two windows can be subtracted
to get a finer figure. Within a cell power is assumed constant, so figures of neighbouring windows
add up.

Joules are numbers; unknown figures are null, never 0. ``certainty`` is that of each figure. Devices
are disjoint: they add up to the host.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import msgspec

from wattspan.api.requests import (
    WAIT,
    Parameter,
    ProblemError,
    bad_request,
    flag,
    sanitized,
    suggestion,
)
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Certainty,
    Consumer,
    Domain,
    HwType,
    Microjoules,
    Provenance,
)
from wattspan.ports import DeviceQueries, EnergyQueries
from wattspan.spans.values import IntervalEnergy

EDGE_ALLOWANCE = 10 * MILLISECOND
"""Least allowance for the variation of power between the readings around the edge of a cell; others
are multiples of it, so that they tell no exact times of readings."""


class TimeGrid(NamedTuple):
    """Cells of ``size`` nanoseconds from the zero of the monotonic clock; 0: no cells.

    ``own`` are the edges of windows that the reader may know; None: all.
    """

    size: int
    own: Sequence[int] | None = None

    def down(self, at: int) -> int:
        return at - at % self.size if self.size else at

    def up(self, at: int) -> int:
        return -self.down(-at)

    def hides(self, domain: Domain) -> bool:
        """True if the grid applies to ``domain``.

        A GPU's driver reports its energy to every user, but that of no MIG instance, which is the
        energy of its processes.
        """
        return self.size > 0 and (domain.hw_type is not HwType.GPU or domain.is_division)

    def device(
        self, devices: DeviceQueries, domain: Domain, start: int, end: int
    ) -> IntervalEnergy:
        """The energy of ``domain``; if the grid hides it, that of completely measured cells."""
        if not self.hides(domain):
            return devices.device(domain.id, start, end, self.own)
        end = min(end, self.down(devices.known(domain.id) or 0))
        energy: Counter[HwType] = Counter()
        uncertainty: Counter[HwType] = Counter()
        covered = 0
        for first, last, inside in self._parts(start, end):
            for spent in _complete_cells(devices, domain, first, last, self):
                span = last - first
                covered += spent.covered * inside // span
                for kind, amount in spent.energy.items():
                    energy[kind] += amount * inside // span
                    unknown = max(inside, span - inside) if inside < span else 0
                    uncertainty[kind] += amount * unknown // span
                for kind, amount in spent.uncertainty.items():
                    uncertainty[kind] += amount * inside // span
        return IntervalEnergy(
            {kind: Microjoules(amount) for kind, amount in energy.items()},
            {kind: Microjoules(amount) for kind, amount in uncertainty.items()},
            covered,
        )

    def latest_powers(
        self, history: EnergyQueries, devices: DeviceQueries
    ) -> dict[str, float | None] | None:
        """Watts of each hidden domain in the last settled cell, None if unknown.

        None without cells.
        """
        if not self.size:
            return None
        end = self.down(history.settled())
        powers: dict[str, float | None] = {}
        for domain in filter(self.hides, devices.domains().values()):
            spent = devices.cells(domain.id, end - self.size, end)
            energy = spent.energy.get(domain.hw_type)
            if energy is None or spent.covered < self.size:
                powers[domain.id] = None
            else:
                powers[domain.id] = energy * 1e3 / self.size
        return powers

    def idle(
        self, history: EnergyQueries, domain: Domain, start: int, end: int
    ) -> Microjoules | None:
        if not self.hides(domain):
            return history.idle(domain.id, start, end)
        total, end = 0, min(end, self.down(history.settled()))
        for first, last, inside in self._parts(start, end):
            idle = history.idle(domain.id, first, last)
            if idle is None:
                return None
            total += idle * inside // (last - first)
        return Microjoules(total)

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Start and end of runs of whole cells, and the requested length within each."""
        if end <= start:
            return
        first, last = self.up(start), self.down(end)
        if first > last:  # within one cell
            yield last, first, end - start
            return
        if start < first:
            yield first - self.size, first, first - start
        if first < last:
            yield first, last, last - first
        if last < end:
            yield last, last + self.size, end - last


def _complete_cells(
    devices: DeviceQueries, domain: Domain, start: int, end: int, grid: TimeGrid
) -> Iterator[IntervalEnergy]:
    """The energy of those whole cells that are measured completely.

    The uncertainty is that of a mean over cells: no figure tells of single readings.
    """
    spent, length = devices.cells(domain.id, start, end, grid.own), end - start
    if spent.covered >= length:
        edges = sum(_edge_allowance(devices, domain, edge) for edge in (start, end))
        displaced = min(length, edges + 2 * domain.resolution)
        uncertainty = {
            kind: Microjoules(amount * displaced // length + spent.uncertainty.get(kind, 0))
            for kind, amount in spent.energy.items()
        }
        yield spent._replace(uncertainty=uncertainty)
    elif spent.covered > 0 and length > grid.size:
        middle = start + length // grid.size // 2 * grid.size
        yield from _complete_cells(devices, domain, start, middle, grid)
        yield from _complete_cells(devices, domain, middle, end, grid)


def _edge_allowance(devices: DeviceQueries, domain: Domain, edge: int) -> int:
    """The time from ``edge`` to the nearest reading in nanoseconds, and half of it for ripple."""
    for before, after, _ in devices.timeline(domain.id, edge, edge, common=True):
        if before < edge < after:
            nearest = min(edge - before, after - edge)
            return -(-3 * nearest // (2 * EDGE_ALLOWANCE)) * EDGE_ALLOWANCE
    return EDGE_ALLOWANCE


JsonObject = dict[str, Any]


UNQUANTIZED = TimeGrid(0)


def energy_response(
    history: EnergyQueries,
    devices: DeviceQueries,
    start: int,
    end: int,
    consumer: Consumer | None = None,
    *,
    family: bool = False,
    grid: TimeGrid = UNQUANTIZED,
) -> JsonObject:
    """The energy of the host, its devices and a process from ``start`` to ``end``.

    The energy of devices that ``grid`` hides comes from its cells.
    """
    # Read first: the figures may only be more complete than this time.
    settled = history.settled(consumer)
    domains = sorted_domains(_counted_since(start, history.domains().values(), devices))
    coarse = any(map(grid.hides, domains))
    if coarse:
        settled = min(settled, grid.down(history.settled()))
    spent = [(domain, grid.device(devices, domain, start, end)) for domain in domains]
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
        "host": _host(spent, start, end),
        "devices": [
            {
                **device_figures(domain, energy, end - start),
                "idle_joules": _joules(grid.idle(history, domain, start, end)),
            }
            for domain, energy in spent
        ],
        "process": _process(history, consumer, start, end),
        "family": _process(history, consumer, start, end, family=True) if family else None,
    }


def _counted_since(
    start: int, domains: Iterable[Domain], devices: DeviceQueries
) -> Iterator[Domain]:
    """The domains without those that left the cover before ``start``: others count instead."""
    known = devices.domains()
    for domain in domains:
        inside = domain.id not in known or known[domain.id].in_cover
        if inside or (devices.known(domain.id) or 0) > start:
            yield domain


def sorted_domains(domains: Iterable[Domain]) -> list[Domain]:
    """Sorted by type and name, independent of the order of the sources."""
    kinds = list(HwType)
    return sorted(domains, key=lambda domain: (kinds.index(domain.hw_type), domain.name))


def provenances(domains: Iterable[Domain]) -> dict[HwType, Provenance]:
    """The provenance of each hardware type: the least trustworthy of its domains."""
    found: dict[HwType, Provenance] = {}
    for domain in domains:
        found[domain.hw_type] = domain.provenance.worse(
            found.get(domain.hw_type, domain.provenance)
        )
    return found


def _host(devices: list[tuple[Domain, IntervalEnergy]], start: int, end: int) -> JsonObject:
    """Sums of the devices by type; the coverage is that of the least covered device."""
    energy: dict[HwType, int | None] = {}
    uncertainty: dict[HwType, int] = {}
    bounded = {domain.hw_type for domain, spent in devices if spent.covered < end - start}
    for domain, spent in devices:
        kind = domain.hw_type
        known = _measured(spent.energy, spent, end - start).get(kind)
        energy.setdefault(kind, None)
        if known is not None:
            energy[kind] = (energy[kind] or 0) + known
            uncertainty[kind] = uncertainty.get(kind, 0) + spent.uncertainty.get(kind, 0)
    covered = min((spent.covered for _, spent in devices), default=0)
    return _figures(energy, uncertainty, covered, end - start, bounded)


def device_figures(domain: Domain, spent: IntervalEnergy, length: int) -> JsonObject:
    """The energy of one device in a period of ``length`` nanoseconds."""
    kind = domain.hw_type
    joules = _measured(spent.energy, spent, length).get(kind)
    return {
        "hw_id": domain.id,
        "hw_type": kind,
        "hw_name": domain.name,
        "provenance": domain.provenance,
        "joules": _joules(joules),
        "certainty": _certainty(joules, bounded=spent.covered < length),
        "uncertainty_joules": _joules(_measured(spent.uncertainty, spent, length).get(kind)),
        **_coverage(spent.covered, length),
    }


def _process(
    history: EnergyQueries, consumer: Consumer | None, start: int, end: int, *, family: bool = False
) -> JsonObject | None:
    if consumer is None:
        return None
    spent = history.process(consumer, start, end, family=family)
    split, basis = spent.split or (None, None)
    kinds = spent.energy.keys() - spent.whole if spent.covered < end - start else set()
    return {
        "pid": consumer.pid,
        "started": consumer.started,
        "static_joules": split and _joules(split.static),
        "dynamic_joules": split and _joules(split.dynamic),
        "static_basis": basis,
        **_figures(
            spent.energy,
            spent.uncertainty,
            spent.covered,
            end - start,
            kinds | history.bounded(consumer, start, family=family),
        ),
    }


def _measured(
    figures: Mapping[HwType, int], spent: IntervalEnergy, length: int
) -> Mapping[HwType, int]:
    """``figures`` if anything was measured; a sum over no interval is unknown, not zero."""
    return figures if spent.covered > 0 or length == 0 else {}


def _figures(
    energy: Mapping[HwType, int | None],
    uncertainty: Mapping[HwType, int],
    covered: int,
    length: int,
    bounded: Collection[HwType],
) -> JsonObject:
    return {
        "joules": {kind: _joules(amount) for kind, amount in energy.items()},
        "certainty": {
            kind: _certainty(amount, bounded=kind in bounded) for kind, amount in energy.items()
        },
        "uncertainty_joules": {kind: _joules(amount) for kind, amount in uncertainty.items()},
        **_coverage(covered, length),
    }


def _certainty(amount: int | None, *, bounded: bool) -> Certainty:
    if amount is None:
        return Certainty.UNKNOWN
    return Certainty.LOWER_BOUND if bounded else Certainty.KNOWN


def _coverage(covered: int, length: int) -> JsonObject:
    return {
        "covered_seconds": covered / 1e9,
        "coverage": min(1.0, covered / length) if length else 1.0,
    }


def _joules(microjoules: int | None) -> float | None:
    return None if microjoules is None else microjoules / 1e6


MAX_PERIODS, MAX_BODY_BYTES = 1024, 64 << 10  # of one request

Period = tuple[int, int]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_decoder = msgspec.json.Decoder(
    Annotated[list[tuple[_Time, _Time]], msgspec.Meta(min_length=1, max_length=MAX_PERIODS)]
)


def decoded_periods(body: bytes) -> list[Period]:
    """The periods of a body: begin and end of each in monotonic nanoseconds. ProblemError."""
    remedy = f"Write a list of 1 to {MAX_PERIODS} pairs of monotonic nanoseconds, in order."
    try:
        found: list[Period] = _decoder.decode(body[:MAX_BODY_BYTES])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request("the body", f"it has no periods: {error}", remedy) from None
    if any(end < start for start, end in found):
        raise bad_request("the body", "a period ends before its start", remedy)
    return found


DEFAULT_WAIT = 2 * SECOND
MAX_IDS = 256


def _ids(text: str) -> tuple[str, ...]:
    ids = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not ids:
        raise ValueError("it names no device")
    if len(ids) > MAX_IDS:
        raise ValueError(f"it names more than {MAX_IDS} devices")
    return ids


def _of(text: str) -> str:
    if text != "devices":
        raise ValueError("only the energy of devices is served so")
    return text


DEVICE_PARAMETERS: Mapping[str, Parameter] = {
    "of": Parameter(_of, 'Write "devices", or leave it out for devices and processes.'),
    "parts": Parameter(flag, "Write 1 or 0."),
    "hw_id": Parameter(_ids, "Write the hw_id of devices as in GET /v1/status, with commas."),
    "timeline": Parameter(flag, "Write 1 or 0."),
    "wait": WAIT,
}


def selected_domains(
    devices: DeviceQueries, ids: Sequence[str] | None, *, parts: bool = False
) -> list[Domain]:
    """The named devices and parts, or all of the cover, with their ``parts`` if wanted.

    ProblemError for an unknown one.
    """
    known = devices.domains()
    for one in ids or ():
        if one not in known:
            raise ProblemError(
                HTTPStatus.NOT_FOUND,
                f"hw_id={sanitized(one)}",
                "the agent has no such device",
                suggestion(one, known),
            )
    if ids is not None:
        return sorted_domains(known[one] for one in ids)
    return sorted_domains(
        one for one in known.values() if one.in_cover or (parts and one.is_division)
    )


class DeviceEnergyQuery(NamedTuple):
    """A query of the energy of some devices from ``start`` to ``end``."""

    devices: DeviceQueries
    domains: Sequence[Domain]
    start: int
    end: int
    grid: TimeGrid
    timeline: bool = False

    @property
    def answerable(self) -> bool:
        """True if no awaited device will tell more about the period."""
        return all(
            self._complete(domain) or self.devices.silent(domain.id) for domain in self.domains
        )

    def response(self) -> JsonObject:
        """The present figures."""
        devices = [self._device(domain) for domain in self.domains]
        worst = provenances(self.domains)
        coarse = any(map(self.grid.hides, self.domains))
        return {
            "start_mono_ns": self.start,
            "end_mono_ns": self.end,
            "seconds": (self.end - self.start) / 1e9,
            "complete": all(device["complete"] for device in devices),
            "device_resolution_seconds": self.grid.size / 1e9 if coarse else None,
            "emulated": Provenance.EMULATED in worst.values(),
            "provenance": worst,
            "devices": devices,
        }

    def figures(self, domain: Domain) -> tuple[Any, ...]:
        """Joules, their uncertainty, coverage of the period, and True if these are final."""
        complete = self._complete(domain)  # read first, as below
        length, kind = self.end - self.start, domain.hw_type
        spent = self.grid.device(self.devices, domain, self.start, self.end)
        figures = (_measured(one, spent, length) for one in (spent.energy, spent.uncertainty))
        joules, uncertainty = (_joules(one.get(kind)) for one in figures)
        return joules, uncertainty, _coverage(spent.covered, length)["coverage"], complete

    def _complete(self, domain: Domain) -> bool:
        known = self.devices.known(domain.id)
        hidden = self.grid.hides(domain)
        return known is not None and known >= (self.grid.up(self.end) if hidden else self.end)

    def _device(self, domain: Domain) -> JsonObject:
        # Read first: the figures may only be more complete than these.
        complete, silent = self._complete(domain), self.devices.silent(domain.id)
        known = self.devices.known(domain.id)
        hidden = self.grid.hides(domain)
        spent = self.grid.device(self.devices, domain, self.start, self.end)
        status = self.devices.gpu(domain.id)
        found: JsonObject = {
            **device_figures(domain, spent, self.end - self.start),
            "complete": complete,
            "silent": silent,
            "known_mono_ns": self.grid.down(known) if hidden and known is not None else known,
            "index": _number(domain) if status is None else status.index,
            "parent": domain.parent,
            "partition_mode": None if status is None else status.partition_mode,
            "model": domain.model if status is None else status.model,
            "uuid": domain.id.removeprefix("gpu:") if domain.hw_type is HwType.GPU else None,
            "temperature_celsius": None if status is None else status.temperature_celsius,
        }
        if self.timeline:
            found |= self._timeline(domain, hidden=hidden)
        return found

    def _timeline(self, domain: Domain, *, hidden: bool) -> JsonObject:
        """The readings, except of devices that the grid hides."""
        return {
            "timeline": None
            if hidden
            else [
                [began, ended, None if spent is None else spent / 1e6]
                for began, ended, spent in self.devices.timeline(
                    domain.id, self.start, self.end, common=self.grid.own is not None
                )
            ],
            "temperatures": self.devices.temperatures(domain.id, self.start, self.end),
        }


_PACKAGE, _INSTANCE = re.compile(r"package-(\d+)"), re.compile(r"g\.\S+ (\d+)$")
_CPUS = re.compile(r"cpu:(\d+)")


def _number(domain: Domain) -> int | None:
    """The number of a CPU package, or of the MIG instance of a GPU, from the domain's name.

    A package whose name has none has that of the CPUs by which it is attributed.
    """
    is_gpu = domain.hw_type is HwType.GPU
    found = (_INSTANCE if is_gpu else _PACKAGE).search(domain.name)
    if found is None and not is_gpu:
        found = _CPUS.fullmatch(domain.resource or "")
    return None if found is None else int(found[1])
