"""The energy of a window, as the agent returned it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from wattspan.sdk.agent import MeasurementError, NotMeasuredError


class Energy(Mapping[str, float]):
    """Joules by kind of device: ``"cpu"``, ``"memory"``, ``"gpu"``, ...

    Kinds without a known energy are in ``unknown`` instead. ``uncertainty`` is in joules, by
    kind; ``coverage``, 0 to 1, is the fraction of the time that was measured in every kind.
    """

    __slots__ = ("_joules", "coverage", "uncertainty", "unknown")

    def __init__(
        self,
        joules: Mapping[str, float],
        uncertainty: Mapping[str, float],
        coverage: float,
        unknown: Iterable[str] = (),
    ) -> None:
        self._joules = dict(joules)
        self.uncertainty: Mapping[str, float] = dict(uncertainty)
        self.coverage = coverage
        self.unknown = tuple(unknown)

    @property
    def total(self) -> float:
        """The joules of all kinds; NotMeasuredError if a kind is unknown."""
        if self.unknown or not self._joules:
            raise NotMeasuredError(
                f"The total is unknown: {', '.join(self.unknown) or 'this window'} was not "
                "measured. The window is older than the agent or its history, or a counter did "
                "not respond."
            )
        return sum(self._joules.values())

    @property
    def total_uncertainty(self) -> float:
        """The uncertainty of the total, in joules."""
        return sum(self.uncertainty.values())

    def __getitem__(self, kind: str) -> float:
        try:
            return self._joules[kind]
        except KeyError:
            known = ", ".join(self._joules) or "none"
            raise KeyError(f"{kind!r} has no known energy here; known: {known}") from None

    def __contains__(self, kind: object) -> bool:
        return kind in self._joules

    def __iter__(self) -> Iterator[str]:
        return iter(self._joules)

    def __len__(self) -> int:
        return len(self._joules)

    def __repr__(self) -> str:
        figures = ", ".join(f"{kind}={joules:.6g} J" for kind, joules in self._joules.items())
        return f"<Energy {figures or 'unknown'}, coverage {self.coverage:.0%}>"


class Device(NamedTuple):
    """The energy of one device, of all processes; ``joules`` is None if it is unknown.

    ``idle`` is the idle energy in it, charged to no process; None if the baseline was not learned
    yet, so that processes were charged with it.
    """

    id: str
    kind: str
    name: str
    joules: float | None
    uncertainty: float | None
    coverage: float
    provenance: str
    idle: float | None = None


class Measurement(NamedTuple):
    """The energy of a window, from one response of the agent.

    ``joules`` is the energy of the process and its descendants, ``process`` that of the process
    alone, ``host`` that of all devices of the host. ``complete``: the values are final.
    """

    seconds: float
    joules: Energy
    process: Energy
    host: Energy
    devices: tuple[Device, ...]
    provenance: Mapping[str, str]
    emulated: bool
    complete: bool
    host_name: str

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Measurement:
        """From a response of ``/v1/energy`` to a query with ``pid`` and ``family``."""
        kinds = response["provenance"]
        return cls(
            seconds=response["seconds"],
            joules=_energy(response["family"], kinds),
            process=_energy(response["process"], kinds),
            host=_energy(response["host"], kinds),
            devices=tuple(_device(each) for each in response["devices"]),
            provenance=dict(kinds),
            emulated=response["emulated"],
            complete=response["complete"],
            host_name=response["host_name"],
        )


class NotSettledError(MeasurementError, TimeoutError):
    """The energy of the window is not complete yet; ``partial`` are the values so far."""

    def __init__(self, message: str, partial: Measurement) -> None:
        super().__init__(message)
        self.partial = partial


def _energy(response: Mapping[str, Any], kinds: Iterable[str]) -> Energy:
    """A table of joules by kind, for a host with devices of ``kinds``."""
    joules = {kind: value for kind, value in response["joules"].items() if value is not None}
    uncertainty = {kind: response["uncertainty_joules"].get(kind, 0.0) for kind in joules}
    unknown = [kind for kind in kinds if kind not in joules]
    return Energy(joules, uncertainty, response["coverage"], unknown)


def _device(response: Mapping[str, Any]) -> Device:
    return Device(
        response["hw_id"],
        response["hw_type"],
        response["hw_name"],
        response["joules"],
        response["uncertainty_joules"],
        response["coverage"],
        response["provenance"],
        response["idle_joules"],
    )
