"""Answers of ``/v1/energy?of=devices``: the energy of devices as soon as their readings are there.

Nothing waits for the attribution to processes, so an answer comes within about a reading interval
of the end of the period. For users who may not read the counters, the same cells apply as to
settled energy (``energy.TimeGrid``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from wattspan.api import energy
from wattspan.api.energy import JsonObject, TimeGrid
from wattspan.api.requests import WAIT, Parameter, ProblemError, flag, sanitized, suggestion
from wattspan.model import SECOND, Domain, HwType, Provenance
from wattspan.ports import DeviceQueries

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


PARAMETERS: Mapping[str, Parameter] = {
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
        return energy.sorted_domains(known[one] for one in ids)
    return energy.sorted_domains(one for one in known.values() if parts or one.in_cover)


class DeviceEnergyQuery(NamedTuple):
    """A query of the energy of some devices from ``start`` to ``end``."""

    devices: DeviceQueries
    domains: Sequence[Domain]
    start: int
    end: int
    grid: TimeGrid
    timeline: bool = False

    @property
    def period(self) -> tuple[int, int]:
        return self.start, self.end

    @property
    def answerable(self) -> bool:
        """True if no awaited device will tell more about the period."""
        return all(
            self._complete(domain) or self.devices.silent(domain.id) for domain in self.domains
        )

    def response(self) -> JsonObject:
        """The present figures."""
        devices = [self._device(domain) for domain in self.domains]
        provenances = energy.provenances(self.domains)
        coarse = any(map(self.grid.hides, self.domains))
        return {
            "start_mono_ns": self.start,
            "end_mono_ns": self.end,
            "seconds": (self.end - self.start) / 1e9,
            "complete": all(device["complete"] for device in devices),
            "device_resolution_seconds": self.grid.size / 1e9 if coarse else None,
            "emulated": Provenance.EMULATED in provenances.values(),
            "provenance": provenances,
            "devices": devices,
        }

    def _complete(self, domain: Domain) -> bool:
        known = self.devices.known(domain.id)
        hidden = self.grid.hides(domain)
        return known is not None and known >= (self.grid.up(self.end) if hidden else self.end)

    def _device(self, domain: Domain) -> JsonObject:
        # Read first: the figures may only be more complete than these.
        complete, silent = self._complete(domain), self.devices.silent(domain.id)
        known = self.devices.known(domain.id)
        hidden = self.grid.hides(domain)
        spent = self.grid.device(self.devices, domain, *self.period)
        status = self.devices.gpu(domain.id)
        found: JsonObject = {
            **energy.device_figures(domain, spent, self.end - self.start),
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
                for began, ended, spent in self.devices.timeline(domain.id, *self.period)
            ],
            "temperatures": self.devices.temperatures(domain.id, *self.period),
        }


_PACKAGE, _INSTANCE = re.compile(r"package-(\d+)"), re.compile(r"g\.\S+ (\d+)$")


def _number(domain: Domain) -> int | None:
    """The number of a CPU package, or of the MIG instance of a GPU, from the domain's name."""
    kind = _INSTANCE if domain.hw_type is HwType.GPU else _PACKAGE
    found = kind.search(domain.name)
    return None if found is None else int(found[1])
