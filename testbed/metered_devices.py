"""Devices whose energy is a known function of time, as a reader of the compatibility modules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wattspan.sdk.client import Device

BOARD = "NVIDIA H100 80GB HBM3"


def gpu(number: int | None, uuid: str = "", model: str = BOARD) -> Device:
    """A GPU without energy; its UUID is derived from its number by default.

    It is emulated, because the device files of this machine are not its own.
    """
    uuid = uuid or f"GPU-{number or 0:04d}aaaa-1111-2222-3333-444444444444"
    return Device(
        id=f"gpu:{uuid}",
        kind="gpu",
        name=f"{model} {number}",
        joules=None,
        uncertainty=None,
        coverage=0.0,
        provenance="emulated",
        number=number,
        uuid=uuid,
        model=model,
    )


def package(number: int, kind: str = "cpu") -> Device:
    """A CPU package, or its memory, without energy."""
    name = f"package-{number}" + ("/dram" if kind == "memory" else "")
    return Device(f"rapl:{name}", kind, name, None, None, 0.0, "measured", number=number)


@dataclass
class MeteredDevices:
    """A ``DeviceReader``: each device has spent ``energy(id, time)`` microjoules by a time.

    ``lost`` maps the id of a device to the time of its last reading. The calls are counted.
    """

    devices: Sequence[Device]
    energy: Callable[[str, int], int] = lambda key, mono: mono // 1000 * (1 + len(key) % 7)
    lost: dict[str, int] = field(default_factory=dict)
    settled: bool = True
    error: Exception | None = None
    calls: list[tuple[int, int, tuple[str, ...] | None]] = field(default_factory=list)
    steps: dict[str, tuple[tuple[int, int, float | None], ...]] = field(default_factory=dict)
    temperatures: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __call__(
        self,
        start: int,
        end: int,
        ids: Sequence[str] | None = None,
        *,
        timeout: float = 0.0,
        timeline: bool = False,
        parts: bool = False,
    ) -> tuple[Device, ...]:
        self.calls.append((start, end, None if ids is None else tuple(ids)))
        if self.error is not None:
            raise self.error
        return tuple(
            self._measured(one, start, end, timeline)
            for one in self.devices
            if (parts or one.parent is None if ids is None else one.id in ids)
        )

    def _measured(self, one: Device, start: int, end: int, timeline: bool) -> Device:
        last = self.lost.get(one.id, end)
        known = max(0, min(end, last) - start)
        spent = self.energy(one.id, min(end, last)) - self.energy(one.id, start)
        measured = known > 0 or start == end
        found = one._replace(
            joules=spent / 1e6 if measured else None,
            uncertainty=spent / 1e8 if measured else None,
            coverage=known / (end - start) if end > start else 1.0,
            complete=last >= end and self.settled,
            silent=last < end,
        )
        if not timeline:
            return found
        return found._replace(
            timeline=tuple(
                step for step in self.steps.get(one.id, ()) if step[0] < end and step[1] > start
            ),
            temperatures=tuple(
                one for one in self.temperatures.get(one.id, ()) if start <= one[0] <= end
            ),
        )

    def joules(self, key: str, start: int, end: int) -> float:
        return (self.energy(key, end) - self.energy(key, start)) / 1e6


def rough_energy(key: str, mono: int) -> int:
    """Energy that rises by a random amount in each microsecond, the same in every call."""
    micro = mono // 1000
    return micro * 300 + random.Random(f"{key} {micro}").randrange(300)
