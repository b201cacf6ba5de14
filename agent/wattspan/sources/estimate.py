"""The ``estimate`` source plugin: CPU energy from a load model, for hosts without a counter.

The curve is that of Fan, Weber and Barroso, "Power Provisioning for a Warehouse-sized Computer"
(ISCA 2007): idle + (busy - idle) * (2u - u**r), where u is the busy fraction of the CPUs and r
was fitted to 1.4 over several hundred servers. At r = 1 it is the straight line.

The plugin is off by default, and its figures are labelled ``estimated``. Their accuracy is in
docs/reference/estimate.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wattspan.model import (
    CPU_TIME,
    CPU_TIME_PROXY,
    SECOND,
    Domain,
    Failure,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Provenance,
    Reading,
    Thing,
    ThingKind,
    Trouble,
    energy_at,
)
from wattspan.model.settings import Table, about
from wattspan.ports import (
    Batch,
    Clock,
    ConfigError,
    CounterSource,
    SourceContext,
    SourceError,
    SourcePlugin,
)
from wattspan.sources.driver_thread import CallInterval
from wattspan.util.cpu_topology import CpuTopology, parse_cpu_list
from wattspan.util.files import file_text


@dataclass(frozen=True, slots=True)
class LoadModel:
    """``idle`` and ``busy`` are milliwatts of one socket; ``curvature`` is the r above."""

    idle: Milliwatts
    busy: Milliwatts
    curvature: float = 1.4

    def power(self, busy: int, capacity: int) -> Milliwatts:
        """The power while ``busy`` of ``capacity`` nanoseconds of CPU time were spent."""
        load = min(1.0, max(0.0, busy / capacity)) if capacity > 0 else 0.0
        shape = 2 * load - load**self.curvature
        return Milliwatts(round(self.idle + (self.busy - self.idle) * shape))


def busy_times(stat: Path) -> dict[int, int]:
    """Nanoseconds each online CPU has been busy, in steps of clock ticks: 10 ms.

    OSError if ``stat`` cannot be read, ValueError if it names no CPU.
    """
    ticks = busy_ticks(stat.read_bytes())
    if not ticks:
        raise ValueError(f"{stat} names no CPU")
    tick = SECOND // os.sysconf("SC_CLK_TCK")
    return {cpu: busy * tick for cpu, busy in ticks.items()}


def busy_ticks(stat: bytes) -> dict[int, int]:
    """Busy ticks by CPU: user, nice, system and interrupts.

    Not idle, waiting, or stolen by the hypervisor; guest time is in user already.
    """
    busy = {}
    for line in stat.splitlines():
        label, *fields = line.split()
        if not label.startswith(b"cpu"):
            break  # the CPUs come first
        if label != b"cpu":
            user, nice, system, _idle, _iowait, irq, softirq = (int(f) for f in fields[:7])
            busy[int(label[3:])] = user + nice + system + irq + softirq
    return busy


NAME = "estimate"


class EstimateSettings(Table, frozen=True):
    """CPU energy estimated from load, for a host without a counter; off by default.

    Keys:
        enabled: Estimate the energy of CPUs without a counter.
        tdp_watts: Power of one busy socket; required, there is no default.
        idle_fraction: Power of an idle socket, as a fraction of `tdp_watts`.
        curvature: Curvature of power over load; 1 is a straight line.
        dram_gigabytes: The host's memory; 0 leaves memory out of the estimate.
        dram_watts_per_gigabyte: Constant power of memory.
        procfs: Mount point of procfs; in a container, that of the host's procfs.
        sysfs: Mount point of sysfs; in a container, that of the host's sysfs.
    """

    enabled: bool = False
    tdp_watts: Annotated[float, about(least=0)] = 0.0
    idle_fraction: Annotated[float, about(least=0, most=1)] = 0.3
    # Beyond 2 the curve would fall before full load, below 1 it would start below idle.
    curvature: Annotated[float, about(least=1, most=2)] = 1.4
    dram_gigabytes: Annotated[float, about(least=0)] = 0.0
    dram_watts_per_gigabyte: Annotated[float, about(least=0)] = 0.375
    procfs: str = "/proc"
    sysfs: str = "/sys"


class EstimateSource:
    """A CounterSource whose counters are sums of modelled power.

    ``dram`` is the constant power of the memory in milliwatts; 0 for no such domain. All CPUs are
    one socket where no package is known to ``cpus``.

    It yields readings once a second at most: the underlying CPU times move in steps of 10 ms, and a
    curve applied to their noise would be biased.
    """

    name = NAME

    def __init__(
        self,
        stat: Path,
        clock: Clock,
        model: LoadModel,
        *,
        cpus: CpuTopology,
        dram: int = 0,
        provenance: Provenance = Provenance.ESTIMATED,
    ) -> None:
        self._stat = stat
        self._clock = clock
        self._model = model
        self._cpus = cpus
        self._dram = dram
        self._before: tuple[Instant, dict[int, int]] | None = None
        self._pace = CallInterval(SECOND, clock)

        def domain(
            thing: Thing, path: str, hw_type: HwType, resource: str, method: str, why: str
        ) -> Domain:
            return Domain(
                id=f"{NAME}:{path}",
                hw_type=hw_type,
                name=path,
                source=NAME,
                provenance=provenance,
                resource=resource,
                method=method,
                resolution=SECOND,
                why=f"{why}, estimated from load",
                measures=thing,
                modelled=True,
            )

        self._of_memory: tuple[Domain, ...] = ()
        if dram:
            memory = ("dram", HwType.MEMORY, "cpu", CPU_TIME_PROXY, "memory by its size")
            self._of_memory = (domain(Thing(ThingKind.MEMORY), *memory),)
        self._package = lambda socket: domain(
            Thing(ThingKind.SOCKET, socket),
            f"package-{socket}",
            HwType.CPU,
            f"cpu:{socket}" if cpus.known else "cpu",
            CPU_TIME,
            "the package",
        )
        self._domains = self._present()
        self._energies: dict[str, int] = {}  # microjoules, by domain id

    def _present(self) -> tuple[Domain, ...]:
        return (*map(self._package, self._cpus.sockets), *self._of_memory)

    def read(self) -> Batch:
        at = self._clock.now()
        if not self._pace.begin(at.mono, forced=self._before is None):
            return Batch(self._domains)
        try:
            with self._pace:
                busy = busy_times(self._stat)
        except (OSError, ValueError) as error:
            failure = Failure(NAME, str(self._stat), Trouble.RETRY, str(error), "It is read again.")
            return Batch(self._domains, failures=(failure,))
        if self._cpus.refresh() and (present := self._present()) != self._domains:
            self._domains = present
        if self._before is not None:
            then, before = self._before
            duration = at.mono - then.mono
            powers = (*self._package_powers(before, busy, duration), self._dram)
            for domain, power in zip(self._domains, powers, strict=False):
                energy = self._energies.get(domain.id, 0)
                self._energies[domain.id] = energy + energy_at(power, duration)
        self._before = (at, busy)
        readings = tuple(
            Reading(domain.id, at, Microjoules(self._energies.get(domain.id, 0)))
            for domain in self._domains
        )
        return Batch(self._domains, readings)

    def close(self) -> None:
        """Forget the CPU times: the next read starts again."""
        self._before = None

    def _package_powers(
        self, before: Mapping[int, int], busy: Mapping[int, int], duration: int
    ) -> Iterator[Milliwatts]:
        """The power of each socket, in order, over ``duration`` nanoseconds."""
        for socket in self._cpus.sockets:
            cpus = [cpu for cpu in busy if cpu in before and self._cpus.socket_of(cpu) == socket]
            spent = sum(max(0, busy[cpu] - before[cpu]) for cpu in cpus)
            yield self._model.power(spent, duration * len(cpus))


def _sockets_of(procfs: Path, sysfs: Path) -> CpuTopology:
    """The sockets of the host; of a virtual machine with one core in each, all CPUs together.

    Some hypervisors make a socket of each virtual CPU, whatever the processor has. ARM and RISC-V
    ("Features" and "isa" in cpuinfo) do not tell a guest; no host of theirs has such sockets. Linux
    before 5.19 takes the clusters in their device tree for packages; its sockets have own nodes.
    """
    cpus = CpuTopology(sysfs)
    siblings = file_text(sysfs / "devices/system/cpu/cpu0/topology/thread_siblings_list")
    threads = len([*parse_cpu_list(siblings)]) or 1
    alone = max(cpus.capacity().values()) <= threads
    guest = r"^(flags\b.*\bhypervisor|Features|isa)\b"
    virtual = re.search(guest, file_text(procfs / "cpuinfo"), re.MULTILINE)
    clusters = any((sysfs / "firmware/devicetree/base/cpus/cpu-map").glob("cluster*"))
    one = clusters or (virtual and alone)
    return CpuTopology(Path(os.devnull)) if one and len(cpus.sockets) > 1 else cpus


def open_estimate(settings: EstimateSettings, context: SourceContext) -> CounterSource | None:
    """The source; None unless it is enabled.

    ConfigError without ``tdp_watts``, SourceError where the CPU times cannot be read. Where a
    counter of the same package is read, the cover has that counter, and the estimate can be
    compared with it.
    """
    if not settings.enabled:
        return None
    if settings.tdp_watts <= 0:
        raise ConfigError(
            "Cannot estimate CPU energy: sources.estimate.tdp_watts is not set. Write the "
            "processor's thermal design power in watts, as its maker's data sheet gives it."
        )
    busy = Milliwatts(round(settings.tdp_watts * 1000))
    idle = Milliwatts(round(busy * settings.idle_fraction))
    sysfs = context.sysfs or Path(settings.sysfs)
    stat = Path(settings.procfs) / "stat"
    try:
        busy_times(stat)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"Cannot estimate CPU energy: CPU times are not available: {error}. "
            "Check sources.estimate.procfs."
        ) from None
    return EstimateSource(
        stat,
        context.clock,
        LoadModel(idle, busy, settings.curvature),
        cpus=CpuTopology(sysfs) if context.emulated else _sockets_of(Path(settings.procfs), sysfs),
        dram=round(settings.dram_gigabytes * settings.dram_watts_per_gigabyte * 1000),
        provenance=Provenance.EMULATED if context.emulated else Provenance.ESTIMATED,
    )


def estimate_advice(settings: EstimateSettings) -> Iterator[str]:
    """A sentence for each root that this host does not have."""
    for key, root in (("procfs", settings.procfs), ("sysfs", settings.sysfs)):
        if settings.enabled and not Path(root).is_dir():
            yield f"sources.estimate.{key}: there is no directory {root}"


plugin = SourcePlugin(settings=EstimateSettings, open=open_estimate, advice=estimate_advice)
