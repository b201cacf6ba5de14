"""The reader of the energy that engines' processes have beyond their GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from wattspan.attribution.packed_attributions import GroupStep
from wattspan.inference.host_energy import HostCounter
from wattspan.model import IDLE_PART, HwType, Payer
from wattspan.service.energy_history import EnergyHistory
from wattspan.spans.interval_pool import CounterStep


class HostStepReader:
    """Reads the steps of CPUs and memory, and of idle energy if requests have a share of it.

    For one thread.
    """

    def __init__(self, history: EnergyHistory, *, share_idle: bool) -> None:
        self._history, self._share_idle = history, share_idle
        self._read: dict[str, int] = {}  # end of the last read step, by domain
        self.left: frozenset[str] = frozenset()
        """The devices that had left the cover at the last reading: no steps of them are missing."""

    def reread(self, since: int, domains: Collection[str] | None = None) -> None:
        """Read the steps from ``since`` on again, by default those of all devices."""
        for key in self._read.keys() if domains is None else self._read.keys() & domains:
            self._read[key] = min(self._read[key], since)

    def read(
        self,
        groups: Sequence[frozenset[Payer]],
        boards: Sequence[Collection[str]],
        gpus: Mapping[str, Sequence[GroupStep]],
        since: int,
        least: int = 0,
    ) -> list[dict[HostCounter, list[CounterStep]]]:
        """The new steps of each group of processes.

        ``boards`` are the GPUs of each, of which ``gpus`` are the new steps. A device is read from
        ``since`` on the first time, and never from before ``least``. A device without
        new steps has none. A step is blurred if a part of its energy is unknown.
        """
        found: list[dict[HostCounter, list[CounterStep]]] = [{} for _ in groups]
        self.left = self._history.left
        for kind in (HwType.CPU, HwType.MEMORY):
            devices = self._history.group_steps(
                groups, lambda key: max(least, self._read.get(key, since)), kind
            )
            domains = self._history.domains()
            domains = {key: one for key, one in domains.items() if key not in self.left}
            # A device may have left the cover, or lost what it measures, since it was read.
            present = {domains[key].resource for key in devices if key in domains}
            for key, domain in domains.items():
                if domain.hw_type is kind and domain.resource not in present:
                    for own in found:
                        own[HostCounter(key, kind)] = []
            for key, steps in devices.items():
                self._read[key] = steps[-1].end
                for i, own in enumerate(found):
                    own[HostCounter(key, kind)] = [
                        CounterStep(one.start, one.end, one.energies[i], one.withheld)
                        for one in steps
                    ]
                    self._add_idle(own, key, steps, i)
        for i, own in enumerate(found):
            for key in gpus.keys() & set(boards[i]):
                self._add_idle(own, key, [one for one in gpus[key] if one.end > least], i)
        return found

    def _add_idle(
        self,
        own: dict[HostCounter, list[CounterStep]],
        key: str,
        steps: Sequence[GroupStep],
        group: int,
    ) -> None:
        """Add the share of a group of processes in the idle energy of a device."""
        if self._share_idle:
            own[HostCounter(key, IDLE_PART)] = [
                CounterStep(one.start, one.end, one.idles[group], one.withheld) for one in steps
            ]
