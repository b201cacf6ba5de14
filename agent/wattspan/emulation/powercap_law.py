"""The law by which an emulated host turns CPU time into energy.

Pure and linear, so that the energy of any process is known exactly from its CPU time: a socket
draws its idle power always, and a fixed number of joules for each second that a CPU is busy. Under
a power limit each busy second costs less, by the same part for every process, and gets less done.
No real processor is that simple; that is the point, the truth is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattspan.emulation.powercap_layout import Meter
from wattspan.model import Microjoules, energy_at


@dataclass(frozen=True, slots=True)
class CpuLaw:
    """Milliwatts: at idle by socket, and on top for each busy CPU (so millijoules a CPU-second).

    ``board_idle`` is what psys sees beyond packages and memory. ``core_percent`` of the active
    package energy is the cores', ``uncore_percent`` of its idle energy the uncore's.
    """

    package_idle: int = 42_000
    package_active: int = 9_000
    dram_idle: int = 6_000
    dram_active: int = 1_500
    board_idle: int = 35_000
    core_percent: int = 75
    uncore_percent: int = 10

    def active(self, kind: str, cpu_ns: int) -> Microjoules:
        """The energy that ``cpu_ns`` of CPU time add to the ``package`` or ``dram`` counters."""
        power = {"package": self.package_active, "dram": self.dram_active}[kind]
        return energy_at(power, cpu_ns)

    def picojoules(
        self,
        meter: Meter,
        elapsed: int,
        busy: Sequence[int],
        cpus: Sequence[int],
        paid: Sequence[int] | None = None,
    ) -> int:
        """What ``meter`` has counted after ``elapsed`` ns, in 1e-12 J, exactly.

        ``busy`` is the CPU time of each socket since the start, ``cpus`` how many CPUs it has.
        ``paid`` is the part of that time whose active energy the package spent: all of it,
        unless a power limit slowed its CPUs down.
        """
        socket = meter.socket
        paid = busy if paid is None else paid
        if meter.kind == "psys":
            boards = self.board_idle * elapsed
            return boards + sum(
                self.picojoules(Meter(kind, number), elapsed, busy, cpus, paid)
                for number in range(len(busy))
                for kind in ("package", "dram")
            )
        whole = {
            "package": self.package_idle * elapsed + self.package_active * paid[socket],
            "dram": self.dram_idle * elapsed + self.dram_active * busy[socket],
            "core": self.package_active * paid[socket] * self.core_percent // 100,
            "lead-core": self.package_active
            * paid[socket]
            * self.core_percent
            // (100 * max(1, cpus[socket])),
            "uncore": self.package_idle * elapsed * self.uncore_percent // 100,
        }[meter.kind]
        # Cumulative thirds of a whole: the parts add up to it exactly.
        return whole * (meter.die + 1) // meter.dies - whole * meter.die // meter.dies
