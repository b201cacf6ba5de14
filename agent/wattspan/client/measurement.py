"""What a window turned out to have spent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from wattspan.client.errors import MeasurementError, NotMeasuredError


class Energy(Mapping[str, float]):
    """Joules by kind of device: ``"cpu"``, ``"memory"``, ``"gpu"``, ...

    A kind whose energy is not known is not in it. ``uncertainty`` says by kind how many joules
    each figure may be off; ``coverage``, 0 to 1, how much of the time was measured.
    """

    __slots__ = ("_joules", "coverage", "uncertainty")

    def __init__(
        self, joules: Mapping[str, float], uncertainty: Mapping[str, float], coverage: float
    ) -> None:
        self._joules = dict(joules)
        self.uncertainty: Mapping[str, float] = dict(uncertainty)
        self.coverage = coverage

    @property
    def total(self) -> float:
        """The joules of all kinds; NotMeasuredError if none is known."""
        if not self._joules:
            raise NotMeasuredError(
                "The energy is not known: nothing was measured in this window. It lies before "
                "the agent began or further back than it remembers, or no counter answered."
            )
        return sum(self._joules.values())

    @property
    def total_uncertainty(self) -> float:
        """How many joules the total may be off at most."""
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
    """What one device spent, whoever caused it; ``joules`` is None if that is not known."""

    id: str
    kind: str
    name: str
    joules: float | None
    uncertainty: float | None
    coverage: float
    provenance: str


class Measurement(NamedTuple):
    """A window's energy, from one answer of the agent.

    ``joules`` is what the process and its descendants spent, ``process`` what it spent itself,
    ``host`` what all devices of the host did, whoever caused it. ``complete``: it will not
    change any more.
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
    def of(cls, told: Mapping[str, Any]) -> Measurement:
        """From an answer of ``/v1/energy`` that was asked with ``pid`` and ``family``."""
        return cls(
            seconds=told["seconds"],
            joules=energy_of(told["family"]),
            process=energy_of(told["process"]),
            host=energy_of(told["host"]),
            devices=tuple(_device(one) for one in told["devices"]),
            provenance=dict(told["provenance"]),
            emulated=told["emulated"],
            complete=told["complete"],
            host_name=told["host_name"],
        )


class NotSettledError(MeasurementError, TimeoutError):
    """The window's energy is not known in full yet. ``partial`` is what is known."""

    def __init__(self, message: str, partial: Measurement) -> None:
        super().__init__(message)
        self.partial = partial


def energy_of(told: Mapping[str, Any]) -> Energy:
    """One table of joules by kind, its unknown kinds left out."""
    joules = {kind: value for kind, value in told["joules"].items() if value is not None}
    doubt = told["uncertainty_joules"]
    return Energy(joules, {kind: doubt[kind] for kind in joules if kind in doubt}, told["coverage"])


def _device(told: Mapping[str, Any]) -> Device:
    return Device(
        told["hw_id"],
        told["hw_type"],
        told["hw_name"],
        told["joules"],
        told["uncertainty_joules"],
        told["coverage"],
        told["provenance"],
    )
