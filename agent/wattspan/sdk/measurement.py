"""What a window turned out to have spent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from wattspan.sdk.agent import MeasurementError, NotMeasuredError


class Energy(Mapping[str, float]):
    """Joules by kind of device: ``"cpu"``, ``"memory"``, ``"gpu"``, ...

    A kind whose energy is not known is not in it, but in ``unknown``. ``uncertainty`` says by
    kind how many joules each figure may be off; ``coverage``, 0 to 1, how much of the time was
    measured, in every kind.
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
        """The joules of all kinds; NotMeasuredError if they are not known of each."""
        if self.unknown or not self._joules:
            raise NotMeasuredError(
                f"The total is not known: of {', '.join(self.unknown) or 'this window'} nothing "
                "was measured. The window lies before the agent began or further back than it "
                "remembers, or a counter did not answer."
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
    """What one device spent, whoever caused it; ``joules`` is None if that is not known.

    ``idle`` of these it would have spent anyhow, and nobody was charged with; None if its idle
    power was not known yet, and so processes were charged with it too.
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
        kinds = told["provenance"]
        return cls(
            seconds=told["seconds"],
            joules=_energy(told["family"], kinds),
            process=_energy(told["process"], kinds),
            host=_energy(told["host"], kinds),
            devices=tuple(_device(one) for one in told["devices"]),
            provenance=dict(kinds),
            emulated=told["emulated"],
            complete=told["complete"],
            host_name=told["host_name"],
        )


class NotSettledError(MeasurementError, TimeoutError):
    """The window's energy is not known in full yet. ``partial`` is what is known."""

    def __init__(self, message: str, partial: Measurement) -> None:
        super().__init__(message)
        self.partial = partial


def _energy(told: Mapping[str, Any], kinds: Iterable[str]) -> Energy:
    """One table of joules by kind, of a host that has devices of ``kinds``."""
    joules = {kind: value for kind, value in told["joules"].items() if value is not None}
    doubt = {kind: told["uncertainty_joules"].get(kind, 0.0) for kind in joules}
    return Energy(joules, doubt, told["coverage"], [kind for kind in kinds if kind not in joules])


def _device(told: Mapping[str, Any]) -> Device:
    return Device(
        told["hw_id"],
        told["hw_type"],
        told["hw_name"],
        told["joules"],
        told["uncertainty_joules"],
        told["coverage"],
        told["provenance"],
        told["idle_joules"],
    )
