"""The ``estimate`` source plugin: CPU energy from a load model, for hosts without a counter.

The curve is that of Fan, Weber and Barroso, "Power Provisioning for a Warehouse-sized Computer"
(ISCA 2007): idle + (busy - idle) * (2u - u**r), where u is the busy fraction of the CPUs and r
was fitted to 1.4 over several hundred servers. At r = 1 it is the straight line.

The plugin is off by default, and its figures are labelled ``estimated``. Their accuracy is in
docs/reference/estimate.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wattspan.model import (
    SECOND,
    Domain,
    Failure,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Provenance,
    Reading,
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
from wattspan.sources.rapl.sysfs import ENERGY_FILE, scan_zones


@dataclass(frozen=True, slots=True)
class LoadModel:
    """``idle`` and ``busy`` are milliwatts of one socket; ``curvature`` is the r above, 1 to 2.

    Beyond 2 the curve would fall before full load, below 1 it would start below idle.
    """

    idle: Milliwatts
    busy: Milliwatts
    curvature: float = 1.4

    def __post_init__(self) -> None:
        if not 0 <= self.idle <= self.busy:
            raise ValueError("idle power must lie between 0 and the power at full load")
        if not 1 <= self.curvature <= 2:
            raise ValueError("the curvature must lie between 1 and 2")

    def power(self, busy: int, capacity: int) -> Milliwatts:
        """The power while ``busy`` of ``capacity`` nanoseconds of CPU time were spent."""
        load = min(1.0, max(0.0, busy / capacity)) if capacity > 0 else 0.0
        shape = 2 * load - load**self.curvature
        return Milliwatts(round(self.idle + (self.busy - self.idle) * shape))


class ProcStatFile:
    """``/proc/stat``, held open. Moves in clock ticks: 10 ms."""

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be opened."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    def busy(self) -> dict[int, int]:
        """Nanoseconds each online CPU has been busy; ValueError if the file makes no sense."""
        ticks = busy_ticks(os.pread(self._fd, 1 << 20, 0))
        if not ticks:
            raise ValueError(f"{self.path} names no CPU")
        return {cpu: busy * self._tick for cpu, busy in ticks.items()}

    def close(self) -> None:
        os.close(self._fd)


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


def sockets_of_cpus(sysfs: Path, cpus: Iterable[int]) -> dict[int, int]:
    """The socket of each CPU; 0 where the host does not know it (some virtual machines say -1)."""
    return {cpu: _socket(sysfs / f"devices/system/cpu/cpu{cpu}/topology") for cpu in cpus}


def _socket(topology: Path) -> int:
    try:
        return max(0, int((topology / "physical_package_id").read_text()))
    except (OSError, ValueError):
        return 0


NAME = "estimate"


class EstimateSettings(Table, frozen=True):
    """CPU energy estimated from load, for a host without a counter; off by default."""

    enabled: Annotated[bool, about("Whether to estimate.")] = False
    tdp_watts: Annotated[
        float, about("Power of one busy socket; required, there is no default.")
    ] = 0.0
    idle_fraction: Annotated[
        float, about("Power of an idle socket, as a fraction of `tdp_watts`.")
    ] = 0.3
    curvature: Annotated[
        float, about("Curvature of power over load: from 1, a straight line, to 2.")
    ] = 1.4
    dram_gigabytes: Annotated[
        float, about("The host's memory; 0 leaves memory out of the estimate.")
    ] = 0.0
    dram_watts_per_gigabyte: Annotated[float, about("Constant power of memory.")] = 0.375
    procfs: Annotated[
        str, about("Mount point of procfs; in a container, that of the host's procfs.")
    ] = "/proc"
    sysfs: Annotated[
        str, about("Mount point of sysfs; in a container, that of the host's sysfs.")
    ] = "/sys"


@dataclass(slots=True)
class _DomainEnergy:
    """The modelled energy of one domain so far."""

    domain: Domain
    energy: int = 0  # microjoules


class EstimateSource:
    """A CounterSource whose counters are sums of modelled power.

    ``dram`` is the constant power of the memory in milliwatts; 0 for no such domain.

    It yields readings once a second at most: the underlying CPU times move in steps of 10 ms, and a
    curve applied to their noise would be biased.
    """

    def __init__(
        self,
        stat: ProcStatFile,
        clock: Clock,
        model: LoadModel,
        *,
        sockets: Mapping[int, int],
        dram: int = 0,
        beside_counters: bool = False,
        provenance: Provenance = Provenance.ESTIMATED,
    ) -> None:
        self._stat = stat
        self._clock = clock
        self._model = model
        self._socket_of = sockets
        self._dram = dram
        self._before: tuple[Instant, dict[int, int]] | None = None

        def domain(path: str, hw_type: HwType, resource: str, method: str, what: str) -> Domain:
            why = f"{what}, estimated from load: this host has no counter that can be read"
            if beside_counters:
                why = f"{what}, estimated from load although there are counters"
            return Domain(
                id=f"{NAME}:{path}",
                hw_type=hw_type,
                name=path,
                source=NAME,
                provenance=provenance,
                in_cover=not beside_counters,
                resource=None if beside_counters else resource,
                method="none" if beside_counters else method,
                resolution=SECOND,
                why=why,
            )

        self._packages = {
            socket: _DomainEnergy(
                domain(f"package-{socket}", HwType.CPU, f"cpu:{socket}", "cpu-time", "the package")
            )
            for socket in sorted(set(sockets.values()))
        }
        self._memory = (
            _DomainEnergy(
                domain("dram", HwType.MEMORY, "cpu", "cpu-time-proxy", "memory by its size")
            )
            if dram
            else None
        )
        accounts = [*self._packages.values(), *([self._memory] if self._memory else [])]
        self._accounts = tuple(accounts)
        self._domains = tuple(account.domain for account in accounts)

    @property
    def name(self) -> str:
        return NAME

    def read(self) -> Batch:
        at = self._clock.now()
        if self._before is not None and at.mono - self._before[0].mono < SECOND:
            return Batch(self._domains)
        try:
            busy = self._stat.busy()
        except (OSError, ValueError) as error:
            failure = Failure(
                NAME, str(self._stat.path), Trouble.RETRY, str(error), "It is read again."
            )
            return Batch(self._domains, failures=(failure,))
        if self._before is not None:
            self._add(at, busy)
        self._before = (at, busy)
        readings = tuple(Reading(a.domain.id, at, Microjoules(a.energy)) for a in self._accounts)
        return Batch(self._domains, readings)

    def close(self) -> None:
        self._stat.close()

    def _add(self, at: Instant, busy: dict[int, int]) -> None:
        assert self._before is not None  # noqa: S101 - the caller has looked
        then, before = self._before
        duration = at.mono - then.mono
        for socket, account in self._packages.items():
            cpus = [cpu for cpu in busy if cpu in before and self._socket_of.get(cpu, 0) == socket]
            spent = sum(max(0, busy[cpu] - before[cpu]) for cpu in cpus)
            power = self._model.power(spent, duration * len(cpus))
            account.energy += energy_at(power, duration)
        if self._memory is not None:
            self._memory.energy += energy_at(self._dram, duration)


def open_estimate(settings: EstimateSettings, context: SourceContext) -> CounterSource | None:
    """The source; None unless it is enabled.

    ConfigError where the model's figures are missing or cannot be, SourceError where the CPU
    times cannot be read. Beside readable counters it stays out of the cover: nothing is counted
    twice, and the estimate can be held against the measurement.
    """
    if not settings.enabled:
        return None
    if settings.tdp_watts <= 0:
        raise ConfigError(
            "Cannot estimate CPU energy: sources.estimate.tdp_watts is not set. Write the "
            "processor's thermal design power in watts, as its maker's data sheet gives it."
        )
    try:
        busy = Milliwatts(round(settings.tdp_watts * 1000))
        idle = Milliwatts(round(busy * settings.idle_fraction))
        model = LoadModel(idle, busy, settings.curvature)
    except ValueError as error:
        raise ConfigError(f"Cannot estimate CPU energy: {error} in [sources.estimate].") from None
    sysfs = context.sysfs or Path(settings.sysfs)
    try:
        stat = ProcStatFile(Path(settings.procfs) / "stat")
        cpus = stat.busy()
    except (OSError, ValueError) as error:
        raise SourceError(
            f"Cannot estimate CPU energy: CPU times are not available: {error}. "
            "Check sources.estimate.procfs."
        ) from None
    return EstimateSource(
        stat,
        context.clock,
        model,
        sockets=sockets_of_cpus(sysfs, cpus),
        dram=round(settings.dram_gigabytes * settings.dram_watts_per_gigabyte * 1000),
        beside_counters=_has_counter(sysfs),
        provenance=Provenance.EMULATED if context.emulated else Provenance.ESTIMATED,
    )


def _has_counter(sysfs: Path) -> bool:
    """True if a counter of this host can be read."""
    for path in scan_zones(sysfs).zones.values():
        try:
            if (path / ENERGY_FILE).read_bytes().strip().isdigit():
                return True
        except OSError:
            continue
    return False


plugin = SourcePlugin(settings=EstimateSettings, open=open_estimate)
